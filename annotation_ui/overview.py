"""What a lead wants to know: progress, speed, agreement, where labelers disagree. Lists of plain rows; no page here."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime
from statistics import fmean, median
from typing import Any

from sqlalchemy import Integer, case, cast, func, select
from sqlalchemy.orm import Session

from annotation_ui import agreement
from annotation_ui.export import Judged, judged
from annotation_ui.schema import Assignment, Batch, Item, Judgment, User
from annotation_ui.tasks import TASKS, Json
from annotation_ui.tasks.base import excerpt
from annotation_ui.tasks.rank import pairwise_agreement

DAY = 86_400


def progress(session: Session) -> list[Json]:
    """One row a batch. Slots are items times overlap; gold items, which have no end, are left out."""
    slots = select(Item.batch_id, func.count(), func.sum(Item.needed)).where(Item.gold.is_(None))
    slots = slots.group_by(Item.batch_id)
    wanted = {batch_id: (items, needed) for batch_id, items, needed in session.execute(slots)}
    counted_as = case((Assignment.current_id.is_not(None), "done"), else_=Assignment.state).label("counted_as")
    counted = (
        select(Assignment.batch_id, counted_as, func.count())
        .join(Item, Item.id == Assignment.item_id)
        .where(Item.gold.is_(None), ~Assignment.adjudication)
        .group_by(Assignment.batch_id, counted_as.name)
    )
    states: dict[int, dict[str, int]] = defaultdict(dict)
    for batch_id, state, count in session.execute(counted):
        states[batch_id][state] = count
    rows = []
    for batch in session.scalars(select(Batch).order_by(Batch.priority.desc(), Batch.id)):
        items, needed = wanted.get(batch.id, (0, 0))
        done = states[batch.id].get("done", 0)
        rows.append(
            {
                "batch": batch.name,
                "task": batch.task,
                "open": batch.open,
                "priority": batch.priority,
                "overlap": batch.overlap,
                "items": items,
                "done": done,
                "of": int(needed or 0),
                "percent": round(100 * done / needed, 1) if needed else 100.0,
                "in work": states[batch.id].get("leased", 0),
                "skipped": states[batch.id].get("skipped", 0),
            }
        )
    return rows


def per_day(session: Session, task: str, days: int = 30) -> list[Json]:
    """Judgments handed in, by day (UTC) and labeler."""
    number = cast(Judgment.created_at, Integer) // DAY
    query = (
        select(number, User.name, func.count())
        .join(User, User.id == Judgment.user_id)
        .join(Assignment, Assignment.current_id == Judgment.id)
        .where(Assignment.task == task, Judgment.created_at > time.time() - days * DAY)
        .group_by(number, User.name)
        .order_by(number)
    )
    return [
        {"day": datetime.fromtimestamp(day * DAY, UTC).strftime("%Y-%m-%d"), "labeler": name, "judgments": count}
        for day, name, count in session.execute(query)
    ]


def coefficients(session: Session, task: str, batches: tuple[str, ...] = ()) -> list[Json]:
    """Agreement of a task's labelers: one row a measure."""
    by_item = _by_item(_of_labelers(session, task, batches))
    if task == "rank":
        rankings = _field(by_item, "ranks")
        measured = {
            "Krippendorff's alpha of ranks (ordinal)": agreement.alpha(agreement.ranking_units(rankings), "ordinal"),
            "Krippendorff's alpha of ratings (ordinal)": agreement.alpha(
                agreement.ranking_units(_field(by_item, "ratings")), "ordinal"
            ),
            "Pairwise agreement (ties count)": agreement.pairwise(rankings),
        }
    elif task == "compare":
        choices = _field(by_item, "choice")
        measured = {
            "Fleiss' kappa": agreement.kappa(choices),
            "Krippendorff's alpha (nominal)": agreement.alpha(choices, "nominal"),
        }
    elif task == "rules":
        measured = {}
        for rule, values in _by_rule(by_item).items():
            measured[f"Fleiss' kappa: {rule}"] = agreement.kappa(values)
            measured[f"Krippendorff's alpha (nominal): {rule}"] = agreement.alpha(values, "nominal")
    else:
        measured = {}
    shared = sum(len(said) > 1 for said in by_item.values())
    return [{"measure": name, "value": _rounded(value), "shared items": shared} for name, value in measured.items()]


