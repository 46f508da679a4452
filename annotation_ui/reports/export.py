"""Exports judgments as training data (docs/data.md), with a manifest.

A raw row is one labeler's judgment. An aggregated row combines all judgments of an item: a lead's decision replaces them,
and otherwise the mean rank or the majority is used. Labelers are identified only by pseudonym.
"""

import hashlib
import json
import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from align.core.errors import UserError
from annotation_ui.reports.reliability import preference_matrices
from annotation_ui.reports.row_files import FORMATS, write_file
from annotation_ui.store.audit import SHELL, Actor, record
from annotation_ui.store.current_judgments import CurrentJudgment, current_judgments
from annotation_ui.store.database import Database
from annotation_ui.store.schema import Assignment, Batch, Export, Guideline, Item, Judgment, RuleSet
from annotation_ui.tasks import TASKS, Json, Task

SKIPS = "skips"  # skipped items of all tasks, with reasons; not training data
DEMONSTRATIONS = "demonstrations"
MANIFEST_VERSION = 1
_FEW = 500  # maximum number of items to name in a query; for more, the query reads all ids


def records() -> dict[str, tuple[str, ...]]:
    """Map each kind of record to the tasks whose judgments can be exported as it."""
    kinds = dict.fromkeys(kind for task in TASKS.values() for kind in task.records)
    tasks = {kind: tuple(name for name, task in TASKS.items() if kind in task.records) for kind in kinds}
    return {**tasks, SKIPS: tuple(TASKS)}


@dataclass(frozen=True)
class Selection:
    """Selection and format of an export.

    Attributes:
        record: key of `records()`.
        aggregated: whether to write one row per item instead of one per judgment.
        since: earliest time of judgments, in seconds since 1970. Also includes judgments restored by an undo since then, and
            all judgments of an item that a lead decided since then. An aggregated export includes all judgments of each item
            that has a selected judgment.
        batches: names of batches. Default: all batches.
        include_gold: whether to include items with a known answer.
        preferences: whether to add, to aggregated rankings, the probability of each preference between two responses, given
            labelers' reliability.
        times: whether to add the time of each judgment (UTC), its active seconds, and the version of the guidelines shown.
    """

    record: str
    aggregated: bool = False
    since: float | None = None
    batches: Sequence[str] = ()
    include_gold: bool = False
    preferences: bool = False
    times: bool = False

    def check(self) -> None:
        """Raise UserError for an invalid selection."""
        if self.record not in records():
            raise UserError(f"record {self.record!r}: must be one of {', '.join(records())}")
        if self.preferences and not (self.aggregated and self.record == "rankings"):
            raise UserError("preferences need several labelers' rankings of an item: export rankings, aggregated")
        if self.times and self.aggregated:
            raise UserError("times are those of single judgments: leave `aggregated` out")


