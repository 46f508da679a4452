"""Assignment of items to labelers. Each item has `needed` slots, and a labeler leases a slot for a limited time.

A labeler goes through a batch in order of position. The next item is the first free item after their last one, which takes
a few index lookups regardless of the number of items. An item whose slot was given back is marked `returned` and found
through a separate index, because labelers may already have passed it.

Training items have the first positions of their batch and a slot for every labeler, so each labeler starts with them.
Attention items are mixed in at random, independently of positions.
"""

import secrets
import time
from dataclasses import dataclass

from sqlalchemy import BindParameter, ColumnElement, Select, and_, or_, select, update
from sqlalchemy.orm import Session, aliased

from annotation_ui.store.database import Database
from annotation_ui.store.schema import Assignment, Batch, BatchLabeler, Item, User
from annotation_ui.tasks import TASKS

GOLD_SLOTS = 1_000_000  # exceeds any number of labelers, because every labeler gets each item with a known answer
RENEWAL_S = 60.0  # interval at which an open page renews its lease
ATTENTION_EVERY = 10  # default number of items per attention item
TRAINING_FIRST = 10**9  # subtracted from the positions of training items, so that they come first
OUT_OF_ORDER = -(2**31)  # position of an attention item's assignment, which does not advance the labeler in the batch


@dataclass(frozen=True)
class Leases:
    """Leases items in `database` to labelers for `seconds`."""

    database: Database
    seconds: float = 1800

    def next(self, user_id: int, task: str, takes_slots: bool = True) -> Assignment | None:
        """Return the labeler's open assignment, or else an expired one with a free slot, or else a new one.

        Return None if no item of the task is left for this labeler. Leads take no slots, so they get no new items.
        """
        self.collect_expired()
        with self.database.write() as session:
            session.execute(
                select(User.id).where(User.id == user_id).with_for_update(key_share=True)
            )  # one claim per labeler at a time
            leased = session.scalar(_own_assignments(user_id, task, "leased", takes_slots).limit(1))
            if leased is not None:
                leased.expires_at = time.time() + self.seconds
                return leased
            resumed = self._resume_expired(session, user_id, task, takes_slots)
            return resumed or (self._claim(session, user_id, task) if takes_slots else None)

    def renew(self, session: Session, assignment: Assignment) -> bool:
        """Extend a lease, or reopen an expired or skipped assignment if a slot is free. Return whether it is held."""
        has_slot = assignment.state in ("leased", "done") or assignment.adjudication
        if not has_slot and not _take_slot(session, assignment.item_id):
            return False
        now = time.time()
        if assignment.state == "expired":  # exclude the pause from the time in which the item was open
            assignment.opened_at += max(0.0, now - assignment.leased_at - RENEWAL_S)
        elif assignment.state != "leased":
            assignment.opened_at = now
        assignment.state, assignment.leased_at, assignment.expires_at = "leased", now, now + self.seconds
        return True

    def collect_expired(self) -> int:
        """Free the slots of expired leases. Return the number of expired leases."""
        overdue = and_(Assignment.state == "leased", Assignment.expires_at < time.time())
        with self.database.read() as session:
            if session.scalar(select(Assignment.id).where(overdue).limit(1)) is None:
                return 0
        with self.database.write() as session:
            query = select(Assignment).where(overdue).order_by(Assignment.item_id).with_for_update(skip_locked=True)
            expired = session.scalars(query).all()
            for assignment in expired:
                if assignment.current_id is not None:  # reopened but not changed; the earlier answer stays
                    assignment.state = "done"
                    continue
                assignment.state = "expired"
                give_back_slot(session, assignment)
            return len(expired)

    def adjudicate(self, user_id: int, item_id: int) -> Assignment:
        """Open an item for a lead's decision, without taking a slot."""
        with self.database.write() as session:
            own = (Assignment.item_id == item_id, Assignment.user_id == user_id, Assignment.adjudication)
            assignment = session.scalar(select(Assignment).where(*own))
            if assignment is None:
                item = session.get_one(Item, item_id)
                assignment = self._assign(session, item, session.get_one(Batch, item.batch_id), user_id)
                assignment.adjudication = True
            else:
                self.renew(session, assignment)
            session.flush()
            return assignment

    def _resume_expired(self, session: Session, user_id: int, task: str, takes_slots: bool) -> Assignment | None:
        expired = session.scalars(
            _own_assignments(user_id, task, "expired", takes_slots)
            .join(Batch, Batch.id == Assignment.batch_id)
            .where(is_given_to(user_id))
        )
        return next((assignment for assignment in expired if self.renew(session, assignment)), None)

    def _claim(self, session: Session, user_id: int, task: str) -> Assignment | None:
        batches = session.scalars(
            select(Batch).where(Batch.task == task, is_given_to(user_id)).order_by(Batch.priority.desc(), Batch.id)
        ).all()
        for batch in batches:
            while (item := _free_item(session, batch.id, user_id)) is not None:
                if item.purpose == "work":
                    item = _attention_item(session, batch, user_id) or item
                if _take_slot(session, item.id):
                    return self._assign(session, item, batch, user_id)
        return None

    def _assign(self, session: Session, item: Item, batch: Batch, user_id: int) -> Assignment:
        now = time.time()
        task = TASKS[batch.task]
        size = task.order_size(item.content)
        assignment = Assignment(
            item_id=item.id,
            user_id=user_id,
            batch_id=batch.id,
            position=OUT_OF_ORDER if item.purpose == "attention" else item.position,
            task=batch.task,
            shown_order=secrets.SystemRandom().sample(range(size), size),
            transcript=task.opening(item.content),
            opened_at=now,
            leased_at=now,
            expires_at=now + self.seconds,
        )
        session.add(assignment)
        session.flush()
        return assignment


