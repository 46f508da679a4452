"""Erase a user's name, remarks and sessions. Judgments are kept under the pseudonym."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import delete, select, text, update
from sqlalchemy.orm import Session

from align.core.errors import UserError
from annotation_ui.store import audit
from annotation_ui.store.database import Database
from annotation_ui.store.schema import ApiToken, Assignment, FailedSignIn, Judgment, SignIn
from annotation_ui.store.users import keep_a_lead, user_named
from annotation_ui.tasks import Json

FREE_TEXT = ("comment", "note", "reason")
"""Answer fields with remarks, which are erased. Demonstrations and conversations are kept."""
LOG_WAIT_S = 10.0  # less than the 30 s for which other processes wait to write
_CHUNK = 500


def forget(database: Database, name: str) -> tuple[str, int]:
    """Rename a user to their pseudonym, end their access, and blank their comments, notes and reasons.

    The app changes stored judgments only here, in one transaction with a record in the audit trail. SQLite's log still
    contains the earlier text, so it is emptied afterwards.

    Returns:
        The pseudonym, and the number of judgments with blanked remarks.

    Raises:
        UserError: If the user does not exist or is the only active lead, or if SQLite's log is in use and cannot be emptied.
            In the last case, the changes are stored. Call the function again with the pseudonym to empty the log.
    """
    with database.write() as session:
        user = user_named(session, name)
        keep_a_lead(database, session, user)
        session.execute(delete(SignIn).where(SignIn.user_id == user.id))
        session.execute(delete(FailedSignIn).where(FailedSignIn.name == user.name))
        session.execute(update(Assignment).where(Assignment.user_id == user.id).values(draft=None))
        with _judgments_unlocked(session, database.is_sqlite):
            blanked = _blank_judgments(session, user.id)
        tokens = select(ApiToken.id).where(ApiToken.user_id == user.id, ApiToken.revoked_at.is_(None))
        detail = {"user": user.pseudonym, "judgments blanked": blanked, "tokens ended": len(session.scalars(tokens).all())}
        user.name, user.active, user.password_hash = user.pseudonym, False, "!"
        audit.record(session, "forget user", detail)
        pseudonym = user.pseudonym
    if not database.empty_log(LOG_WAIT_S):
        again = f"run `align annotate forget {pseudonym}` when no export or backup runs"
        raise UserError(f"{name} is {pseudonym} now, but the log of the database still holds the old text: {again}")
    return pseudonym, blanked


def without_remarks(value: Any) -> Any:
    """Return an answer with empty comments, notes and reasons. Messages of a conversation are unchanged."""
    if isinstance(value, list):
        return [without_remarks(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: "" if key in FREE_TEXT and isinstance(each, str) else each if key == "messages" else without_remarks(each)
        for key, each in value.items()
    }


def _blank_judgments(session: Session, user_id: int) -> int:
    blanked, last = 0, 0
    query = select(Judgment.id, Judgment.answer).where(Judgment.user_id == user_id, Judgment.answer.is_not(None))
    while rows := session.execute(query.where(Judgment.id > last).order_by(Judgment.id).limit(_CHUNK)).all():
        for judgment_id, answer in rows:
            new: Json = without_remarks(answer)
            if new != answer:
                session.execute(update(Judgment).where(Judgment.id == judgment_id).values(answer=new))
                blanked += 1
        last = rows[-1][0]
    return blanked


@contextmanager
def _judgments_unlocked(session: Session, is_sqlite: bool) -> Iterator[None]:
    """Disable the trigger that keeps judgments append-only inside the block, within the open transaction."""
    if is_sqlite:
        name = "judgments_no_update"
        stored = text("SELECT sql FROM sqlite_master WHERE type = 'trigger' AND name = :name")
        trigger = session.execute(stored, {"name": name}).scalar_one()
        session.execute(text(f"DROP TRIGGER {name}"))
        yield
        session.execute(text(trigger))
    else:
        session.execute(text("ALTER TABLE judgments DISABLE TRIGGER judgments_append_only"))
        yield
        session.execute(text("ALTER TABLE judgments ENABLE TRIGGER judgments_append_only"))
