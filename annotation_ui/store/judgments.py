"""Judgments and drafts: append-only storage, undo, and edits of earlier answers.

Each call has access only to the assignments of the labeler that it names.
"""

import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from annotation_ui.store.leases import Leases, give_back_slot
from annotation_ui.store.schema import Assignment, Batch, Guideline, Item, Judgment, RuleSet, User
from annotation_ui.tasks import TASKS, Json
from annotation_ui.tasks.base import BadInputError, require

ALREADY_SUBMITTED = "already submitted: you can change it under My work"
REQUEST_USED = "request_id: used for something else before"
KNOWN_ANSWER_SHOWN = "a training item: its known answer was shown, so your answer stays as it is"


class AssignmentNotFoundError(LookupError):
    """Raised if the assignment does not exist or belongs to another labeler."""


class ConflictError(Exception):
    """Raised if the assignment's state does not allow the request. The message tells the labeler what to do."""


class BatchDeletedError(ConflictError):
    """Raised if a lead has deleted the assignment's batch, so that an answer would not be exported."""

    def __init__(self) -> None:
        super().__init__("the lead has deleted this batch, so an answer would not count; your draft is kept")


@dataclass(frozen=True)
class AssignmentContext:
    """An assignment with its item, batch and rules."""

    assignment: Assignment
    item: Item
    batch: Batch
    rules: list[Json]

    def require_batch(self) -> None:
        """Raise BatchDeletedError if the batch was deleted."""
        if self.batch.deleted_at is not None:
            raise BatchDeletedError