def export(database: Database, selection: Selection, path: Path, by: Actor = SHELL) -> Json:
    """Write `path`, in the format of its suffix (`FORMATS`), and `path`.manifest.json. Return the manifest.

    The export and its manifest are recorded in the database.
    """
    selection.check()
    suffix = path.suffix.lstrip(".")
    if suffix not in FORMATS:
        raise UserError(f"{path}: the name must end in {', '.join('.' + name for name in FORMATS)}")
    with database.read() as session:
        judgments = _selected_judgments(session, selection)
        rows = _rows_of_judgments(session, selection, judgments)
        manifest = _manifest(session, selection, judgments, rows)
    content = FORMATS[suffix](rows)
    manifest["file"] = {"name": path.name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    write_file(path, content)
    write_file(path.with_name(path.name + ".manifest.json"), json.dumps(manifest, indent=2, sort_keys=True).encode())
    with database.write() as session:
        session.add(Export(user_id=by.user_id, manifest=manifest))
        record(session, "export", {"record": selection.record, "file": path.name, "rows": len(rows)}, by)
    return manifest


def rows_to_export(database: Database, selection: Selection) -> list[Json]:
    """Return the rows that `export` would write."""
    selection.check()
    with database.read() as session:
        return _rows_of_judgments(session, selection, _selected_judgments(session, selection))


def check_batches(session: Session, names: Sequence[str]) -> None:
    """Raise UserError if a batch does not exist."""
    known = session.scalars(select(Batch.name).where(Batch.name.in_(names))).all() if names else []
    for name in names:
        if name not in known:
            raise UserError(f"no batch {name!r}")


def _selected_judgments(session: Session, selection: Selection) -> list[CurrentJudgment]:
    check_batches(session, selection.batches)
    tasks, skips = records()[selection.record], selection.record == SKIPS
    judgments = current_judgments(session, tasks, selection.batches, skips=skips)
    wanted = [judgment for judgment in judgments if selection.include_gold or judgment.item.gold is None]
    since = selection.since or 0
    undone = select(Judgment.assignment_id).where(Judgment.kind == "undo", Judgment.created_at >= since)
    again = set(session.scalars(undone)) if since else set()  # an undo has restored the earlier answer
    later = [each for each in wanted if each.judgment.created_at >= since or each.judgment.assignment_id in again]
    items = _newly_decided(session, since) if since else set()
    if selection.aggregated:
        items |= {judgment.item.id for judgment in later}  # an answer must combine all judgments of its item
    later_ids = {judgment.judgment.id for judgment in later}
    return [each for each in wanted if each.judgment.id in later_ids or each.item.id in items]


def _newly_decided(session: Session, since: float) -> set[int]:
    """Return the ids of items with a lead's decision made, changed or undone since then."""
    changed = select(Judgment.item_id).join(Assignment, Assignment.id == Judgment.assignment_id)
    return set(
        session.scalars(changed.where(Assignment.adjudication, Judgment.created_at >= since, Judgment.kind != "skip"))
    )


def _rows_of_judgments(session: Session, selection: Selection, judgments: list[CurrentJudgment]) -> list[Json]:
    ids = exported_ids(session, (judgment.item for judgment in judgments))
    if selection.record == SKIPS:
        return [{**_skip_row(judgment, ids), **_times(selection, judgment)} for judgment in judgments]
    write = _aggregated_rows if selection.aggregated else _raw_rows
    return list(write(selection, judgments, ids))


def _skip_row(skip: CurrentJudgment, ids: dict[int, str]) -> Json:
    row = {"prompt": skip.item.content["prompt"], "task": skip.batch.task, "reason": skip.answer.get("reason", "")}
    return {**row, "labeler": skip.labeler, "id": ids[skip.item.id]}


def _raw_rows(selection: Selection, judgments: list[CurrentJudgment], ids: dict[int, str]) -> Iterator[Json]:
    """Yield the rows of each answer. A lead's decision and the answers that it overrules are marked.

    Demonstrations are not marked as overruled: overruling a labeler's ranking does not invalidate the response they wrote.
    """
    for judgment in judgments:
        item, task = judgment.item, TASKS[judgment.batch.task]
        marks = {"decision": True} if judgment.adjudicated else {}
        if judgment.overruled and selection.record != DEMONSTRATIONS:
            marks["overruled"] = True
        for row in _records_of_answer(selection.record, task, item, judgment.answer, judgment.rules):
            yield {**row, "labeler": judgment.labeler, **marks, "id": ids[item.id], **_times(selection, judgment)}


def _times(selection: Selection, judgment: CurrentJudgment) -> Json:
    stored = judgment.judgment
    at = datetime.fromtimestamp(stored.created_at, UTC).isoformat(timespec="seconds")
    shown = {} if judgment.guidelines is None else {"guidelines": judgment.guidelines}
    return {"judged_at": at, "seconds": round(stored.seconds, 1), **shown} if selection.times else {}


def _aggregated_rows(selection: Selection, judgments: list[CurrentJudgment], ids: dict[int, str]) -> Iterator[Json]:
    """Yield the rows of one combined answer per item, or of all answers if the task cannot combine answers."""
    by_item: dict[int, list[CurrentJudgment]] = {}
    for judgment in judgments:
        by_item.setdefault(judgment.item.id, []).append(judgment)
    preferences = _preferences(judgments) if selection.preferences else {}
    for group in by_item.values():
        item, task = group[0].item, TASKS[group[0].batch.task]
        is_decided = any(judgment.adjudicated for judgment in group)
        item_preferences = {} if is_decided else preferences.get(item.id, {})  # a decision is certain
        answers = [judgment.answer for judgment in group if not judgment.overruled]
        combined = task.combine(answers)
        for answer in answers if combined is None else [combined]:
            for row in _records_of_answer(selection.record, task, item, answer, group[-1].rules):
                yield {**row, **item_preferences, "id": ids[item.id]}


def _records_of_answer(record: str, task: Task, item: Item, answer: Json, rules: Sequence[Json]) -> Iterator[Json]:
    """Yield the rows of one answer as records of a kind, with the item's category."""
    category = {"category": item.content["category"]} if "category" in item.content else {}
    for row in task.records_of(record, item.content, answer, rules):
        yield {**row, **category}


def _preferences(judgments: list[CurrentJudgment]) -> dict[int, Json]:
    """Map items to their `preferences` field, if labelers share items.

    Reliability is estimated separately for each task, and only from labelers' judgments, not from leads' decisions.
    """
    by_task: dict[str, dict[Hashable, dict[str, list[int]]]] = {}
    for each in judgments:
        if not each.adjudicated:
            (row,) = TASKS[each.batch.task].rows(each.item.content, each.answer)
            by_task.setdefault(each.batch.task, {}).setdefault(each.item.id, {})[each.labeler] = row["ranks"]
    found: dict[int, Json] = {}
    for rankings in by_task.values():
        for item, matrix in preference_matrices(rankings).items():
            found[cast(int, item)] = {"preferences": matrix}
    return found


def exported_ids(session: Session, items: Iterable[Item]) -> dict[int, str]:
    """Map items to their exported ids. By default, this is the id of the imported row.

    Several imports can contain the same id, such as the row numbers written by `align sample`. From the second import on,
    the exported id is `ID@BATCH`. BATCH is the number of the batch, which does not change when the batch is renamed.
    """
    wanted = {item.id: item for item in items}
    plain = {number: item.external_id or f"item-{number}" for number, item in wanted.items()}
    longer = {number: f"{plain[number]}@{item.batch_id}" for number, item in wanted.items()}
    query = select(Item.external_id, func.min(Item.batch_id)).where(Item.external_id.is_not(None))
    if len(wanted) <= _FEW:
        query = query.where(Item.external_id.in_({*plain.values(), *longer.values()}))
    first = dict(session.execute(query.group_by(Item.external_id)).all())
    ids = {}
    for number, item in wanted.items():
        used_before = item.external_id is None or first[item.external_id] != item.batch_id
        chosen = longer[number] if used_before and plain[number] in first else plain[number]
        while chosen != plain[number] and chosen in first:
            chosen += f"@{item.batch_id}"
        ids[number] = chosen
    return ids


def _manifest(session: Session, selection: Selection, judgments: list[CurrentJudgment], rows: list[Json]) -> Json:
    rule_set_ids = {each.judgment.rule_set_id for each in judgments} - {None}
    rule_sets = session.scalars(select(RuleSet).where(RuleSet.id.in_(rule_set_ids)))
    guideline_ids = {each.judgment.guideline_id: each.guidelines for each in judgments if each.guidelines}
    guidelines = session.scalars(select(Guideline).where(Guideline.id.in_(guideline_ids)).order_by(Guideline.id))
    times = [each.judgment.created_at for each in judgments]
    return {
        "version": MANIFEST_VERSION,
        "made_at": time.time(),
        "selection": {**asdict(selection), "batches": list(selection.batches)},
        "rows": len(rows),
        "judgments": len(judgments),
        "adjudicated": sum(each.adjudicated for each in judgments),
        "items": len({each.item.id for each in judgments}),
        "batches": sorted({each.batch.name for each in judgments}),
        "labelers": sorted({each.labeler for each in judgments}),
        "first_judgment_at": min(times, default=None),
        "last_judgment_at": max(times, default=None),
        "last_judgment_id": max((each.judgment.id for each in judgments), default=None),
        "rule_sets": [{"name": row.name, "sha256": row.digest} for row in rule_sets],
        "guidelines": [
            {
                "task": row.task,
                "version": guideline_ids[row.id],
                "text": row.text,
                "sha256": hashlib.sha256(row.text.encode()).hexdigest(),
            }
            for row in guidelines
        ],
        "aggregation": "adjudicated, else mean rank / majority" if selection.aggregated else None,
        "preferences": "one-coin Dawid and Skene" if selection.preferences else None,
    }
