"""Who works on what: each item has `needed` slots, and a labeler holds one for a limited time.

A labeler walks through a batch by position, so the next item is found from where they stand: a few index look-ups,
however many items there are. An item that somebody gave back behind them is marked `returned` and found through an
index of its own.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass

from sqlalchemy import and_, select, update
from sqlalchemy.orm import Session, aliased

from annotation_ui.database import Database
from annotation_ui.schema import Assignment, Batch, Item, User
from annotation_ui.tasks import TASKS
from annotation_ui.tasks.base import as_messages

GOLD_SLOTS = 1_000_000  # a gold item is for everyone: its overlap has no end


@dataclass(frozen=True)
class Leases:
    """Gives out assignments of `database` for `seconds` at a time."""

    database: Database
    seconds: float = 1800

    def next(self, user_id: int, task: str) -> Assignment | None:
        """What the labeler has open (a refresh, another device), else an expired one still free, else a new item."""
        self.collect_expired()
        with self.database.write() as session:
            session.execute(select(User.id).where(User.id == user_id).with_for_update())  # one claim a labeler at a time
            held = _held(session, user_id, task)
            if held is not None:
                held.expires_at = time.time() + self.seconds
                return held
            return self._resume_expired(session, user_id, task) or self._claim(session, user_id, task)

    def renew(self, session: Session, assignment: Assignment) -> bool:
        """Hold on to an assignment; one that had expired takes its slot again if there is one. False: it is gone."""
        if assignment.state != "leased" and not assignment.adjudication and not take_slot(session, assignment):
            return False
        assignment.state = "leased"
        assignment.leased_at = time.time()
        assignment.expires_at = assignment.leased_at + self.seconds
        return True

    def collect_expired(self) -> int:
        """Give the slots of leases that ran out back to their items."""
        late = and_(Assignment.state == "leased", Assignment.expires_at < time.time())
        with self.database.read() as session:
            if session.scalar(select(Assignment.id).where(late).limit(1)) is None:
                return 0
        with self.database.write() as session:
            query = select(Assignment).where(late).order_by(Assignment.item_id).with_for_update(skip_locked=True)
            expired = session.scalars(query).all()
            for assignment in expired:
                if assignment.current_id is not None:  # opened for a change that was not made: it stays as it is
                    assignment.state = "done"
                    continue
                assignment.state = "expired"
                give_back_slot(session, assignment)
            return len(expired)

    def adjudicate(self, user_id: int, item_id: int) -> Assignment:
        """Open an item for a lead's own decision; it takes none of the labelers' slots."""
        with self.database.write() as session:
            mine = (Assignment.item_id == item_id, Assignment.user_id == user_id, Assignment.adjudication)
            assignment = session.scalar(select(Assignment).where(*mine))
            if assignment is None:
                item = session.get_one(Item, item_id)
                assignment = self._assign(session, item, session.get_one(Batch, item.batch_id), user_id)
                assignment.adjudication = True
            else:
                self.renew(session, assignment)
            session.flush()
            return assignment

    def _resume_expired(self, session: Session, user_id: int, task: str) -> Assignment | None:
        expired = session.scalars(
            select(Assignment)
            .where(Assignment.user_id == user_id, Assignment.task == task, Assignment.state == "expired")
            .order_by(Assignment.leased_at.desc())
        )
        return next((assignment for assignment in expired if self.renew(session, assignment)), None)

    def _claim(self, session: Session, user_id: int, task: str) -> Assignment | None:
        batches = session.scalars(
            select(Batch).where(Batch.task == task, Batch.open).order_by(Batch.priority.desc(), Batch.id)
        ).all()
        for batch in batches:
            while (item := _free_item(session, batch.id, user_id)) is not None:
                if _take(session, item.id):
                    return self._assign(session, item, batch, user_id)
        return None

    def _assign(self, session: Session, item: Item, batch: Batch, user_id: int) -> Assignment:
        now = time.time()
        size = TASKS[batch.task].order_size(item.content)
        assignment = Assignment(
            item_id=item.id,
            user_id=user_id,
            batch_id=batch.id,
            position=item.position,
            task=batch.task,
            shown_order=secrets.SystemRandom().sample(range(size), size),
            transcript=as_messages(item.content["prompt"]) if batch.task == "probe" else None,
            opened_at=now,
            leased_at=now,
            expires_at=now + self.seconds,
        )
        session.add(assignment)
        session.flush()
        return assignment


def _held(session: Session, user_id: int, task: str) -> Assignment | None:
    return session.scalar(
        select(Assignment)
        .where(Assignment.user_id == user_id, Assignment.task == task, Assignment.state == "leased")
        .order_by(Assignment.leased_at.desc())
        .limit(1)
    )


def _free_item(session: Session, batch_id: int, user_id: int) -> Item | None:
    """The first free item after the last one the labeler had; else one that came back and they never had."""
    walked = (  # not max(): PostgreSQL, which knows little of a young table, would read all that the labeler has done
        select(Assignment.position)
        .where(Assignment.user_id == user_id, Assignment.batch_id == batch_id, ~Assignment.adjudication)
        .order_by(Assignment.position.desc())
        .limit(1)
    )
    here = session.scalar(walked)
    free = select(Item).where(Item.batch_id == batch_id, Item.taken < Item.needed).order_by(Item.position).limit(1)
    ahead = session.scalar(
        free.where(Item.position > (-1 if here is None else here)).execution_options(populate_existing=True)
    )
    if ahead is not None:
        return ahead
    had = aliased(Assignment)
    never_had = ~select(had.id).where(had.item_id == Item.id, had.user_id == user_id).exists()
    return session.scalar(free.where(Item.returned, never_had).execution_options(populate_existing=True))


def _take(session: Session, item_id: int) -> bool:
    """Take one slot of an item; False if the last one went to somebody else in this moment."""
    taken = session.execute(
        update(Item)
        .where(Item.id == item_id, Item.taken < Item.needed)
        .values(taken=Item.taken + 1)
        .execution_options(synchronize_session=False)
    )
    return bool(taken.rowcount)  # type: ignore[attr-defined]


def take_slot(session: Session, assignment: Assignment) -> bool:
    """Take a slot of the assignment's item again."""
    return _take(session, assignment.item_id)


def give_back_slot(session: Session, assignment: Assignment) -> None:
    """Free the assignment's slot for somebody else."""
    if assignment.adjudication:
        return
    session.execute(
        update(Item)
        .where(Item.id == assignment.item_id)
        .values(taken=Item.taken - 1, returned=True)
        .execution_options(synchronize_session=False)
    )
