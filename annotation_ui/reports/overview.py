"""Tables for the lead: progress, speed, agreement, disagreements and win rates, each as a list of plain rows."""

import time
from collections import Counter, defaultdict
from datetime import UTC, datetime
from statistics import fmean
from typing import Any

from sqlalchemy import Integer, case, cast, func, select
from sqlalchemy.orm import Session

from annotation_ui.reports import agreement
from annotation_ui.reports.browsing import count_stuck
from annotation_ui.store.current_judgments import CurrentJudgment, current_judgments
from annotation_ui.store.schema import Assignment, Batch, Item, Judgment, User
from annotation_ui.tasks import TASKS, Json
from annotation_ui.tasks.fields import excerpt

DAY = 86_400  # seconds


def progress(session: Session) -> list[Json]:
    """One row per batch. Slots are items times labelers per item; gold items, which everyone gets, are left out.

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
    """Judgments submitted in the last 30 days, by day (UTC) and labeler; training is not counted.

    Args:
        most: number of labelers to list, the busiest ones; the others are combined, if there is more than one.
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
    """Agreement of a task's labelers: one row per measure.

    Items with a known answer are left out, as in exports: everybody gets them, and their answer is clear.
    """
    by_item = answers_by_item([each for each in labelers_judgments(session, task) if each.item.gold is None])
    scales = agreement.scales_of(TASKS[task], by_item)
    measured: dict[str, float | None] = {}
    for (scale, level), values in scales.items():
        if level == "ordinal":
            name = f"Krippendorff's alpha of {scale} (ordinal)"
            measured[name] = agreement.krippendorff_alpha(values, "ordinal")
        else:
            suffix = f": {scale}" if scale else ""
            measured[f"Fleiss' kappa{suffix}"] = agreement.fleiss_kappa(values)
            measured[f"Krippendorff's alpha (nominal){suffix}"] = agreement.krippendorff_alpha(values, "nominal")
    if any(level == "ordinal" for _, level in scales):
        measured["Pairwise agreement (ties count)"] = agreement.mean_similarity(by_item, TASKS[task].similarity)
    shared = sum(len(by_labeler) > 1 for by_labeler in by_item.values())
    return [{"measure": name, "value": rounded(value), "shared items": shared} for name, value in measured.items()]


def disagreements(session: Session, task: str, limit: int | None = 50) -> list[Json]:
    """The items on which labelers differ most, lowest agreement first.

    Items that a lead decided, or whose answer was known before, are left out.
    """
    all_judgments = [each for each in current_judgments(session, (task,)) if each.item.gold is None]
    decided = {each.item.id for each in all_judgments if each.adjudicated}
    judgments = [each for each in all_judgments if each.item.id not in decided]
    items = {judgment.item.id: judgment.item for judgment in judgments}
    rows = []
    for item_id, by_labeler in answers_by_item(judgments).items():
        scores = agreement.agreement_with_others({item_id: by_labeler}, TASKS[task].similarity).values()
        known = [score for score in scores if score is not None]
        if known and fmean(known) < 1:
            item = items[item_id]
            shown = {"item": item_id, "id": item.external_id or "", "agreement": rounded(fmean(known))}
            rows.append({**shown, "labelers": len(by_labeler), "prompt": excerpt(item.content["prompt"])})
    return sorted(rows, key=lambda row: row["agreement"])[:limit]


def win_rates(session: Session) -> list[Json]:
    """Wins, ties and losses of each model in the Compare task; a tie or "both bad" counts as half a win.

    Items with a known answer are left out, as in exports: who wins there was decided before. A lead's decision counts
    instead of the labelers' answers to its item.
    """
    counts: dict[str, dict[str, int]] = defaultdict(lambda: {"wins": 0, "ties": 0, "losses": 0})
    judgments = [each for each in current_judgments(session, ("compare",)) if each.item.gold is None]
    decisions = {each.item.id: each for each in judgments if each.adjudicated}  # the last one of several leads
    for judgment in judgments:
        if decisions.get(judgment.item.id, judgment) is not judgment:
            continue
        content, choice = judgment.item.content, judgment.answer["choice"]
        models, more = content.get("model") or ["first", "second"], content.get("also_by") or [[], []]
        for side, model, others in zip("AB", models, more, strict=True):
            outcome = "ties" if choice not in ("A", "B") else "wins" if choice == side else "losses"
            for name in (model, *others):
                counts[str(name)][outcome] += 1
    return [
        {"model": model, **count, "win rate": rounded((count["wins"] + count["ties"] / 2) / sum(count.values()))}
        for model, count in sorted(counts.items())
    ]


def labelers_judgments(session: Session, task: str) -> list[CurrentJudgment]:
    """The judgments that count, without the leads' decisions and without training."""
    judgments = current_judgments(session, (task,))
    return [each for each in judgments if not each.adjudicated and each.item.purpose != "training"]


def answers_by_item(judgments: list[CurrentJudgment]) -> dict[Any, dict[str, Json]]:
    """Item id -> labeler -> answer."""
    by_item: dict[Any, dict[str, Json]] = defaultdict(dict)
    for judgment in judgments:
        by_item[judgment.item.id][judgment.labeler] = judgment.answer
    return by_item


def rounded(value: float | None) -> float | None:
    """Round a number to three digits; None stays None."""
    return None if value is None else round(value, 3)