@dataclass(frozen=True)
class Judgments:
    """Stores and reads judgments and drafts in `leases.database`."""

    leases: Leases

    def load(self, user_id: int, assignment_id: int) -> AssignmentContext:
        """Return the labeler's assignment with its item, batch and rules.

        Raises:
            AssignmentNotFoundError: If the labeler has no such assignment. All methods with both ids raise this.
        """
        with self.leases.database.read() as session:
            return _load_context(session, user_id, assignment_id)

    def save_draft(self, user_id: int, assignment_id: int, draft: Json, sequence: int, seen: int | None = None) -> Json:
        """Store the draft and renew the lease. The draft is not stored if it is older or another window has written one.

        Args:
            user_id: id of the labeler.
            assignment_id: id of the assignment.
            draft: state of the page. `window` identifies the browser window.
            sequence: number of the draft, which increases with each change.
            seen: number of the newest draft known to this window. If None, drafts of other windows are overwritten.

        Returns:
            `held` (whether the labeler still has the item), `stored` (whether the draft was stored), and `sequence` (number
            of the stored draft).
        """
        with self.leases.database.write() as session:
            assignment = _own_assignment(session, user_id, assignment_id)
            if assignment.state in ("done", "skipped"):
                raise ConflictError(ALREADY_SUBMITTED)
            same_window = (assignment.draft or {}).get("window") == draft.get("window")
            unseen = seen is not None and seen < assignment.draft_seq and not same_window
            stored = sequence > assignment.draft_seq and not unseen
            if stored:
                assignment.draft, assignment.draft_seq = draft, sequence
            held = self.leases.renew(session, assignment)
            return {"held": held, "stored": stored, "sequence": assignment.draft_seq}

    def save_transcript(self, user_id: int, assignment_id: int, messages: list[Json]) -> None:
        """Store a probing conversation recorded by the server. Do not call this with messages from a browser.

        If the item was skipped or submitted while the model was replying, its state does not change.
        """
        with self.leases.database.write() as session:
            assignment = _own_assignment(session, user_id, assignment_id)
            assignment.transcript = messages
            if assignment.state in ("leased", "expired"):
                self.leases.renew(session, assignment)

    def submit(
        self,
        user_id: int,
        assignment_id: int,
        request_id: str,
        answer: Json,
        seconds: float,
        guideline_id: int | None = None,
    ) -> Judgment:
        """Append a judgment. A repeated request (lost response, double click) is stored once.

        If the lease has expired and the slot is taken, the judgment is stored as `late` and never exported.

        Args:
            user_id: id of the labeler.
            assignment_id: id of the assignment.
            request_id: identifies the request. An earlier id with a different answer is rejected.
            answer: answer in the shown order.
            seconds: active seconds.
            guideline_id: id of the guidelines shown on the page.
        """
        with self.leases.database.write() as session:
            earlier = _judgment_of_request(session, user_id, request_id)
            context = _load_context(session, user_id, assignment_id)
            assignment = context.assignment
            if assignment.transcript is not None:
                answer = {**answer, "messages": assignment.transcript}
            checked = TASKS[assignment.task].check(answer, context.item.content, context.rules)
            if earlier is not None:
                return _same_request(earlier, assignment, checked)
            context.require_batch()
            if assignment.state in ("done", "skipped"):
                raise ConflictError(ALREADY_SUBMITTED)
            kind = self._judgment_kind(session, assignment)
            judgment = _append_judgment(session, context, kind, request_id, checked, seconds, guideline_id)
            assignment.state = "expired" if kind == "late" else "done"
            if kind != "late":
                assignment.current_id, assignment.draft = judgment.id, None
            return judgment

    def skip(self, user_id: int, assignment_id: int, request_id: str, reason: str, seconds: float) -> Judgment:
        """Skip the item. Its slot becomes free, and the labeler does not get the item again."""
        with self.leases.database.write() as session:
            earlier = _judgment_of_request(session, user_id, request_id)
            context = _load_context(session, user_id, assignment_id)
            assignment, answer = context.assignment, {"reason": reason[:1000]}
            if earlier is not None:
                return _same_request(earlier, assignment, answer, skip=True)
            context.require_batch()
            if assignment.state in ("done", "skipped") or assignment.current_id is not None:
                raise ConflictError(ALREADY_SUBMITTED)
            if context.item.purpose == "training":
                raise BadInputError("training items cannot be skipped; answer it to see the known answer")
            judgment = _append_judgment(session, context, "skip", request_id, answer, seconds)
            if assignment.state == "leased":
                give_back_slot(session, assignment)
            assignment.state = "skipped"
            return judgment

    def undo(self, user_id: int, task: str, request_id: str, assignment_id: int | None = None) -> Assignment | None:
        """Undo the last answer or skip of a task, or of the given assignment, and reopen its item.

        If the undone answer had replaced an earlier one, the earlier answer becomes current again. It is stored as the
        `answer` of the undo.

        Returns:
            The reopened assignment, or None if there is nothing to undo. A repeated request returns the same assignment.
        """
        with self.leases.database.write() as session:
            earlier = _judgment_of_request(session, user_id, request_id)
            if earlier is not None:
                require(earlier.kind == "undo" and assignment_id in (None, earlier.assignment_id), REQUEST_USED)
                return _own_assignment(session, user_id, earlier.assignment_id)
            context = _last_submitted(session, user_id, task, assignment_id)
            if context is None:
                return None
            assignment = context.assignment
            context.require_batch()
            if context.item.purpose == "training":
                raise BadInputError(KNOWN_ANSWER_SHOWN)
            if assignment.state != "skipped":
                assignment.draft = _draft_of_current_judgment(session, assignment)
            if not self.leases.renew(session, assignment):
                raise ConflictError("the skipped item is now assigned to another labeler")
            before = _answer_before(session, assignment)
            _append_judgment(session, context, "undo", request_id, before.answer if before else None, 0)
            assignment.current_id = before.id if before else None
            assignment.draft_seq += 1
            return assignment

    def history(
        self, user_id: int, before: int | None = None, limit: int = 20
    ) -> list[tuple[Judgment, Item, str, list[Json]]]:
        """Return the labeler's current judgments, newest first, each with its item, task and the rules at that time."""
        query = (
            select(Judgment, Item, Assignment.task, RuleSet.content)
            .join(Assignment, Assignment.current_id == Judgment.id)
            .join(Item, Item.id == Assignment.item_id)
            .outerjoin(RuleSet, RuleSet.id == Judgment.rule_set_id)
            .where(Judgment.user_id == user_id)
        )
        if before is not None:
            query = query.where(Judgment.id < before)
        with self.leases.database.read() as session:
            rows = session.execute(query.order_by(Judgment.id.desc()).limit(limit)).all()
        return [(judgment, item, task, rules["rules"] if rules else []) for judgment, item, task, rules in rows]

    def reopen(self, user_id: int, assignment_id: int) -> Assignment:
        """Reopen a submitted answer for editing. The old answer counts until the new answer is submitted."""
        with self.leases.database.write() as session:
            context = _load_context(session, user_id, assignment_id)
            assignment = context.assignment
            context.require_batch()
            if assignment.current_id is None:
                raise ConflictError("you have no answer to this item to edit")
            if context.item.purpose == "training":
                raise BadInputError(KNOWN_ANSWER_SHOWN)
            if assignment.draft is None:
                assignment.draft = _draft_of_current_judgment(session, assignment)
                assignment.draft_seq += 1
            self.leases.renew(session, assignment)
            return assignment

    def keep(self, user_id: int, assignment_id: int) -> None:
        """Close a reopened answer without changes."""
        with self.leases.database.write() as session:
            assignment = _own_assignment(session, user_id, assignment_id)
            if assignment.current_id is None:
                raise ConflictError("you have no answer to this item to keep")
            assignment.state, assignment.draft = "done", None

    def _judgment_kind(self, session: Session, assignment: Assignment) -> str:
        if assignment.adjudication:
            return "adjudicate"
        if assignment.state == "expired" and not self.leases.renew(session, assignment):
            return "late"
        earlier = select(Judgment.id).where(Judgment.assignment_id == assignment.id)
        edited = session.scalar(earlier.where(Judgment.kind.in_(("submit", "edit"))).limit(1)) is not None
        return "edit" if edited else "submit"


