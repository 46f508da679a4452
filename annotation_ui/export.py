"""Judgments out of the database as the rows that training reads (docs/data.md), with a manifest of what they are.

Raw rows are one labeler's each; aggregated rows are one an item: the lead's decision where there is one, else the mean
rank or the majority. Labelers appear by pseudonym only.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from align.errors import UserError
from annotation_ui.aggregate import combine
from annotation_ui.database import Database
from annotation_ui.schema import Assignment, Batch, Export, Item, Judgment, RuleSet, User
from annotation_ui.tasks import TASKS, Json

# record -> the tasks whose judgments make it
RECORDS = {
    "rankings": ("rank", "compare"),
    "pairs": ("rank", "compare"),
    "rule_judgments": ("rules", "probe"),
    "demonstrations": ("demonstrate",),
}
FORMATS = ("jsonl", "parquet", "csv")
VERSION = 1  # of the manifest


@dataclass(frozen=True)
class Selection:
    """What to export. `since` is seconds since 1970; `batches` empty means all."""

    record: str
    aggregated: bool = False
    since: float | None = None
    batches: tuple[str, ...] = ()
    include_gold: bool = False
    all_tied: bool = False  # rankings that tie everything: nothing to learn from, and training refuses them

    def check(self) -> None:
        if self.record not in RECORDS:
            raise UserError(f"record {self.record!r}: must be one of {', '.join(RECORDS)}")


@dataclass(frozen=True)
class Judged:
    """One judgment that counts, its answer in the item's own order."""

    item: Item
    batch: Batch
    judgment: Judgment
    labeler: str
    answer: Json
    adjudicated: bool


