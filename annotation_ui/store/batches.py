"""Changes to a batch: settings, assigned labelers, deletion and restoration."""

import time
from dataclasses import dataclass, replace

from sqlalchemy import case, delete, select, update
from sqlalchemy.orm import Session

from align.core.errors import UserError
from annotation_ui.store.database import Database
from annotation_ui.store.leases import give_back_slot
from annotation_ui.store.schema import Assignment, Batch, BatchLabeler, Item, Judgment, User
from annotation_ui.store.users import stored_name
from annotation_ui.tasks import TASKS

MAX_NAME = 128
MAX_LABELERS_PER_ITEM = 1000
MAX_PRIORITY = 1_000_000


@dataclass(frozen=True)
class BatchSettings:
    """Settings of a batch that a lead can change.

    Attributes:
        name: name of the batch, which must be unique.
        labelers_per_item: number of labelers per item. Lowering it removes no judgments.
        priority: batches with a higher priority come first.
        open: whether items are assigned to labelers.
        labelers: names of the assigned labelers. Default: all labelers. Other labelers keep the items that they have open
            until they submit or skip them, or the lease expires.
    """

    name: str
    labelers_per_item: int = 1
    priority: int = 0
    open: bool = True
    labelers: tuple[str, ...] = ()


def check_name(name: str) -> str:
    """Strip surrounding spaces from a batch name. Raise UserError if the name is invalid."""
    name = name.strip()
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise UserError(f"batch names must have 1 to {MAX_NAME} printable characters")
    return name


def name_taken_error(batch: Batch) -> UserError:
    """Return the error for a name that is already used by a batch."""
    hint = "" if batch.deleted_at is None else " (deleted); restore and rename it on the lead's page to reuse the name"
    return UserError(f"batch {batch.name!r} already exists{hint}")


def check_numbers(labelers_per_item: int, priority: int) -> None:
    """Raise UserError if the labelers per item or the priority are out of range."""
    if not 1 <= labelers_per_item <= MAX_LABELERS_PER_ITEM:
        raise UserError(f"labelers_per_item {labelers_per_item}: must be 1 to {MAX_LABELERS_PER_ITEM}")
    if abs(priority) > MAX_PRIORITY:
        raise UserError(f"priority {priority}: must be {-MAX_PRIORITY} to {MAX_PRIORITY}")


def stored_settings(session: Session, batch: Batch) -> BatchSettings:
    """Return the stored settings of a batch."""
    query = select(User.name).join(BatchLabeler, BatchLabeler.user_id == User.id)
    labelers = session.scalars(query.where(BatchLabeler.batch_id == batch.id).order_by(User.name)).all()
    return BatchSettings(batch.name, batch.labelers_per_item, batch.priority, batch.open, tuple(labelers))


def change_batch(database: Database, name: str, new: BatchSettings, version: int) -> int:
    """Change the settings of a batch and return the new version.

    Args:
        database: database of the app.
        name: current name of the batch.
        new: new settings.
        version: version of the settings shown to the lead. UserError is raised if another lead has changed them since.
    """
    with database.write() as session:
        batch = _batch(session, name)
        if batch.version != version:
            raise UserError(f"another lead changed {name}; select it again to see the new settings")
        check_numbers(new.labelers_per_item, new.priority)
        new_name = check_name(new.name)
        if not batch.complete:
            raise UserError(f"the import of {name} is not finished; wait, or import it again")
        other = session.scalar(select(Batch).where(Batch.name == new_name, Batch.id != batch.id))
        if other is not None:
            raise name_taken_error(other)
        if new.labelers_per_item != batch.labelers_per_item:  # labelers who have passed an item get it again
            needed = case((Item.taken > new.labelers_per_item, Item.taken), else_=new.labelers_per_item)
            counted = update(Item).where(Item.batch_id == batch.id, Item.gold.is_(None))
            session.execute(counted.values(needed=needed, returned=True).execution_options(synchronize_session=False))
        batch.name, batch.labelers_per_item = new_name, new.labelers_per_item
        batch.priority, batch.open = new.priority, new.open
        set_labelers(session, batch, new.labelers)
        batch.version += 1
        return batch.version


def set_open(database: Database, name: str, is_open: bool) -> None:
    """Open or close a batch."""
    with database.read() as session:
        batch = _batch(session, name)
        settings = stored_settings(session, batch)
    change_batch(database, name, replace(settings, open=is_open), batch.version)


def delete_batch(database: Database, name: str) -> bool:
    """Delete a batch and return True. If it has judgments or drafts, hide it instead and return False."""
    with database.write() as session:
        batch = _batch(session, name)
        if not has_work(session, batch):
            for table in (Assignment, Item, BatchLabeler):
                session.execute(delete(table).where(table.batch_id == batch.id))
            session.delete(batch)
            return True
        batch.open, batch.deleted_at = False, time.time()
        batch.version += 1
        leased = (Assignment.batch_id == batch.id, Assignment.state == "leased")
        for assignment in session.scalars(select(Assignment).where(*leased).with_for_update()):
            if assignment.current_id is not None:  # reopened for editing; the earlier answer stays
                assignment.state = "done"
                continue
            assignment.state = "expired"
            give_back_slot(session, assignment)
        return False


def has_work(session: Session, batch: Batch) -> bool:
    """Return whether the batch has judgments or drafts."""
    judged = select(Judgment.id).join(Item, Item.id == Judgment.item_id).where(Item.batch_id == batch.id).limit(1)
    if session.scalar(judged) is not None:
        return True
    given = select(Assignment.draft, Assignment.transcript, Item.content).join(Item, Item.id == Assignment.item_id)
    rows = session.execute(given.where(Assignment.batch_id == batch.id))
    opening = TASKS[batch.task].opening
    return any(draft is not None or transcript != opening(content) for draft, transcript, content in rows)


def restore_batch(database: Database, name: str) -> None:
    """Restore a deleted batch as closed."""
    with database.write() as session:
        batch = _batch(session, name)
        batch.deleted_at = None
        batch.version += 1


def set_labelers(session: Session, batch: Batch, labelers: tuple[str, ...]) -> None:
    """Assign a batch to the given labelers. If empty, assign it to all labelers."""
    names = {stored_name(each) for each in labelers}
    ids = {user.name: user.id for user in session.scalars(select(User).where(User.name.in_(names)))}
    unknown = sorted(names - set(ids))
    if unknown:
        raise UserError(f"no user {unknown[0]!r}")
    session.execute(delete(BatchLabeler).where(BatchLabeler.batch_id == batch.id))
    session.add_all(BatchLabeler(batch_id=batch.id, user_id=user_id) for user_id in ids.values())


def _batch(session: Session, name: str) -> Batch:
    batch = session.scalar(select(Batch).where(Batch.name == name).with_for_update())
    if batch is None:
        raise UserError("choose a batch first" if not name else f"no batch {name!r}")
    return batch
