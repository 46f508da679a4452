"""Routes called by a labeler's browser. Each route has access only to the signed-in user's assignments."""

import time
from typing import Annotated

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, FastAPI, HTTPException, Path, Query, Request
from fastapi.responses import JSONResponse, StreamingResponse
from sqlalchemy import select

from annotation_ui.rendering.markdown import messages_html, to_html
from annotation_ui.reports.counts import labeler_counts
from annotation_ui.reports.overview import disagreeing_items, rounded
from annotation_ui.server.bodies import Draft, Next, NextDecision, Submission, TaskName, Text, Undo
from annotation_ui.server.services import Services
from annotation_ui.store import guidelines
from annotation_ui.store.judgments import (
    AssignmentContext,
    AssignmentNotFoundError,
    BatchDeletedError,
    ConflictError,
)
from annotation_ui.store.leases import Leases, is_given_to
from annotation_ui.store.schema import Assignment, Batch, Item, Judgment, User
from annotation_ui.tasks import TASKS, BadInputError, Json, comparable_tasks
from annotation_ui.tasks.fields import excerpt

HISTORY_PAGE = 20  # answers per page of a labeler's history
AssignmentId = Annotated[int, Path(ge=1, le=2**31 - 1)]


def add_routes(app: FastAPI, services: Services) -> None:
    """Add the labelers' routes under /api."""
    for router in (_item_routes(services), _text_routes(services), _decision_routes(services)):
        app.include_router(router, prefix="/api")

    @app.exception_handler(AssignmentNotFoundError)
    @app.exception_handler(ConflictError)
    @app.exception_handler(BadInputError)
    def refuse(_: Request, error: Exception) -> JSONResponse:
        status = 404 if isinstance(error, AssignmentNotFoundError) else 409 if isinstance(error, ConflictError) else 422
        return JSONResponse({"error": str(error), "deleted": isinstance(error, BatchDeletedError)}, status)


def _item_routes(services: Services) -> APIRouter:
    """Return the routes for tasks, items, drafts, answers and the history of answers."""
    router = APIRouter()
    judgments = services.judgments

    @router.get("/tasks")
    def tasks(request: Request) -> Json:
        """Return the user and the tasks. `open` is true for tasks in which the user has an open batch."""
        user: User = request.state.user
        with services.database.read() as session:
            open_tasks = set(session.scalars(select(Batch.task).where(is_given_to(user.id)).distinct()))
        tasks = [{"name": task.name, "title": task.title, "open": task.name in open_tasks} for task in TASKS.values()]
        return {"user": user.name, "lead": user.role == "lead", "tasks": tasks}

    @router.post("/tasks/{task}/next")
    def next_item(request: Request, task: TaskName, body: Next) -> Json:
        """Return the labeler's open item of a task, or a new item. Leads get only reopened answers, without counts."""
        user_id, takes_slots = request.state.user.id, request.state.user.role == "labeler"
        assignment = services.leases.next(user_id, task, takes_slots)
        with services.database.read() as session:
            counts = labeler_counts(session, user_id, task, body.midnight) if takes_slots else None
        return {"counts": counts, **_page(services, user_id, task, assignment)}

    @router.post("/tasks/{task}/undo")
    def undo(request: Request, task: TaskName, body: Undo) -> Json:
        reopened = judgments.undo(request.state.user.id, task, body.request_id, body.assignment)
        return {"undone": reopened is not None, "deciding": reopened is not None and reopened.adjudication}

    @router.put("/assignments/{number}/draft")
    def save_draft(request: Request, number: AssignmentId, body: Draft) -> Json:
        return judgments.save_draft(request.state.user.id, number, body.draft, body.sequence, body.seen)

    @router.post("/assignments/{number}/submit")
    def submit(request: Request, number: AssignmentId, body: Submission) -> Json:
        user_id = request.state.user.id
        judgment = judgments.submit(user_id, number, body.request_id, body.answer, body.seconds, body.guidelines)
        return {"judgment": judgment.id, "kind": judgment.kind, "lesson": _training_feedback(services, user_id, number)}

    @router.post("/assignments/{number}/skip")
    def skip(request: Request, number: AssignmentId, body: Submission) -> Json:
        judgment = judgments.skip(request.state.user.id, number, body.request_id, body.reason, body.seconds)
        return {"judgment": judgment.id, "kind": judgment.kind}

    @router.get("/history")
    def history(request: Request, before: Annotated[int | None, Query(ge=1, le=2**31 - 1)] = None) -> Json:
        """Return a page of the labeler's submitted answers, newest first."""
        done = judgments.history(request.state.user.id, before, HISTORY_PAGE + 1)
        return {"rows": [_history_row(*row) for row in done[:HISTORY_PAGE]], "more": len(done) > HISTORY_PAGE}

    @router.post("/assignments/{number}/reopen")
    def reopen(request: Request, number: AssignmentId) -> Json:
        return {"deciding": judgments.reopen(request.state.user.id, number).adjudication}

    @router.post("/assignments/{number}/keep")
    def keep(request: Request, number: AssignmentId) -> Json:
        judgments.keep(request.state.user.id, number)
        return {}

    return router


