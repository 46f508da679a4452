"""New judgments in storage order, for programs that follow labeling."""

import time
from collections.abc import Sequence

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from annotation_ui.reports.export import check_batches, exported_ids
from annotation_ui.store.audit import SHELL, Actor, record
from annotation_ui.store.database import Database
from annotation_ui.store.schema import AuditRecord, Batch, Item, Judgment, User
from annotation_ui.tasks import TASKS, Json

_DAY_S = 86_400.0


def new_judgments(
    database: Database, after: int, batches: Sequence[str] = (), limit: int = 100, by: Actor = SHELL
) -> list[Json]:
    """Return judgments, skips and undos with ids above `after`, oldest first.

    In each event, `rows` is the answer in the imported order, before it is converted to records. `rows` is empty for a skip.
    For an undo, it is the earlier answer that becomes current again, if any. Reading is recorded in the audit trail if it
    starts with the first judgment, and otherwise once a day.
    """
    with database.read() as session:
        check_batches(session, batches)
    newest = _newest_settled(database, after)
    query = (
        select(Judgment, Item, Batch, User.pseudonym)
        .join(Item, Item.id == Judgment.item_id)
        .join(Batch, Batch.id == Item.batch_id)
        .join(User, User.id == Judgment.user_id)
        .where(Judgment.id > after, Judgment.id <= newest, Batch.deleted_at.is_(None))
        .order_by(Judgment.id)
        .limit(limit)
    )
    if batches:
        query = query.where(Batch.name.in_(batches))
    with database.read() as session:
        rows = session.execute(query).all()
        ids = exported_ids(session, (item for _, item, *_ in rows))
        events = [_event(*row, ids[row[1].id]) for row in rows]
        unrecorded = bool(events) and (after == 0 or not _recorded_today(session, by))
    if unrecorded:
        with database.write() as session:
            record(session, "follow", {"after": after, "batches": ", ".join(batches) or "all"}, by)
    return events


def _recorded_today(session: Session, by: Actor) -> bool:
    """Return whether the audit trail has a record from the last day that this token follows judgments."""
    mine = (AuditRecord.token_id == by.token_id, AuditRecord.user_id == by.user_id)
    recent = (AuditRecord.action == "follow", AuditRecord.created_at > time.time() - _DAY_S)
    return session.scalar(select(AuditRecord.id).where(*mine, *recent).limit(1)) is not None


def _newest_settled(database: Database, after: int) -> int:
    """Return the newest id below which no judgment can still appear.

    PostgreSQL assigns ids before commit, so a judgment may become visible after one with a larger id. The table lock waits
    until every transaction that has an id has finished.
    """
    newest = select(func.max(Judgment.id))
    with database.read() as session:
        if (session.scalar(newest) or 0) <= after:
            return after
    with database.write() as session:
        database.lock_table(session, Judgment)
        return session.scalar(newest) or 0


def _event(judgment: Judgment, item: Item, batch: Batch, labeler: str, exported_id: str) -> Json:
    task, answer, rows = TASKS[batch.task], judgment.answer or {}, list[Json]()
    if judgment.kind != "skip" and judgment.answer is not None:
        rows = task.rows(item.content, task.canonical(answer, judgment.shown_order))
    event = {
        "judgment": judgment.id,
        "kind": judgment.kind,
        "batch": batch.name,
        "task": batch.task,
        "id": exported_id,
        "purpose": item.purpose,
        "labeler": labeler,
        "seconds": judgment.seconds,
        "at": judgment.created_at,
        "rows": rows,
    }
    return {**event, "reason": answer.get("reason", "")} if judgment.kind == "skip" else event
