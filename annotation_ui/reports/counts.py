"""Counts of a labeler's finished and remaining items, from a few index lookups."""

from typing import Any

from sqlalchemy import BindParameter, Select, bindparam, func, select
from sqlalchemy.orm import Session

from annotation_ui.store.leases import OUT_OF_ORDER, is_given_to, last_position, never_had
from annotation_ui.store.schema import Assignment, Batch, Item, Judgment
from annotation_ui.tasks import Json

MAX_LEFT = 1000  # maximum exact count


def _count(rows: Select[Any]) -> Select[Any]:
    return select(func.count()).select_from(rows.subquery())


# The statements are built once, because building them takes longer than running them.
_USER: BindParameter[int] = bindparam("user_id")
_TASK: BindParameter[str] = bindparam("task")
_BATCH: BindParameter[int] = bindparam("batch_id")
_MINE = (Assignment.user_id == _USER, Assignment.task == _TASK, ~Assignment.adjudication)
_DONE = (
    select(Batch.open, func.count())
    .select_from(Assignment)
    .join(Batch, Batch.id == Assignment.batch_id)
    .where(*_MINE, Assignment.state == "done")
    .group_by(Batch.open)
)
_OPEN_BATCHES = select(Batch.id).where(Batch.task == _TASK, is_given_to(_USER))
_OPENED = _count(select(Assignment.id).where(*_MINE, Assignment.state == "leased", Assignment.current_id.is_(None)))
_PLACE = func.coalesce(last_position(_USER, _BATCH).scalar_subquery(), OUT_OF_ORDER)
_ITEMS = select(Item.id).where(Item.batch_id == _BATCH).limit(MAX_LEFT + 1)
_FREE = _ITEMS.where(Item.purpose != "attention", Item.taken < Item.needed)
_AHEAD = _count(_FREE.where(Item.position > _PLACE))
_RETURNED = _count(_FREE.where(Item.returned, Item.position < _PLACE, never_had(_USER)))  # see `leases`
_ATTENTION = _count(_ITEMS.where(Item.purpose == "attention", never_had(_USER)))
_TODAY = _count(
    select(Judgment.id)
    .join(Assignment, Assignment.current_id == Judgment.id)
    .where(Judgment.user_id == _USER, Judgment.created_at >= bindparam("midnight"))
)


def labeler_counts(session: Session, user_id: int, task: str, midnight: float) -> Json:
    """Return the counts shown at the top of a labeler's page.

    `done` counts the labeler's answers to this task, and `today` the answers to any task since midnight. `left` counts the
    items in open batches that the labeler can still get, including the open item. Attention items are counted as work.
    Otherwise the numbers would reveal them.

    Args:
        session: open session.
        user_id: id of the labeler.
        task: key of `TASKS`.
        midnight: start of the labeler's day, in seconds since 1970.
    """
    parameters = {"user_id": user_id, "task": task}
    done: dict[bool, int] = dict(session.execute(_DONE, parameters).all())
    left = session.scalar(_OPENED, parameters) or 0
    for batch_id in session.scalars(_OPEN_BATCHES, parameters).all():
        batch_parameters = {"user_id": user_id, "batch_id": batch_id}
        work = sum(session.scalar(free, batch_parameters) or 0 for free in (_AHEAD, _RETURNED))
        left += work + (session.scalar(_ATTENTION, batch_parameters) or 0 if work else 0)  # given only while there is work
    return {
        "done": sum(done.values()),
        "done_of_open": done.get(True, 0),
        "left": min(left, MAX_LEFT),
        "more_left": left > MAX_LEFT,
        "today": session.scalar(_TODAY, {"user_id": user_id, "midnight": midnight}) or 0,
    }
