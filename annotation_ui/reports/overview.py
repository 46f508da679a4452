"""Rows of the lead's tables: progress, judgments per day, agreement, disagreements and win rates."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from statistics import fmean

from sqlalchemy import Integer, case, cast, func, select
from sqlalchemy.orm import Session

from annotation_ui.reports import agreement
from annotation_ui.reports.browsing import count_stuck
from annotation_ui.reports.task_facts import TaskFacts, task_facts
from annotation_ui.store.schema import Assignment, Batch, Item, Judgment, User
from annotation_ui.tasks import Json
from annotation_ui.tasks.fields import excerpt

DAY = 86_400  # seconds


def progress(session: Session) -> list[Json]:
    """Return one row per batch.

    Slots are the judgments needed over all items. Items with a known answer are excluded, because every labeler gets them.
    A batch that is not complete is still being imported, or its import was killed.
    """
    slots = select(Item.batch_id, func.count(), func.sum(Item.needed)).where(Item.gold.is_(None))
    slots = slots.group_by(Item.batch_id)
    slots_by_batch = {batch_id: (items, needed) for batch_id, items, needed in session.execute(slots)}
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
    stuck = count_stuck(session)
    for batch in session.scalars(select(Batch).where(Batch.deleted_at.is_(None)).order_by(Batch.priority.desc(), Batch.id)):
        items, needed = slots_by_batch.get(batch.id, (0, 0))
        done = states[batch.id].get("done", 0)
        rows.append(
            {
                "batch": batch.name,
                "task": batch.task,
                "open": batch.open,
                "complete": batch.complete,
                "priority": batch.priority,
                "labelers_per_item": batch.labelers_per_item,
                "items": items,
                "done": done,
                "slots": int(needed or 0),
                "percent": round(100 * done / needed, 1) if needed else 100.0,
                "in progress": states[batch.id].get("leased", 0),
                "skipped": states[batch.id].get("skipped", 0),
                "stuck": stuck.get(batch.id, 0),
            }
        )
    return rows


def per_day(session: Session, task: str, most: int = 6) -> list[Json]:
    """Count judgments of the last 30 days by day (UTC) and labeler, without training items.

    Args:
        session: open session.
        task: key of `TASKS`.
        most: number of labelers to list, busiest first. If more than one labeler remains, they are combined.
    """
    number = cast(Judgment.created_at, Integer) // DAY
    query = (
        select(number, User.name, func.count())
        .join(User, User.id == Judgment.user_id)
        .join(Assignment, Assignment.current_id == Judgment.id)
        .join(Item, Item.id == Judgment.item_id)
        .where(Assignment.task == task, Item.purpose != "training", Judgment.created_at > time.time() - 30 * DAY)
        .group_by(number, User.name)
        .order_by(number)
    )
    rows = session.execute(query).all()
    totals: Counter[str] = Counter()
    for _, name, count in rows:
        totals[name] += count
    named = {name for name, _ in totals.most_common(most if len(totals) > most + 1 else None)}
    counts: Counter[tuple[int, str]] = Counter()
    for day, name, count in rows:
        counts[day, name if name in named else f"{len(totals) - most} others"] += count
    return [
        {"day": datetime.fromtimestamp(day * DAY, UTC).strftime("%Y-%m-%d"), "labeler": name, "judgments": count}
        for (day, name), count in counts.items()
    ]


def coefficients(session: Session, task: str) -> list[Json]:
    """Return the agreement of a task's labelers, one row per measure.

    Items with a known answer are excluded, as in exports. Every labeler gets them, and their answers are clear.
    """
    with task_facts(session, task) as facts:
        return facts.result("coefficients", lambda: _coefficients(facts))


def _coefficients(facts: TaskFacts) -> list[Json]:
    measured: dict[str, float | None] = {}
    for (scale, level), patterns in facts.units.items():
        if level == "ordinal":
            measured[f"Krippendorff's alpha of {scale} (ordinal)"] = agreement.krippendorff_alpha(patterns, "ordinal")
        else:
            suffix = f": {scale}" if scale else ""
            measured[f"Fleiss' kappa{suffix}"] = agreement.fleiss_kappa(patterns)
            measured[f"Krippendorff's alpha (nominal){suffix}"] = agreement.krippendorff_alpha(patterns, "nominal")
    unknown = [each for each in facts.items.values() if not each.is_known]
    if any(level == "ordinal" for _, level in facts.units):
        sums = (pair for each in unknown for pair in each.agreement.values())
        measured["Pairwise agreement (ties count)"] = agreement.mean_of_sums(sums)
    shared = sum(len(each.seconds) > 1 for each in unknown)
    return [{"measure": name, "value": rounded(value), "shared items": shared} for name, value in measured.items()]


def disagreeing_items(session: Session, task: str) -> list[tuple[int, float, int]]:
    """Return (item id, agreement, number of labelers) of items on which labelers disagree, lowest agreement first.

    Items that a lead has decided and items with a known answer are excluded.
    """
    with task_facts(session, task) as facts:
        return facts.result("disagreements", lambda: sorted(_disagreeing_items(facts), key=lambda row: (row[1], row[0])))


def _disagreeing_items(facts: TaskFacts) -> Iterator[tuple[int, float, int]]:
    for each in facts.items.values():
        if not each.is_known and not each.is_decided and len(each.agreement) > 1:
            score = fmean(total / count for total, count in each.agreement.values())
            if score < 1:
                yield each.item, score, len(each.agreement)


def disagreements(session: Session, task: str, limit: int = 50) -> list[Json]:
    """Return the first `limit` rows of `disagreeing_items`, with ids and prompts."""
    rows = disagreeing_items(session, task)[:limit]
    items = {item.id: item for item in session.scalars(select(Item).where(Item.id.in_([number for number, *_ in rows])))}
    return [
        {
            "item": number,
            "id": items[number].external_id or "",
            "agreement": rounded(score),
            "labelers": labelers,
            "prompt": excerpt(items[number].content["prompt"]),
        }
        for number, score, labelers in rows
    ]


def win_rates(session: Session) -> list[Json]:
    """Return wins, ties, losses and the win rate of each model in the Compare task.

    "Both bad" is a tie, and a tie counts as half a win. Items with a known answer are excluded, as in exports. A lead's
    decision replaces the labelers' answers to the item.
    """
    counts: dict[str, Counter[str]] = defaultdict(lambda: Counter(wins=0, ties=0, losses=0))
    with task_facts(session, "compare") as facts:
        for each in facts.items.values():
            for model, outcome in each.models:
                counts[str(model)][outcome] += 1
    return [
        {"model": model, **count, "win rate": rounded((count["wins"] + count["ties"] / 2) / count.total())}
        for model, count in sorted(counts.items())
    ]


def rounded(value: float | None) -> float | None:
    """Round a number to three decimal places. Return None for None."""
    return None if value is None else round(value, 3)
