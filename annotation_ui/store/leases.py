"""Assignment of items to labelers. Each item has `needed` slots; a labeler leases one for a limited time.

A labeler goes through a batch in order of position, so the next item is the first free one after their last: a few
index look-ups, however many items there are. An item whose slot was given back after a labeler passed it is marked
`returned` and found through a separate index. Training items have the first positions of their batch and a slot for
everybody, so each labeler begins with them; attention items are mixed in at random, outside of that order.
"""

import secrets
import time
from dataclasses import dataclass

from sqlalchemy import BindParameter, ColumnElement, Select, and_, or_, select, update
from sqlalchemy.orm import Session, aliased

from annotation_ui.store.database import Database
from annotation_ui.store.schema import Assignment, Batch, BatchLabeler, Item, User
from annotation_ui.tasks import TASKS

GOLD_SLOTS = 1_000_000  # every labeler may get each gold item: more slots than there can be labelers
RENEWAL_S = 60.0  # an open page renews its lease this often
ATTENTION_EVERY = 10  # one attention item in so many items, unless the batch sets another number
TRAINING_FIRST = 10**9  # training items have their place in the file minus this as position: before all others
OUT_OF_ORDER = -(2**31)  # position of an attention item's assignment: it does not move the labeler's place in the batch


@dataclass(frozen=True)
class Leases:
    """Leases items of `database` to labelers for `seconds`."""

    database: Database
    seconds: float = 1800

    def next(self, user_id: int, task: str, takes_slots: bool = True) -> Assignment | None:
        """Return the labeler's open assignment, else an expired one whose slot is still free, else a new one.

        A lead takes no slots. Returns None if no item of the task is left for this labeler.
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
        if assignment.state == "expired":  # the pause is no time in which the item was open
            assignment.opened_at += max(0.0, now - assignment.leased_at - RENEWAL_S)
        elif assignment.state != "leased":
            assignment.opened_at = now
        assignment.state, assignment.leased_at, assignment.expires_at = "leased", now, now + self.seconds
        return True

    def collect_expired(self) -> int:
        """Return the slots of expired leases to their items, and return the number of leases."""
        overdue = and_(Assignment.state == "leased", Assignment.expires_at < time.time())
        with self.database.read() as session:
            if session.scalar(select(Assignment.id).where(overdue).limit(1)) is None:
                return 0
        with self.database.write() as session:
            query = select(Assignment).where(overdue).order_by(Assignment.item_id).with_for_update(skip_locked=True)
            expired = session.scalars(query).all()
            for assignment in expired:
                if assignment.current_id is not None:  # reopened but not changed: the earlier answer stays
                    assignment.state = "done"
                    continue
                assignment.state = "expired"
                give_back_slot(session, assignment)
            return len(expired)

    def adjudicate(self, user_id: int, item_id: int) -> Assignment:
        """Open an item for a lead's decision, which takes no slot."""
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
    """Condition: the batch is open, and assigned to this labeler or to all."""
    named = select(BatchLabeler.user_id).where(BatchLabeler.batch_id == Batch.id)
    return and_(Batch.open, or_(~named.exists(), named.where(BatchLabeler.user_id == user_id).exists()))


def _own_assignments(user_id: int, task: str, state: str, takes_slots: bool) -> Select[Assignment]:
    """Select a user's assignments in a state, latest first, without decisions; without slots, only reopened answers."""
    own = (Assignment.user_id == user_id, Assignment.task == task, ~Assignment.adjudication)
    query = select(Assignment).where(*own, Assignment.state == state)
    if not takes_slots:
        query = query.where(Assignment.current_id.is_not(None))
    return query.order_by(Assignment.leased_at.desc())


def _free_item(session: Session, batch_id: int, user_id: int) -> Item | None:
    """Return the first free item after the labeler's last one, else a returned one that the labeler has not had."""
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
    """Return at random times the batch's first attention item that the labeler has not had."""
    if secrets.randbelow(int(batch.settings.get("attention_every", ATTENTION_EVERY))):
        return None
    attention = select(Item).where(Item.batch_id == batch.id, Item.purpose == "attention", never_had(user_id))
    return session.scalar(attention.order_by(Item.position).limit(1).execution_options(populate_existing=True))


def last_position(user_id: int | BindParameter[int], batch_id: int | BindParameter[int]) -> Select[int]:
    """Select the position of the labeler's last item in a batch."""
    return (  # not max(): without statistics of a new table, PostgreSQL would read all of the labeler's rows
        select(Assignment.position)
        .where(Assignment.user_id == user_id, Assignment.batch_id == batch_id, ~Assignment.adjudication)
        .order_by(Assignment.position.desc())
        .limit(1)
    )


def never_had(user_id: int | BindParameter[int]) -> ColumnElement[bool]:
    """Condition: the labeler has not had the item."""
    own = aliased(Assignment)
    return ~select(own.id).where(own.item_id == Item.id, own.user_id == user_id).exists()


def _take_slot(session: Session, item_id: int) -> bool:
    """Take one slot of an item. Return False if none is left."""
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
