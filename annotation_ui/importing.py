"""Prompts and samples into batches of items: JSON Lines, one row an item (or a few), each mistake with its line.

A row is `{"prompt": ...}` or what `align sample` writes, `{"prompt", "responses", "model", "id"}`. A known answer under
`gold` makes the item a gold item, which every labeler gets once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import insert, select

from align.errors import UserError
from annotation_ui import rule_sets
from annotation_ui.database import Database
from annotation_ui.leases import GOLD_SLOTS
from annotation_ui.schema import TASKS as TASK_NAMES
from annotation_ui.schema import Batch, Item
from annotation_ui.tasks import TASKS, BadInputError, Json, Task
from annotation_ui.tasks.base import text_field

MAX_BYTES = 256 * 1024 * 1024
MAX_OVERLAP = 1000
_CHUNK = 1000


@dataclass(frozen=True)
class NewBatch:
    """What the lead chooses for a batch. `settings`: rules, one_rule_each, min_words, max_words, checkpoint."""

    name: str
    task: str
    overlap: int = 1
    priority: int = 0
    rule_set: str | None = None
    settings: Json = field(default_factory=dict)


def import_file(database: Database, batch: NewBatch, path: Path, name: str = "") -> int:
    """Make the batch from a file; all of it or, on the first bad row, nothing. Returns the number of items.

    Errors call the file by `name` (default: its path).
    """
    name = name or str(path)
    if path.suffix.lower() != ".jsonl":
        raise UserError(f"{name}: not a .jsonl file (one JSON object a line)")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UserError(f"{name}: larger than {MAX_BYTES // 2**20} MiB; split it into several batches")
        with path.open(encoding="utf-8") as lines:
            return import_rows(database, batch, read_rows(lines, name))
    except OSError as error:
        raise UserError(f"{name}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{name}: not UTF-8 text") from None


def read_rows(lines: Iterable[str], file: str) -> Iterator[tuple[str, Json]]:
    """(where, row) of each line."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise UserError(f"{where}: not JSON") from None
        if not isinstance(row, dict):
            raise UserError(f"{where}: must be an object")
        yield where, row


def import_rows(database: Database, new: NewBatch, rows: Iterable[tuple[str, Json]]) -> int:
    """Make a batch of rows; all or nothing."""
    if new.task not in TASK_NAMES:
        raise UserError(f"task {new.task!r}: must be one of {', '.join(TASK_NAMES)}")
    if not new.name.strip() or len(new.name) > 128:
        raise UserError("a batch needs a name of at most 128 characters")
    if not 1 <= new.overlap <= MAX_OVERLAP:
        raise UserError(f"overlap {new.overlap}: must be 1 to {MAX_OVERLAP}")
    task = TASKS[new.task]
    with database.write() as session:
        if session.scalar(select(Batch.id).where(Batch.name == new.name)) is not None:
            raise UserError(f"there is a batch {new.name!r} already")
        rule_set = rule_sets.newest(session, new.rule_set) if new.rule_set else None
        if rule_set is None and (new.rule_set or task.needs_rules):
            raise UserError(f"no rule set {new.rule_set!r}: import its file first" if new.rule_set else "name a rule set")
        batch = Batch(
            name=new.name,
            task=new.task,
            overlap=new.overlap,
            priority=new.priority,
            rule_set_id=rule_set.id if rule_set else None,
            settings=new.settings,
        )
        session.add(batch)
        session.flush()
        rules = rule_set.content["rules"] if rule_set else []
        count, chunk = 0, []
        for item in _items(task, batch, rules, rows):
            chunk.append({**item, "batch_id": batch.id, "position": count})
            count += 1
            if len(chunk) == _CHUNK:
                session.execute(insert(Item), chunk)
                chunk = []
        if chunk:
            session.execute(insert(Item), chunk)
        if count == 0:
            raise UserError("there is no row in it")
        return count


def change_batch(database: Database, name: str, overlap: int, priority: int, is_open: bool) -> None:
    """Change what may change of a batch; a lower overlap takes no judgment away."""
    with database.write() as session:
        batch = session.scalar(select(Batch).where(Batch.name == name))
        if batch is None:
            raise UserError("choose a batch first")
        if not 1 <= overlap <= MAX_OVERLAP:
            raise UserError(f"overlap {overlap}: must be 1 to {MAX_OVERLAP}")
        if overlap != batch.overlap:
            for item in session.scalars(select(Item).where(Item.batch_id == batch.id, Item.gold.is_(None))):
                item.needed, item.returned = max(overlap, item.taken), True  # found again by those who have passed it
        batch.overlap, batch.priority, batch.open = overlap, priority, is_open


def _items(task: Task, batch: Batch, rules: list[Json], rows: Iterable[tuple[str, Json]]) -> Iterator[Json]:
    for where, row in rows:
        try:
            contents = task.contents(row, batch.settings, rules)
            gold = _gold(task, row.get("gold"), contents)
            external_id = None if row.get("id") is None else text_field({"id": str(row["id"])}, "id").replace("\0", "")
        except BadInputError as error:
            raise UserError(f"{where}: {error}") from None
        for content in contents:
            yield {
                "external_id": external_id,
                "content": content,
                "gold": gold,
                "needed": batch.overlap if gold is None else GOLD_SLOTS,
                "taken": 0,
                "returned": False,
            }


def _gold(task: Task, gold: Any, contents: list[Json]) -> Json | None:
    """The known answer of a row, in the item's own order."""
    if gold is None:
        return None
    if not isinstance(gold, dict):
        raise BadInputError("gold: must be an object")
    if task.name == "rank":
        return {"ranks": task.check(gold, contents[0], [])["ranks"]}
    if task.name == "compare":
        return task.check(gold, contents[0], [])
    verdicts = gold.get("verdicts")
    if task.name != "rules" or not isinstance(verdicts, dict):
        raise BadInputError(f"gold: not possible here for task {task.name}")
    return {"verdicts": verdicts}