def is_given_to(user_id: int | BindParameter[int]) -> ColumnElement[bool]:
    """Build the condition that the batch is open, and assigned to this labeler or to all labelers."""
    named = select(BatchLabeler.user_id).where(BatchLabeler.batch_id == Batch.id)
    return and_(Batch.open, or_(~named.exists(), named.where(BatchLabeler.user_id == user_id).exists()))


def _own_assignments(user_id: int, task: str, state: str, takes_slots: bool) -> Select[Assignment]:
    """Select a user's assignments in a state, latest first, without decisions. For leads, select only reopened answers."""
    own = (Assignment.user_id == user_id, Assignment.task == task, ~Assignment.adjudication)
    query = select(Assignment).where(*own, Assignment.state == state)
    if not takes_slots:
        query = query.where(Assignment.current_id.is_not(None))
    return query.order_by(Assignment.leased_at.desc())


def _free_item(session: Session, batch_id: int, user_id: int) -> Item | None:
    """Return the first free item after the labeler's last one, or else a returned item that the labeler has not had."""
    position = session.scalar(last_position(user_id, batch_id))
    in_order = (Item.batch_id == batch_id, Item.purpose != "attention")
    free = select(Item).where(*in_order, Item.taken < Item.needed).order_by(Item.position).limit(1)
    ahead = session.scalar(
        free.where(Item.position > (OUT_OF_ORDER if position is None else position)).execution_options(
            populate_existing=True
        )
    )
    if ahead is not None:
        return ahead
    return session.scalar(free.where(Item.returned, never_had(user_id)).execution_options(populate_existing=True))


def _attention_item(session: Session, batch: Batch, user_id: int) -> Item | None:
    """Return an attention item, on average in one of `attention_every` calls, and None in the others.

    The item is the batch's first attention item that the labeler has not had.
    """
    if secrets.randbelow(int(batch.settings.get("attention_every", ATTENTION_EVERY))):
        return None
    attention = select(Item).where(Item.batch_id == batch.id, Item.purpose == "attention", never_had(user_id))
    return session.scalar(attention.order_by(Item.position).limit(1).execution_options(populate_existing=True))


def last_position(user_id: int | BindParameter[int], batch_id: int | BindParameter[int]) -> Select[int]:
    """Select the position of the labeler's last item in a batch."""
    return (  # not max(); without statistics on a new table, PostgreSQL would read all of the labeler's rows
        select(Assignment.position)
        .where(Assignment.user_id == user_id, Assignment.batch_id == batch_id, ~Assignment.adjudication)
        .order_by(Assignment.position.desc())
        .limit(1)
    )


def never_had(user_id: int | BindParameter[int]) -> ColumnElement[bool]:
    """Build the condition that the labeler has not had the item."""
    own = aliased(Assignment)
    return ~select(own.id).where(own.item_id == Item.id, own.user_id == user_id).exists()


def _take_slot(session: Session, item_id: int) -> bool:
    """Take a slot of an item. Return False if no slot is left."""
    updated = session.execute(
        update(Item)
        .where(Item.id == item_id, Item.taken < Item.needed)
        .values(taken=Item.taken + 1)
        .execution_options(synchronize_session=False)
    )
    return bool(updated.rowcount)  # type: ignore[attr-defined]


def give_back_slot(session: Session, assignment: Assignment) -> None:
    """Free the assignment's slot."""
    if assignment.adjudication:
        return
    session.execute(
        update(Item)
        .where(Item.id == assignment.item_id)
        .values(taken=Item.taken - 1, returned=True)
        .execution_options(synchronize_session=False)
    )
