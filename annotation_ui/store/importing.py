"""Imports JSON Lines files of prompts or samples as batches. Errors name the line.

A row is `{"prompt": ...}` or the output of `align sample`, `{"prompt", "responses", "model", "id"}`. Most tasks create one
item per row. A row with a known answer (`gold`) is an attention item, which is mixed into every labeler's work. With
`"training": true`, it is a training item, which comes before the work, and `explanation` is shown after the answer.
"""

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from sqlalchemy import delete, insert, select
from sqlalchemy.orm import Session

from align.core.errors import UserError
from annotation_ui.store import rule_sets
from annotation_ui.store.audit import SHELL, Actor, record
from annotation_ui.store.batches import check_name, check_numbers, name_taken_error, set_labelers
from annotation_ui.store.database import Database
from annotation_ui.store.leases import GOLD_SLOTS, TRAINING_FIRST
from annotation_ui.store.schema import Batch, BatchLabeler, Item
from annotation_ui.tasks import TASKS, BadInputError, Json, Task
from annotation_ui.tasks.fields import text_field

MAX_BYTES = 256 * 1024 * 1024
MAX_ROW = 2_000_000  # characters; a row is rendered and sent to the browser at once
_CHUNK = 500  # items per transaction, which blocks other writers on SQLite
_REMOVE_CHUNK = 2000


@dataclass(frozen=True)
class NewBatch:
    """Options of a new batch. `BatchSettings` describes those not listed here.

    Attributes:
        task: key of `annotation_ui.tasks.TASKS`.
        rule_set: name of a stored rule set, if the task needs one.
        settings: settings of the task (`Task.settings`), and `attention_every`.
    """

    name: str
    task: str
    labelers_per_item: int = 1
    priority: int = 0
    rule_set: str | None = None
    settings: Json = field(default_factory=dict)
    labelers: tuple[str, ...] = ()


def import_file(database: Database, batch: NewBatch, path: Path, name: str = "", by: Actor = SHELL) -> int:
    """Import a file, all or nothing, and return the number of items. Errors name the file `name` (default: its path)."""
    name = name or str(path)
    if path.suffix.lower() != ".jsonl":
        raise UserError(f"{name}: not a .jsonl file (one JSON object per line)")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UserError(f"{name}: larger than {MAX_BYTES // 2**20} MiB; split it into several batches")
        with path.open(encoding="utf-8-sig") as lines:
            return import_rows(database, batch, parse_rows(lines, name), by)
    except OSError as error:
        raise UserError(f"{name}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{name}: not UTF-8 text") from None