def _text_routes(services: Services) -> APIRouter:
    """Return the routes for guidelines, previews, and conversations with a probed model."""
    router = APIRouter()

    previews = CapacityLimiter(1)  # excess requests wait here instead of blocking the server's threads

    @router.post("/guidelines/{number}/read")
    def read_guidelines(request: Request, number: AssignmentId) -> Json:
        guidelines.mark_read(services.database, number, request.state.user.id)
        return {}

    @router.post("/preview")
    async def preview(body: Text) -> Json:
        return {"html": await to_thread.run_sync(to_html, body.text, limiter=previews)}

    @router.post("/assignments/{number}/say")
    async def say(request: Request, number: AssignmentId, body: Text) -> StreamingResponse:
        """Send a message to the probed model, and stream its reply as plain text."""
        user_id = request.state.user.id
        asked = await to_thread.run_sync(services.probing.add_message, user_id, number, body.text)
        reply = services.probing.stream_reply(user_id, number, *asked)
        return StreamingResponse(reply, media_type="text/plain; charset=utf-8")

    @router.get("/assignments/{number}/transcript")
    def transcript(request: Request, number: AssignmentId) -> Json:
        """Return the conversation, and whether the model is still replying. The reply may then be missing."""
        answering = services.probing.is_answering(number)
        assignment = services.judgments.load(request.state.user.id, number).assignment
        return {"messages": messages_html(assignment.transcript or []), "answering": answering}

    return router


def _decision_routes(services: Services) -> APIRouter:
    """Return the route for leads' decisions."""
    router = APIRouter()

    @router.post("/decide/{task}/next")
    def next_disagreement(request: Request, task: str, body: NextDecision) -> Json:
        user = request.state.user
        if user.role != "lead":
            raise HTTPException(403, "for leads only")
        if task not in comparable_tasks():
            raise HTTPException(404, "no such task")
        assignment, agreement, left = next_decision(services.leases, user.id, task, body.item)
        state = {"left": left, "agreement": agreement, "item": assignment and assignment.item_id}
        return {**_page(services, user.id, task, assignment), "deciding": state}

    return router