def labelers(session: Session, task: str, batches: tuple[str, ...] = ()) -> list[Json]:
    """One row a labeler: how much, how fast, how far with the others and with the known answers."""
    found = _of_labelers(session, task, batches)
    by_item = _by_item(found)
    against = agreement.each_against_rest(by_item, _same(task)) if task in ("rank", "rules", "compare") else {}
    names = dict(session.execute(select(User.pseudonym, User.name)).all())
    mine: dict[str, list[Judged]] = defaultdict(list)
    for each in found:
        mine[each.labeler].append(each)
    rows = []
    for labeler, work in sorted(mine.items()):
        gold = [TASKS[task].agrees_with_gold(each.answer, each.item.gold) for each in work if each.item.gold]
        known = [share for share in gold if share is not None]
        rows.append(
            {
                "labeler": names[labeler],
                "exported as": labeler,
                "judgments": len(work),
                "median seconds": round(median(each.judgment.seconds for each in work), 1),
                "with the others": _rounded(against.get(labeler)),
                "on gold": _rounded(fmean(known) if known else None),
                "gold items": len(known),
            }
        )
    return rows


def disagreements(session: Session, task: str, batches: tuple[str, ...] = (), limit: int = 50) -> list[Json]:
    """The items on which labelers differ most, worst first; decided ones are left out."""
    decided = {each.item.id for each in judged(session, (task,), batches) if each.adjudicated}
    items: dict[int, Item] = {}
    by_item = _by_item(_of_labelers(session, task, batches), items)
    same = _same(task)
    rows = []
    for item_id, said in by_item.items():
        scores = agreement.each_against_rest({item_id: said}, same).values()
        known = [score for score in scores if score is not None]
        if known and fmean(known) < 1 and item_id not in decided:
            item = items[item_id]
            shown = {"item": item_id, "id": item.external_id or "", "agreement": _rounded(fmean(known))}
            rows.append({**shown, "labelers": len(said), "prompt": excerpt(item.content["prompt"])})
    return sorted(rows, key=lambda row: row["agreement"])[:limit]


def win_rates(session: Session, batches: tuple[str, ...] = ()) -> list[Json]:
    """For each model of the Compare task: wins, ties, losses; a tie or both bad is half a win."""
    counts: dict[str, dict[str, int]] = defaultdict(lambda: {"wins": 0, "ties": 0, "losses": 0})
    for each in judged(session, ("compare",), batches):
        models, choice = each.item.content.get("model") or ["first", "second"], each.answer["choice"]
        for side, model in zip("AB", models, strict=True):
            kind = "ties" if choice not in ("A", "B") else "wins" if choice == side else "losses"
            counts[str(model)][kind] += 1
    return [
        {"model": model, **said, "win rate": _rounded((said["wins"] + said["ties"] / 2) / sum(said.values()))}
        for model, said in sorted(counts.items())
    ]


def _of_labelers(session: Session, task: str, batches: tuple[str, ...]) -> list[Judged]:
    return [each for each in judged(session, (task,), batches) if not each.adjudicated]


def _by_item(found: list[Judged], items: dict[int, Item] | None = None) -> dict[Any, dict[str, Json]]:
    by_item: dict[Any, dict[str, Json]] = defaultdict(dict)
    for each in found:
        by_item[each.item.id][each.labeler] = each.answer
        if items is not None:
            items[each.item.id] = each.item
    return by_item


def _field(by_item: dict[Any, dict[str, Json]], field: str) -> dict[Any, dict[str, Any]]:
    return {item: {name: answer[field] for name, answer in said.items()} for item, said in by_item.items()}


def _by_rule(by_item: dict[Any, dict[str, Json]]) -> dict[str, dict[Any, dict[str, str]]]:
    rules: dict[str, dict[Any, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for item, said in by_item.items():
        for labeler, answer in said.items():
            for rule, judgment in answer["verdicts"].items():
                rules[rule][item][labeler] = judgment["verdict"]
    return rules


def _same(task: str) -> Callable[[Json, Json], float]:
    """How far two answers to one item agree, 0 to 1."""
    return {
        "rank": lambda one, two: pairwise_agreement(one["ranks"], two["ranks"]),
        "compare": lambda one, two: float(one["choice"] == two["choice"]),
        "rules": lambda one, two: fmean(
            one["verdicts"][rule]["verdict"] == two["verdicts"][rule]["verdict"] for rule in one["verdicts"]
        ),
    }[task]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