def parse_rows(lines: Iterable[str], file: str) -> Iterator[tuple[str, Json]]:
    """Yield (FILE:LINE, row) for each nonblank line."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        if len(line) > MAX_ROW:
            raise UserError(f"{where}: longer than {MAX_ROW} characters")
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise UserError(f"{where}: not JSON") from None
        if not isinstance(row, dict):
            raise UserError(f"{where}: must be an object")
        yield where, row


def import_rows(database: Database, new: NewBatch, rows: Iterable[tuple[str, Json]], by: Actor = SHELL) -> int:
    """Import (where, row) pairs, all or nothing, and return the number of items.

    Items are stored in chunks so that labelers can write in between. No item is assigned before all are stored. If the
    process is killed, the import can be repeated under the same name.
    """
    batch, rules = _begin_batch(database, new)
    count, finished = 0, False
    purposes: set[str] = set()
    try:
        items = _items(TASKS[new.task], batch, rules, rows)
        while chunk := list(islice(items, _CHUNK)):
            _store_items(database, batch, chunk, count)
            count += len(chunk)
            purposes |= {item["purpose"] for item in chunk}
        if count == 0:
            raise UserError("the file has no rows")
        if purposes == {"attention"}:
            raise UserError('every row has "gold": attention items need other items (or set "training": true)')
        with database.write() as session:
            stored = _stored_batch(session, batch)
            stored.complete = stored.open = True
            record(session, "import", {"batch": batch.name, "items": count}, by)
        finished = True
    finally:
        if not finished:
            _remove_incomplete(database, batch.id)
    return count


def _begin_batch(database: Database, new: NewBatch) -> tuple[Batch, list[Json]]:
    """Create a closed batch without items. Return the batch and its rules."""
    if new.task not in TASKS:
        raise UserError(f"task {new.task!r}: must be one of {', '.join(TASKS)}")
    name = check_name(new.name)
    check_numbers(new.labelers_per_item, new.priority)
    if new.settings.get("attention_every", 1) < 1:
        raise UserError(f"attention_every {new.settings['attention_every']}: must be 1 or more")
    with database.read() as session:
        earlier = session.scalar(select(Batch).where(Batch.name == name))
    if earlier is not None and earlier.complete:
        raise name_taken_error(earlier)
    if earlier is not None:  # the import was killed; if it is still running, it fails
        _remove_incomplete(database, earlier.id)
    with database.write() as session:
        rule_set = rule_sets.newest(session, new.rule_set) if new.rule_set else None
        if rule_set is None and (new.rule_set or TASKS[new.task].needs_rules):
            raise UserError(f"no rule set {new.rule_set!r}; load it first" if new.rule_set else "this task needs a rule set")
        batch = Batch(
            name=name,
            task=new.task,
            labelers_per_item=new.labelers_per_item,
            priority=new.priority,
            open=False,
            complete=False,
            rule_set_id=rule_set.id if rule_set else None,
            settings=new.settings,
        )
        session.add(batch)
        session.flush()
        set_labelers(session, batch, new.labelers)
        return batch, rule_set.content["rules"] if rule_set else []


def _store_items(database: Database, batch: Batch, items: list[Json], first: int) -> None:
    start = time.monotonic()
    with database.write() as session:
        _stored_batch(session, batch)
        rows = [
            {**item, "batch_id": batch.id, "position": number - TRAINING_FIRST * (item["purpose"] == "training")}
            for number, item in enumerate(items, start=first)
        ]
        session.execute(insert(Item), rows)
    time.sleep(time.monotonic() - start)  # SQLite's other writers poll; give them as much time as this took


def _stored_batch(session: Session, batch: Batch) -> Batch:
    stored = session.get(Batch, batch.id)
    if stored is None:
        raise UserError(f"another import is using the name {batch.name!r}")
    return stored


def _remove_incomplete(database: Database, batch_id: int) -> None:
    """Remove a batch without assignments, in chunks of items."""
    while True:
        with database.write() as session:
            some = select(Item.id).where(Item.batch_id == batch_id).limit(_REMOVE_CHUNK)
            removed = session.execute(delete(Item).where(Item.id.in_(some)).execution_options(synchronize_session=False))
            if removed.rowcount == 0:  # type: ignore[attr-defined]
                session.execute(delete(BatchLabeler).where(BatchLabeler.batch_id == batch_id))
                session.execute(delete(Batch).where(Batch.id == batch_id, ~Batch.complete))
                return


def _items(task: Task, batch: Batch, rules: list[Json], rows: Iterable[tuple[str, Json]]) -> Iterator[Json]:
    """Convert imported rows to database rows of items. Repeated ids become `ID#2`, `ID#3` and so on."""
    ids: Counter[str] = Counter()
    for where, row in rows:
        try:
            contents = task.contents(row, batch.settings, rules)
            known_answers = _known_answers(task, row, contents)
            external_id = None if row.get("id") is None else text_field({"id": str(row["id"])}, "id").replace("\0", "")
            category = {"category": text_field(row, "category")} if row.get("category") is not None else {}
            purposes = [_purpose(row, answer) for answer in known_answers]
        except BadInputError as error:
            raise UserError(f"{where}: {error}") from None
        if external_id is not None:
            ids[external_id] += 1
            while ids[external_id] > 1:
                external_id = f"{external_id}#{ids[external_id]}"
                ids[external_id] += 1
        for content, answer, purpose in zip(contents, known_answers, purposes, strict=True):
            yield {
                "external_id": external_id,
                "content": {**content, **category},
                "gold": answer,
                "purpose": purpose,
                "needed": batch.labelers_per_item if answer is None else GOLD_SLOTS,
                "taken": 0,
                "returned": False,
            }


def _known_answers(task: Task, row: Json, contents: list[Json]) -> list[Json | None]:
    """Return the known answer of each item of a row, with the row's explanation if present."""
    if row.get("gold") is None:
        return [None] * len(contents)
    if not isinstance(row["gold"], dict):
        raise BadInputError("gold: must be an object")
    explanation = {"explanation": text_field(row, "explanation")} if "explanation" in row else {}
    return [known and {**known, **explanation} for known in task.known_answers(row["gold"], contents)]


def _purpose(row: Json, known_answer: Json | None) -> str:
    """Return the purpose of an item. Training and attention items have a known answer."""
    training = row.get("training", False)
    if not isinstance(training, bool):
        raise BadInputError("training: must be true or false")
    if training and known_answer is None:
        raise BadInputError("training: needs the known answer under `gold`, for each item of the row")
    return "training" if training else "work" if known_answer is None else "attention"
