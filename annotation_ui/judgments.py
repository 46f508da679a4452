"""What labelers decide, and what they are about to: append-only judgments, drafts, undo.

Every call names the labeler; an assignment of somebody else does not exist for them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from annotation_ui.leases import Leases, give_back_slot
from annotation_ui.schema import Assignment, Batch, Guideline, Item, Judgment, RuleSet
from annotation_ui.tasks import TASKS, Json
from annotation_ui.tasks.base import BadInputError

HANDED_IN = "already handed in: it can be changed under My work"


class NotYoursError(LookupError):
    """No such assignment for this labeler."""


class ConflictError(Exception):
    """The assignment is in another state than the request assumes; the message says what to do."""


@dataclass(frozen=True)
class Work:
    """A labeler's assignment with all that its page needs."""

    assignment: Assignment
    item: Item
    batch: Batch
    rules: list[Json]


@dataclass(frozen=True)
class Judgments:
    """Writes judgments and drafts through `leases.database`."""

    leases: Leases

    def open(self, user_id: int, assignment_id: int) -> Work:
        """The labeler's assignment with its item, batch and rules."""
        with self.leases.database.read() as session:
            return _work(session, user_id, assignment_id)

    def save_draft(self, user_id: int, assignment_id: int, draft: Json, sequence: int) -> bool:
        """Keep the draft unless a newer one is there, and renew the lease. False: kept, but the slot is gone."""
        with self.leases.database.write() as session:
            assignment = _mine(session, user_id, assignment_id)
            if assignment.state in ("done", "skipped"):
                raise ConflictError(HANDED_IN)
            if sequence > assignment.draft_seq:
                assignment.draft, assignment.draft_seq = draft, sequence
            return self.leases.renew(session, assignment)

    def save_transcript(self, user_id: int, assignment_id: int, messages: list[dict[str, str]]) -> None:
        """Keep a probe's conversation; for the server's own use, never with messages from a browser."""
        with self.leases.database.write() as session:
            assignment = _mine(session, user_id, assignment_id)
            assignment.transcript = messages
            self.leases.renew(session, assignment)

    def submit(self, user_id: int, assignment_id: int, request_id: str, answer: Json, seconds: float) -> Judgment:
        """Append the judgment; the same request twice (a lost reply, a double click) is one judgment.

        A judgment whose lease ran out and whose slot somebody else has is kept as `late`: stored, never exported as
        one of the item's judgments.
        """
        with self.leases.database.write() as session:
            before = _repeated(session, user_id, request_id)
            if before is not None:
                return before
            work = _work(session, user_id, assignment_id)
            assignment = work.assignment
            if assignment.state in ("done", "skipped"):
                raise ConflictError(HANDED_IN)
            if assignment.transcript is not None:
                answer = {**answer, "messages": assignment.transcript}
            checked = TASKS[assignment.task].check(answer, work.item.content, work.rules)
            kind = self._kind(session, assignment)
            judgment = _append(session, work, kind, request_id, checked, seconds)
            assignment.state = "expired" if kind == "late" else "done"
            if kind != "late":
                assignment.current_id, assignment.draft = judgment.id, None
            return judgment

    def skip(self, user_id: int, assignment_id: int, request_id: str, reason: str, seconds: float) -> Judgment:
        """Pass the item on: its slot goes to somebody else, and this labeler does not see it again."""
        with self.leases.database.write() as session:
            before = _repeated(session, user_id, request_id)
            if before is not None:
                return before
            work = _work(session, user_id, assignment_id)
            if work.assignment.state in ("done", "skipped") or work.assignment.current_id is not None:
                raise ConflictError(HANDED_IN)
            judgment = _append(session, work, "skip", request_id, {"reason": reason[:1000]}, seconds)
            if work.assignment.state == "leased":
                give_back_slot(session, work.assignment)
            work.assignment.state = "skipped"
            return judgment

    def undo(self, user_id: int, task: str, request_id: str, assignment_id: int | None = None) -> Assignment | None:
        """Take back what was handed in last (or the named one): it is open again, as it was. None: nothing there."""
        with self.leases.database.write() as session:
            if _repeated(session, user_id, request_id) is not None:
                return None
            work = _last_handed_in(session, user_id, task, assignment_id)
            if work is None:
                return None
            assignment = work.assignment
            if assignment.state == "skipped":
                if not self.leases.renew(session, assignment):
                    raise ConflictError("the item that you skipped has gone to somebody else")
            else:
                assignment.draft = _as_draft(session, assignment)
                assignment.state = "leased"  # its slot is still its own
                self.leases.renew(session, assignment)
            _append(session, work, "undo", request_id, None, 0)
            assignment.current_id = None
            assignment.draft_seq += 1
            return assignment

    def history(self, user_id: int, before: int | None = None, limit: int = 20) -> list[tuple[Judgment, Item, str]]:
        """(judgment, item, task) of what counts of the labeler's, newest first; `before`: a judgment's id."""
        query = (
            select(Judgment, Item, Assignment.task)
            .join(Assignment, Assignment.current_id == Judgment.id)
            .join(Item, Item.id == Assignment.item_id)
            .where(Judgment.user_id == user_id)
        )
        if before is not None:
            query = query.where(Judgment.id < before)
        with self.leases.database.read() as session:
            return [(row[0], row[1], row[2]) for row in session.execute(query.order_by(Judgment.id.desc()).limit(limit))]

    def reopen(self, user_id: int, assignment_id: int) -> None:
        """Open what was handed in for a change, or go on with one. Until it is submitted, the judgment counts as it is."""
        with self.leases.database.write() as session:
            assignment = _mine(session, user_id, assignment_id)
            if assignment.current_id is None:
                raise ConflictError("there is no answer of yours to change here")
            if assignment.draft is None:
                assignment.draft = _as_draft(session, assignment)
                assignment.draft_seq += 1
            assignment.state = "leased"  # its slot is still its own
            self.leases.renew(session, assignment)

    def keep(self, user_id: int, assignment_id: int) -> None:
        """Close what was reopened, as it was."""
        with self.leases.database.write() as session:
            assignment = _mine(session, user_id, assignment_id)
            if assignment.current_id is None:
                raise ConflictError("there is no answer of yours to keep here")
            assignment.state, assignment.draft = "done", None

    def _kind(self, session: Session, assignment: Assignment) -> str:
        if assignment.adjudication:
            return "adjudicate"
        if assignment.state == "expired" and not self.leases.renew(session, assignment):
            return "late"
        given = select(Judgment.id).where(Judgment.assignment_id == assignment.id)
        again = session.scalar(given.where(Judgment.kind.in_(("submit", "edit"))).limit(1)) is not None
        return "edit" if again else "submit"


