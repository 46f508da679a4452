"""Lists of items and judgments, filtered by batch, labeler, state, flag and text.

The database only prefilters text and flags inside JSON. Each row is then compared in Python, so that field names and
escape sequences do not match.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from sqlalchemy import ColumnElement, Text, and_, cast, func, or_, select
from sqlalchemy.orm import Session, aliased

from annotation_ui.store.schema import Assignment, Batch, BatchLabeler, Item, Judgment, User
from annotation_ui.store.users import stored_name
from annotation_ui.tasks import TASKS, Json
from annotation_ui.tasks.fields import excerpt

PAGE = 50
STATES = {
    "": "any",
    "open": "needs judgments",
    "leased": "in progress",
    "done": "complete",
    "skipped": "skipped",
    "stuck": "stuck: no labelers left",
    "late": "has a late judgment",
    "decided": "decided by a lead",
}


@dataclass(frozen=True)
class Filter:
    """Filters of a list. An empty field matches everything.

    Attributes:
        batch: name of the batch.
        labeler: user who was assigned the item or made the judgment.
        state: key of `STATES`.
        flag: flag, verdict or choice in the answer.
        text: text in the prompt, the responses, the id or, for judgments, the answer. Case is ignored.
        purpose: purpose of the item.
    """

    batch: str = ""
    labeler: str = ""
    state: str = ""
    flag: str = ""
    text: str = ""
    purpose: str = ""


def browse_items(session: Session, wanted: Filter, after: int = 0, limit: int = PAGE) -> tuple[list[Json], bool]:
    """Return a page of items in import order, and whether more follow.

    Args:
        session: open session.
        wanted: filters.
        after: item id that ends the previous page.
        limit: maximum number of items.
    """
    query = select(Item, Batch).join(Batch, Batch.id == Item.batch_id).where(Item.id > after).order_by(Item.id)
    query = _narrowed(query, wanted, Item.content).where(*_item_conditions(wanted))
    found = [
        {
            "item": item.id,
            "id": item.external_id or "",
            "batch": batch.name,
            "prompt": excerpt(item.content["prompt"]),
            "purpose": item.purpose,
            "needs": item.needed if item.gold is None else None,
        }
        for item, batch in islice(_matching(session, query, wanted), limit + 1)
    ]
    rows, more = found[:limit], len(found) > limit
    states = _states_by_item(session, [row["item"] for row in rows])
    return [{**row, **states.get(row["item"], {"judged": 0, "open now": 0, "skipped": 0})} for row in rows], more


def browse_judgments(session: Session, wanted: Filter, before: int = 0, limit: int = PAGE) -> tuple[list[Json], bool]:
    """Return a page of judgments, skips and undos, newest first, and whether more follow.

    Args:
        session: open session.
        wanted: filters.
        before: judgment id that ends the previous page. If 0, start with the newest.
        limit: maximum number of rows.
    """
    query = (
        select(Item, Batch, Judgment, User.name, Assignment.current_id)
        .select_from(Judgment)
        .join(Item, Item.id == Judgment.item_id)
        .join(Batch, Batch.id == Item.batch_id)
        .join(User, User.id == Judgment.user_id)
        .join(Assignment, Assignment.id == Judgment.assignment_id)
        .order_by(Judgment.id.desc())
    )
    if before:
        query = query.where(Judgment.id < before)
    if wanted.flag:
        query = query.where(cast(Judgment.answer, Text).contains(json.dumps(wanted.flag), autoescape=True))
    if wanted.labeler:
        query = query.where(User.name == stored_name(wanted.labeler))
    query = query.where(*_item_conditions(Filter(state=wanted.state, batch=wanted.batch, purpose=wanted.purpose)))
    query = _narrowed(query, wanted, Item.content, Judgment.answer)
    found = [
        {
            **judgment_row(batch.task, judgment, name, judgment.id == current_id),
            "item": item.id,
            "prompt": excerpt(item.content["prompt"]),
        }
        for item, batch, judgment, name, current_id in islice(_matching(session, query, wanted), limit + 1)
    ]
    return found[:limit], len(found) > limit


def item_history(session: Session, item_id: int) -> tuple[Item, Batch, list[Json]] | None:
    """Return an item, its batch and its history (oldest first), or None if the item does not exist.

    In each row, `written` lists the text that the labeler wrote, if the judgment is current.
    """
    item = session.get(Item, item_id)
    if item is None:
        return None
    batch = session.get_one(Batch, item.batch_id)
    query = (
        select(Judgment, User.name, Assignment.current_id)
        .join(User, User.id == Judgment.user_id)
        .join(Assignment, Assignment.id == Judgment.assignment_id)
        .where(Judgment.item_id == item_id)
        .order_by(Judgment.id)
    )
    rows = [
        {
            **judgment_row(batch.task, judgment, name, judgment.id == current_id),
            "written": TASKS[batch.task].written(judgment.answer or {}) if judgment.id == current_id else (),
        }
        for judgment, name, current_id in session.execute(query)
    ]
    return item, batch, rows


def judgment_row(task: str, judgment: Judgment, name: str, is_current: bool) -> Json:
    """Return a judgment as a readable row, in the imported order of responses."""
    answer, summary, marks = judgment.answer or {}, "", set[str]()
    if judgment.kind == "skip":
        summary = answer.get("reason", "")
    elif answer:
        canonical = TASKS[task].canonical(answer, judgment.shown_order)
        summary, marks = TASKS[task].summary(canonical), TASKS[task].marks(canonical)
    return {
        "judgment": judgment.id,
        "labeler": name,
        "kind": judgment.kind,
        "counts": is_current,
        "answer": summary,
        "marks": ", ".join(sorted(marks)),
        "seconds": round(judgment.seconds, 1),
        "at": judgment.created_at,
    }


def stuck() -> ColumnElement[bool]:
    """Build the condition that an item needs judgments, but every eligible active labeler has already had it."""
    had = aliased(Assignment)
    had_it = select(had.id).where(had.item_id == Item.id, had.user_id == User.id, ~had.adjudication, had.state != "expired")
    named = select(BatchLabeler.user_id).where(BatchLabeler.batch_id == Item.batch_id).correlate(Item, User)
    may_get_it = and_(
        User.active, User.role == "labeler", or_(~named.exists(), named.where(BatchLabeler.user_id == User.id).exists())
    )
    left = select(User.id).where(may_get_it, ~had_it.correlate(Item, User).exists()).correlate(Item)
    held = aliased(Assignment)
    being_judged = select(held.id).where(held.item_id == Item.id, held.state == "leased", held.current_id.is_(None))
    return and_(Item.taken < Item.needed, Item.purpose == "work", ~left.exists(), ~being_judged.exists())


def count_stuck(session: Session) -> dict[int, int]:
    """Map ids of open batches to the number of stuck items."""
    query = select(Item.batch_id, func.count()).join(Batch, Batch.id == Item.batch_id).where(Batch.open, stuck())
    return dict(session.execute(query.group_by(Item.batch_id)).all())


def _item_conditions(wanted: Filter) -> Iterator[ColumnElement[bool]]:
    yield Batch.deleted_at.is_(None)
    if wanted.batch:
        yield Batch.name == wanted.batch
    if wanted.purpose:
        yield Item.purpose == wanted.purpose
    own = aliased(Assignment)
    had = select(own.id).where(own.item_id == Item.id)
    if wanted.labeler:
        yield had.join(User, User.id == own.user_id).where(User.name == stored_name(wanted.labeler)).exists()
    if wanted.flag:
        flagged = select(Judgment.id).join(own, own.current_id == Judgment.id).where(own.item_id == Item.id)
        yield flagged.where(cast(Judgment.answer, Text).contains(json.dumps(wanted.flag), autoescape=True)).exists()
    late = select(Judgment.id).where(Judgment.item_id == Item.id, Judgment.kind == "late")
    conditions = {
        "open": and_(Item.taken < Item.needed, Item.purpose == "work"),
        "leased": had.where(own.state == "leased").exists(),
        "done": and_(Item.taken == Item.needed, ~had.where(own.state == "leased", own.current_id.is_(None)).exists()),
        "skipped": had.where(own.state == "skipped").exists(),
        "stuck": stuck(),
        "late": late.exists(),
        "decided": had.where(own.adjudication, own.current_id.is_not(None)).exists(),
    }
    if wanted.state:
        yield conditions[wanted.state]


def _narrowed(query: Any, wanted: Filter, *columns: Any) -> Any:
    """Restrict a query to rows whose JSON may contain the text. Skip this if JSON would escape the text."""
    text = wanted.text.strip()
    if not text or not text.isascii() or json.dumps(text)[1:-1] != text:
        return query
    texts = [cast(column, Text) for column in columns] + [Item.external_id]
    return query.where(or_(*(column.icontains(text, autoescape=True) for column in texts)))


def _matching(session: Session, query: Any, wanted: Filter) -> Iterator[Any]:
    """Yield the rows of a query that contain the text."""
    text = wanted.text.strip().casefold()
    for row in session.execute(query.execution_options(yield_per=1000)):
        item, answer = row[0], row[2].answer if len(row) > 2 else None
        if not text or any(text in part.casefold() for part in _texts([item.external_id, item.content, answer])):
            yield row


def _texts(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value, except field names."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


def _states_by_item(session: Session, items: list[int]) -> dict[int, Json]:
    query = select(Assignment.item_id, Assignment.state, Assignment.current_id.is_not(None), func.count()).where(
        Assignment.item_id.in_(items), ~Assignment.adjudication
    )
    states: dict[int, Json] = {}
    for item, state, is_current, number in session.execute(
        query.group_by(Assignment.item_id, Assignment.state, Assignment.current_id.is_not(None))
    ):
        row = states.setdefault(item, {"judged": 0, "open now": 0, "skipped": 0})
        field = "judged" if is_current else {"leased": "open now", "skipped": "skipped"}.get(state)
        if field:
            row[field] += number
    return states