def _draft_of_current_judgment(session: Session, assignment: Assignment) -> Json:
    """Return the current judgment as a draft."""
    answer = session.get_one(Judgment, assignment.current_id).answer or {}
    return {"state": TASKS[assignment.task].draft(answer), "past": []}


def _answer_before(session: Session, assignment: Assignment) -> Judgment | None:
    """Return the judgment before the last one, ignoring late and undone judgments, or None."""
    decisions: list[Judgment] = []
    query = select(Judgment).where(Judgment.assignment_id == assignment.id, Judgment.kind != "late")
    for judgment in session.scalars(query.order_by(Judgment.id)):
        if judgment.kind != "undo":
            decisions.append(judgment)
        elif judgment.answer is None:  # the undo left no current judgment
            decisions.clear()
        else:
            decisions.pop()
    return decisions[-2] if len(decisions) > 1 else None


def _own_assignment(session: Session, user_id: int, assignment_id: int) -> Assignment:
    query = select(Assignment).where(Assignment.id == assignment_id, Assignment.user_id == user_id).with_for_update()
    assignment = session.scalar(query)
    if assignment is None:
        raise AssignmentNotFoundError("the item is not assigned to you, or its batch was deleted")
    return assignment


def _load_context(session: Session, user_id: int, assignment_id: int) -> AssignmentContext:
    assignment = _own_assignment(session, user_id, assignment_id)
    item, batch = session.get_one(Item, assignment.item_id), session.get_one(Batch, assignment.batch_id)
    rules = session.get_one(RuleSet, batch.rule_set_id).content["rules"] if batch.rule_set_id else []
    return AssignmentContext(assignment, item, batch, rules)


def _judgment_of_request(session: Session, user_id: int, request_id: str) -> Judgment | None:
    """Return the judgment stored by an earlier request with this id, if any. Lock out the labeler's other requests."""
    session.execute(select(User.id).where(User.id == user_id).with_for_update(key_share=True))
    judgment = session.scalar(select(Judgment).where(Judgment.request_id == request_id))
    if judgment is not None and judgment.user_id != user_id:
        raise BadInputError("request_id: taken")
    return judgment


def _same_request(earlier: Judgment, assignment: Assignment, answer: Json, skip: bool = False) -> Judgment:
    """Return the judgment of an earlier request. Raise BadInputError if this request differs from it."""
    same_kind = earlier.kind != "undo" and (earlier.kind == "skip") == skip
    require(same_kind and earlier.assignment_id == assignment.id and earlier.answer == answer, REQUEST_USED)
    return earlier


def _append_judgment(
    session: Session,
    context: AssignmentContext,
    kind: str,
    request_id: str,
    answer: Any,
    seconds: float,
    guideline_id: int | None = None,
) -> Judgment:
    assignment = context.assignment
    if guideline_id is not None:
        shown = session.get(Guideline, guideline_id)
        require(shown is not None and shown.task == assignment.task, "guidelines: this task has no such version")
    judgment = Judgment(
        request_id=request_id,
        assignment_id=assignment.id,
        item_id=assignment.item_id,
        user_id=assignment.user_id,
        kind=kind,
        answer=answer,
        shown_order=assignment.shown_order,
        seconds=max(0.0, min(seconds, time.time() - assignment.opened_at)),
        rule_set_id=context.batch.rule_set_id,
        guideline_id=guideline_id,
    )
    session.add(judgment)
    session.flush()
    return judgment


def _last_submitted(session: Session, user_id: int, task: str, assignment_id: int | None) -> AssignmentContext | None:
    if assignment_id is not None:
        context = _load_context(session, user_id, assignment_id)
        return context if context.assignment.state in ("done", "skipped") else None
    newest = (
        select(Judgment.assignment_id)
        .join(Assignment, Assignment.id == Judgment.assignment_id)
        .join(Batch, Batch.id == Assignment.batch_id)
        .where(Judgment.user_id == user_id, Assignment.task == task, Assignment.state.in_(("done", "skipped")))
        .where(Batch.deleted_at.is_(None))
        .order_by(Judgment.id.desc())
        .limit(1)
    )
    newest_id = session.scalar(newest)
    return None if newest_id is None else _load_context(session, user_id, newest_id)