def export(database: Database, selection: Selection, path: Path, user_id: int | None = None) -> Json:
    """Write `path` (format by its suffix) and `path`.manifest.json; returns the manifest."""
    selection.check()
    kind = path.suffix.lstrip(".")
    if kind not in FORMATS:
        raise UserError(f"{path}: the name must end in {', '.join('.' + name for name in FORMATS)}")
    with database.read() as session:
        judged = list(_judged(session, selection))
        rows, left_out = _rows(selection, judged)
        manifest = {**_manifest(session, selection, judged, rows), "all_tied_left_out": left_out}
    content = {"jsonl": _jsonl, "parquet": _parquet, "csv": _csv}[kind](rows)
    manifest["file"] = {"name": path.name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    _write(path, content)
    _write(path.with_name(path.name + ".manifest.json"), json.dumps(manifest, indent=2, sort_keys=True).encode())
    with database.write() as session:
        session.add(Export(user_id=user_id, manifest=manifest))
    return manifest


def rows_of(database: Database, selection: Selection) -> list[Json]:
    """The rows that `export` would write."""
    selection.check()
    with database.read() as session:
        judged = list(_judged(session, selection))
    return _rows(selection, judged)[0]


def judged(
    session: Session, tasks: tuple[str, ...], batches: tuple[str, ...] = (), since: float | None = None
) -> list[Judged]:
    """All judgments that count, in the order of their items and then of their making."""
    query = (
        select(Item, Batch, Judgment, User.pseudonym, Assignment.adjudication)
        .select_from(Assignment)
        .join(Judgment, Judgment.id == Assignment.current_id)
        .join(Item, Item.id == Assignment.item_id)
        .join(Batch, Batch.id == Assignment.batch_id)
        .join(User, User.id == Assignment.user_id)
        .where(Assignment.task.in_(tasks))
        .order_by(Batch.id, Item.position, Judgment.id)
    )
    if batches:
        query = query.where(Batch.name.in_(batches))
    if since is not None:
        query = query.where(Judgment.created_at >= since)
    return [
        Judged(item, batch, judgment, name, _canonical(batch, judgment), adjudicated)
        for item, batch, judgment, name, adjudicated in session.execute(query)
    ]


def _canonical(batch: Batch, judgment: Judgment) -> Json:
    return TASKS[batch.task].canonical(judgment.answer or {}, judgment.shown_order)


def _judged(session: Session, selection: Selection) -> Iterator[Judged]:
    for each in judged(session, RECORDS[selection.record], selection.batches, selection.since):
        if selection.include_gold or each.item.gold is None:
            yield each


def _rows(selection: Selection, judged: list[Judged]) -> tuple[list[Json], int]:
    """The rows, and how many rankings were left out because they tie everything."""
    rows = list(_aggregated(selection, judged) if selection.aggregated else _raw(selection, judged))
    if selection.record != "rankings" or selection.all_tied:
        return rows, 0
    kept = [row for row in rows if len(set(row["ranks"])) > 1]
    return kept, len(rows) - len(kept)


def _raw(selection: Selection, judged: list[Judged]) -> Iterator[Json]:
    for each in judged:
        for row in TASKS[each.batch.task].rows(each.item.content, each.answer):
            yield from _as_record(selection.record, {**row, "labeler": each.labeler, "id": _id(each.item)})


def _aggregated(selection: Selection, judged: list[Judged]) -> Iterator[Json]:
    items: dict[int, list[Judged]] = {}
    for each in judged:
        items.setdefault(each.item.id, []).append(each)
    for group in items.values():
        item, task = group[0].item, TASKS[group[0].batch.task]
        decided = [each for each in group if each.adjudicated]
        for answer in combine(task.name, [each.answer for each in decided[-1:] or group]):
            for row in task.rows(item.content, answer):
                yield from _as_record(selection.record, {**row, "id": _id(item)})


def _as_record(record: str, row: Json) -> Iterator[Json]:
    if record != "pairs":
        yield row
        return
    more: Json = {field: row[field] for field in ("labeler", "id") if field in row}
    for i, j in combinations(range(len(row["ranks"])), 2):
        if row["ranks"][i] == row["ranks"][j]:
            continue  # a tie prefers neither
        better, worse = (i, j) if row["ranks"][i] < row["ranks"][j] else (j, i)
        chosen, rejected = row["responses"][better], row["responses"][worse]
        yield {"prompt": row["prompt"], "chosen": chosen, "rejected": rejected, **more}


def _id(item: Item) -> str:
    return item.external_id or f"item-{item.id}"


def _manifest(session: Session, selection: Selection, judged: list[Judged], rows: list[Json]) -> Json:
    rule_sets = {each.judgment.rule_set_id for each in judged} - {None}
    named = session.scalars(select(RuleSet).where(RuleSet.id.in_(rule_sets)))
    moments = [each.judgment.created_at for each in judged]
    return {
        "version": VERSION,
        "made_at": time.time(),
        "selection": {**asdict(selection), "batches": list(selection.batches)},
        "rows": len(rows),
        "judgments": len(judged),
        "adjudicated": sum(each.adjudicated for each in judged),
        "items": len({each.item.id for each in judged}),
        "batches": sorted({each.batch.name for each in judged}),
        "labelers": sorted({each.labeler for each in judged}),
        "first_judgment_at": min(moments, default=None),
        "last_judgment_at": max(moments, default=None),
        "last_judgment_id": max((each.judgment.id for each in judged), default=None),
        "rule_sets": [{"name": row.name, "sha256": row.digest} for row in named],
        "guidelines": sorted({each.judgment.guideline_id for each in judged} - {None}),
        "aggregation": "adjudicated, else mean rank / majority" if selection.aggregated else None,
    }


def _jsonl(rows: list[Json]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def _parquet(rows: list[Json]) -> bytes:
    """Messages stay lists; a prompt column of both texts and lists becomes all lists."""
    import pyarrow
    import pyarrow.parquet

    from annotation_ui.markdown import as_messages

    if len({isinstance(row["prompt"], str) for row in rows}) > 1:
        rows = [{**row, "prompt": as_messages(row["prompt"])} for row in rows]
    columns = sorted({field for row in rows for field in row})
    table = pyarrow.Table.from_pylist([{field: row.get(field) for field in columns} for row in rows])
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(table, buffer)
    return buffer.getvalue()


def _csv(rows: list[Json]) -> bytes:
    """For a spreadsheet, not for training: no cell can be taken for a formula."""
    columns = sorted({field for row in rows for field in row})
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(columns)
    for row in rows:
        writer.writerow([plain_cell(row.get(field)) for field in columns])
    return text.getvalue().encode()


def plain_cell(value: Any) -> str:
    """Text that a spreadsheet shows and never runs."""
    text = "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"'{text}" if text.lstrip()[:1] in ("=", "+", "-", "@") or text[:1] in ("\t", "\r", "\n") else text


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all: a temporary file, fsync, rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)
