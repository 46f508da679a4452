"""Guidelines of each task: immutable Markdown versions, and records of the users who have opened each version."""

import re
from collections import Counter

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from align.core.errors import UserError
from align.core.files import package_data_root
from annotation_ui.store.database import Database
from annotation_ui.store.schema import Guideline, GuidelineRead, User
from annotation_ui.tasks.fields import is_unicode

MAX_LENGTH = 100_000  # characters
PACKAGE_GUIDELINES = package_data_root() / "forms" / "guidelines"
"""Drafts (TASK.md). The lead's page offers them for tasks without guidelines."""
# A line break within a paragraph or list item: the next line does not start a list item, heading, quotation or table row.
_WRAPPED = re.compile(r"(?<=[^\n|])\n[ ]*(?![ ]*(?:[-*+] |\d+\. |[#>|]|\n|$))")


def newest(session: Session, task: str) -> Guideline | None:
    """Return the newest version of a task's guidelines, which is shown to labelers."""
    return session.scalar(select(Guideline).where(Guideline.task == task).order_by(Guideline.id.desc()).limit(1))


def draft(task: str) -> str:
    """Return the task's draft, or an empty string. Labelers do not see it until a lead saves it.

    The lines of a paragraph are joined, because the app renders every line break.
    """
    path = PACKAGE_GUIDELINES / f"{task}.md"
    return _WRAPPED.sub(" ", path.read_text(encoding="utf-8")) if path.is_file() else ""


def save(database: Database, task: str, text: str, author_id: int, edited: int) -> int:
    """Store a new version of a task's guidelines and return its id.

    Args:
        database: database of the app.
        task: key of `TASKS`.
        text: Markdown text.
        author_id: id of the lead.
        edited: id of the version on which the text is based, or 0. UserError is raised if a newer version exists.
    """
    if len(text) > MAX_LENGTH or "\0" in text or not is_unicode(text):
        raise UserError(f"guidelines: must be text of at most {MAX_LENGTH} characters")
    with database.write() as session:
        database.lock_table(session, Guideline)
        latest = newest(session, task)
        if (latest.id if latest else 0) != edited:
            raise UserError("another lead saved a newer version; copy your text, then open the newest version")
        if latest is not None and latest.text == text:
            raise UserError("no changes: the text equals the current version")
        row = Guideline(task=task, text=text, author_id=author_id)
        session.add(row)
        session.flush()
        return row.id


def unread(session: Session, task: str, user_id: int) -> Guideline | None:
    """Return the current guidelines if they are not empty and the labeler has not opened them, else None."""
    latest = newest(session, task)
    if latest is None or not latest.text.strip() or session.get(GuidelineRead, (latest.id, user_id)) is not None:
        return None
    return latest


def mark_read(database: Database, guideline_id: int, user_id: int) -> None:
    """Record that a labeler has opened this version. Unknown versions are ignored."""
    with database.write() as session:
        session.get(User, user_id, with_for_update=True)  # two tabs may report simultaneously
        if session.get(Guideline, guideline_id) and not session.get(GuidelineRead, (guideline_id, user_id)):
            session.add(GuidelineRead(guideline_id=guideline_id, user_id=user_id))


def numbers(session: Session) -> dict[int, int]:
    """Map version ids to version numbers. Numbers start at 1 for each task."""
    counts: Counter[str] = Counter()
    found = {}
    for version, task in session.execute(select(Guideline.id, Guideline.task).order_by(Guideline.id)):
        counts[task] += 1
        found[version] = counts[task]
    return found


def versions(session: Session, task: str) -> list[tuple[int, Guideline, str, int]]:
    """Return (version number, version, author, number of readers), newest first."""
    readers = dict(
        session.execute(select(GuidelineRead.guideline_id, func.count()).group_by(GuidelineRead.guideline_id)).all()
    )
    query = select(Guideline, User.name).outerjoin(User, User.id == Guideline.author_id)
    rows = session.execute(query.where(Guideline.task == task).order_by(Guideline.id)).all()
    numbered = [(number, row, name or "", readers.get(row.id, 0)) for number, (row, name) in enumerate(rows, start=1)]
    return numbered[::-1]
