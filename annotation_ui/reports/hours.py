"""Active hours of each labeler and day, as a basis for payment."""

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import UTC, date, datetime, timedelta
from functools import cache

from sqlalchemy import select
from sqlalchemy.orm import Session

from annotation_ui.store.schema import Judgment, User
from annotation_ui.tasks import Json

GAP_S = 300.0
"""Longest pause between two answers that counts as working time, in seconds."""
COLUMNS = ("day", "labeler", "exported as", "hours", "items")
_DAY = 86_400
_ANSWERS = ("submit", "late", "edit", "adjudicate")


def hours(session: Session, since: date | None = None, until: date | None = None, gap_seconds: float = GAP_S) -> list[Json]:
    """Return one row per day (UTC) and labeler with an answer or a skip, oldest day first.

    Each answer adds the active seconds measured by the page, ending when the answer is stored. Pauses of at most
    `gap_seconds` between answers count as working time. Overlapping times, for example of two windows, count once.

    An undone answer counts as time but not as an item. If it had replaced an earlier answer, the earlier answer counts as an
    item again. The time of a changed answer starts no earlier than the labeler's previous answer to the same item.

    Args:
        session: open session.
        since: first day. Default: no limit.
        until: last day. Default: no limit.
        gap_seconds: longest pause between two answers that counts as working time.
    """
    of_judgment = (Judgment.created_at, Judgment.seconds, Judgment.kind, Judgment.item_id, Judgment.assignment_id)
    query = (
        select(User.name, User.pseudonym, *of_judgment, Judgment.answer.is_(None))
        .join(User, User.id == Judgment.user_id)
        .order_by(User.name, Judgment.created_at, Judgment.id)
    )
    if since is not None:  # a pause that starts on the day before may extend into this day
        query = query.where(Judgment.created_at >= _midnight(since) - _DAY)
    if until is not None:
        query = query.where(Judgment.created_at < _midnight(until) + 2 * _DAY)
    spans: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    items: dict[tuple[str, str, date], set[int]] = defaultdict(set)
    decided_on: dict[int, list[date]] = defaultdict(list)  # by assignment: answers and skips that were not undone
    judged_until: dict[int, float] = {}  # by assignment
    for name, pseudonym, at, seconds, kind, item, assignment, nothing_left in session.execute(query):
        if kind == "undo":
            decided = decided_on[assignment]
            kept = [] if nothing_left else decided[:-1]
            for day in set(decided) - set(kept):
                items[name, pseudonym, day].discard(item)
            decided_on[assignment] = kept
            continue
        spans[name, pseudonym].append((max(at - seconds, judged_until.get(assignment, 0.0)), at))
        judged_until[assignment] = at
        judged = items[name, pseudonym, _day(at)]
        if kind != "late":
            decided_on[assignment].append(_day(at))
        if kind in _ANSWERS:
            judged.add(item)
    active: dict[tuple[str, str, date], float] = dict.fromkeys(items, 0.0)
    for (name, pseudonym), own in spans.items():
        for start, end in _joined(own, gap_seconds):
            for day, part in _by_day(start, end):
                active[name, pseudonym, day] = active.get((name, pseudonym, day), 0.0) + part
    return [
        {
            "day": day.isoformat(),
            "labeler": name,
            "exported as": pseudonym,
            "hours": round(seconds / 3600, 2),
            "items": len(items.get((name, pseudonym, day), ())),
        }
        for (name, pseudonym, day), seconds in sorted(active.items(), key=lambda each: (each[0][2], each[0][0]))
        if (since is None or day >= since) and (until is None or day <= until)
    ]


def today() -> date:
    """Return the current date in UTC."""
    return _day(time.time())


def _joined(spans: Iterable[tuple[float, float]], gap: float) -> Iterator[tuple[float, float]]:
    """Merge time spans that overlap or are at most `gap` seconds apart."""
    begun: float | None = None
    ended = 0.0
    for start, end in sorted(spans):
        if begun is None or start - ended > gap:
            if begun is not None:
                yield begun, ended
            begun, ended = start, end
        ended = max(ended, end)
    if begun is not None:
        yield begun, ended


def _by_day(start: float, end: float) -> Iterator[tuple[date, float]]:
    """Split a time span into (day, seconds)."""
    while start < end:
        day = _day(start)
        midnight = _midnight(day + timedelta(days=1))
        yield day, min(end, midnight) - start
        start = min(end, midnight)


def _day(moment: float) -> date:
    return _date(int(moment // _DAY))


@cache
def _date(days: int) -> date:
    """Return the date `days` days after 1970-01-01."""
    return date(1970, 1, 1) + timedelta(days=days)


def _midnight(day: date) -> float:
    return datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()