def rules_of(session: Session, batch: Batch) -> list[Json]:
    """The rules that a batch's items are judged by, in the version that the batch was made with."""
    return session.get_one(RuleSet, batch.rule_set_id).content["rules"] if batch.rule_set_id else []


def _as_draft(session: Session, assignment: Assignment) -> Json:
    """The judgment that counts, as the page takes it up again."""
    answer = session.get_one(Judgment, assignment.current_id).answer or {}
    return {"state": TASKS[assignment.task].draft(answer), "past": []}


def _mine(session: Session, user_id: int, assignment_id: int) -> Assignment:
    query = select(Assignment).where(Assignment.id == assignment_id, Assignment.user_id == user_id).with_for_update()
    assignment = session.scalar(query)
    if assignment is None:
        raise NotYoursError(f"no assignment {assignment_id}")
    return assignment


def _work(session: Session, user_id: int, assignment_id: int) -> Work:
    assignment = _mine(session, user_id, assignment_id)
    item, batch = session.get_one(Item, assignment.item_id), session.get_one(Batch, assignment.batch_id)
    return Work(assignment, item, batch, rules_of(session, batch))


def _repeated(session: Session, user_id: int, request_id: str) -> Judgment | None:
    before = session.scalar(select(Judgment).where(Judgment.request_id == request_id))
    if before is not None and before.user_id != user_id:
        raise BadInputError("request_id: taken")
    return before


def _append(session: Session, work: Work, kind: str, request_id: str, answer: Any, seconds: float) -> Judgment:
    assignment = work.assignment
    guideline = select(func.max(Guideline.id)).where(Guideline.task == assignment.task)
    judgment = Judgment(
        request_id=request_id,
        assignment_id=assignment.id,
        item_id=assignment.item_id,
        user_id=assignment.user_id,
        kind=kind,
        answer=answer,
        shown_order=assignment.shown_order,
        seconds=max(0.0, min(seconds, time.time() - assignment.opened_at)),
        rule_set_id=work.batch.rule_set_id,
        guideline_id=session.scalar(guideline),
    )
    session.add(judgment)
    session.flush()
    return judgment


def _last_handed_in(session: Session, user_id: int, task: str, assignment_id: int | None) -> Work | None:
    if assignment_id is not None:
        work = _work(session, user_id, assignment_id)
        return work if work.assignment.state in ("done", "skipped") else None
    newest = (
        select(Judgment.assignment_id)
        .join(Assignment, Assignment.id == Judgment.assignment_id)
        .where(Judgment.user_id == user_id, Assignment.task == task, Assignment.state.in_(("done", "skipped")))
        .order_by(Judgment.id.desc())
        .limit(1)
    )
    found = session.scalar(newest)
    return None if found is None else _work(session, user_id, found)