def next_decision(
    leases: Leases, user_id: int, task: str, item_id: int | None = None
) -> tuple[Assignment | None, float | None, int]:
    """Open an item for a lead's decision, without taking a slot.

    Args:
        leases: leases of the app.
        user_id: id of the lead.
        task: key of `TASKS`.
        item_id: id of the item. Default: the lead's open item, or else the item with the lowest agreement that the lead has
            not skipped.

    Returns:
        The assignment (None if no disagreement is left), the labelers' agreement, and the number of disagreements left.
    """
    own = (Assignment.user_id == user_id, Assignment.task == task, Assignment.adjudication)
    with leases.database.read() as session:
        skipped = set(session.scalars(select(Assignment.item_id).where(*own, Assignment.state == "skipped")))
        rows = disagreeing_items(session, task)
        agreement = {item: rounded(score) for item, score, _ in rows if item not in skipped}
        if item_id is None:
            opened = select(Assignment.item_id).where(
                *own, Assignment.state == "leased", Assignment.expires_at > time.time()
            )
            item_id = session.scalar(opened.order_by(Assignment.leased_at.desc()).limit(1)) or next(iter(agreement), None)
        if item_id is None:
            return None, None, 0
        known = select(Item.id).join(Batch, Batch.id == Item.batch_id).where(Item.id == item_id, Batch.task == task)
        if session.scalar(known) is None:
            raise AssignmentNotFoundError(f"no item {item_id} of this task")
    return leases.adjudicate(user_id, item_id), agreement.get(item_id), len(agreement)


def _history_row(judgment: Judgment, item: Item, task: str, rules: list[Json]) -> Json:
    return {
        "judgment": judgment.id,
        "assignment": judgment.assignment_id,
        "task": task,
        "title": TASKS[task].title,
        "prompt": excerpt(item.content["prompt"]),
        "answer": TASKS[task].summary(judgment.answer or {}, rules),
        "at": judgment.created_at,
        "edited": judgment.kind == "edit",
    }


def _item_json(services: Services, user_id: int, assignment_id: int) -> Json:
    context = services.judgments.load(user_id, assignment_id)
    assignment, task = context.assignment, TASKS[context.batch.task]
    return {
        "assignment": assignment.id,
        "view": task.view(context.item.content, assignment.shown_order, context.batch.settings, context.rules),
        "draft": assignment.draft,
        "sequence": assignment.draft_seq,
        "changing": assignment.current_id is not None,
        "transcript": messages_html(assignment.transcript) if assignment.transcript is not None else None,
        "others": _labelers_answers(services, context) if assignment.adjudication else None,
    }


def _labelers_answers(services: Services, context: AssignmentContext) -> list[Json]:
    """Return the labelers' answers in the order shown to the lead."""
    order, task = context.assignment.shown_order, TASKS[context.batch.task]
    query = (
        select(User.pseudonym, Judgment)
        .join(Judgment, Judgment.user_id == User.id)
        .join(Assignment, Assignment.current_id == Judgment.id)
        .where(Assignment.item_id == context.item.id, ~Assignment.adjudication)
    )
    with services.database.read() as session:
        rows = session.execute(query).all()
    return [
        {"labeler": name, "answer": task.shown(task.canonical(judgment.answer or {}, judgment.shown_order), order)}
        for name, judgment in rows
    ]


def _page(services: Services, user_id: int, task: str, assignment: Assignment | None) -> Json:
    """Return an item and the current guidelines. `unread` is the id of the guidelines until the user has opened them."""
    with services.database.read() as session:
        newest, unread = guidelines.newest(session, task), guidelines.unread(session, task, user_id)
    return {
        "guidelines": to_html(newest.text if newest else ""),
        "version": newest.id if newest else None,
        "unread": unread.id if unread else None,
        "item": _item_json(services, user_id, assignment.id) if assignment else None,
    }


def _training_feedback(services: Services, user_id: int, assignment_id: int) -> Json | None:
    """Return the feedback on a training item: agreement, known answer in the shown order, and explanation."""
    context = services.judgments.load(user_id, assignment_id)
    item, order, task = context.item, context.assignment.shown_order, TASKS[context.batch.task]
    if item.purpose != "training" or not item.gold or context.assignment.current_id is None:
        return None
    known = {field: value for field, value in item.gold.items() if field != "explanation"}
    with services.database.read() as session:
        judgment = session.get_one(Judgment, context.assignment.current_id)
    own = task.canonical(judgment.answer or {}, order)
    return {
        "agreement": task.gold_agreement(own, item.gold),
        "known": task.known(task.shown(known, order), context.rules),
        "own": task.summary(judgment.answer or {}, context.rules),
        "explanation": to_html(item.gold.get("explanation", "")),
    }
