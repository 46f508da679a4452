"""What a labeler's browser calls. Every route works on the signed-in user's own assignments and no others."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Path, Query, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, Field
from sqlalchemy import func, select

from annotation_ui.judgments import ConflictError, NotYoursError, Work
from annotation_ui.markdown import messages_html, to_html
from annotation_ui.schema import Assignment, Batch, Guideline, Item, Judgment, User
from annotation_ui.services import Services
from annotation_ui.tasks import TASKS, BadInputError, Json
from annotation_ui.tasks.base import MAX_TEXT, excerpt

TaskName = Literal["rank", "rules", "demonstrate", "probe", "compare"]
RequestId = Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{8,64}$")]
PAGE = 20  # answers on one page of a labeler's history
AssignmentId = Annotated[int, Path(ge=1, le=2**31 - 1)]


class Draft(BaseModel):
    draft: dict[str, Any]
    sequence: int = Field(ge=0, le=2**31 - 1)


class Handed(BaseModel):
    request_id: RequestId
    answer: dict[str, Any] = {}
    reason: str = ""
    seconds: float = Field(0, ge=0, le=1e7)


class Undo(BaseModel):
    request_id: RequestId
    assignment: int | None = Field(None, ge=1, le=2**31 - 1)


class Text(BaseModel):
    text: str = Field(max_length=MAX_TEXT)


def add_routes(app: FastAPI, services: Services) -> None:
    """Put the labelers' routes under /api."""
    app.include_router(_work_routes(services), prefix="/api")
    app.include_router(_text_routes(services), prefix="/api")

    @app.exception_handler(NotYoursError)
    @app.exception_handler(ConflictError)
    @app.exception_handler(BadInputError)
    def refuse(_: Request, error: Exception) -> JSONResponse:
        status = {NotYoursError: 404, ConflictError: 409}.get(type(error), 422)
        return JSONResponse({"error": str(error)}, status)


def _work_routes(services: Services) -> APIRouter:
    router = APIRouter()
    judgments = services.judgments

    @router.get("/tasks")
    def tasks(request: Request) -> Json:
        """Who is signed in, and which tasks have an open batch."""
        user: User = request.state.user
        with services.database.read() as session:
            open_tasks = set(session.scalars(select(Batch.task).where(Batch.open).distinct()))
        listed = [{"name": t.name, "title": t.title, "open": t.name in open_tasks} for t in TASKS.values()]
        return {"user": user.name, "lead": user.role == "lead", "tasks": listed}

    @router.post("/tasks/{task}/next")
    def next_item(request: Request, task: TaskName) -> Json:
        """The labeler's open item of a task, or a new one."""
        user_id = request.state.user.id
        assignment = services.leases.next(user_id, task)
        page = {"done": _done(services, user_id, task), "guidelines": _guidelines(services, task)}
        return {**page, "item": _item(services, user_id, assignment.id) if assignment else None}

    @router.post("/tasks/{task}/undo")
    def undo(request: Request, task: TaskName, body: Undo) -> Json:
        reopened = judgments.undo(request.state.user.id, task, body.request_id, body.assignment)
        return {"undone": reopened is not None}

    @router.put("/assignments/{number}/draft")
    def save_draft(request: Request, number: AssignmentId, body: Draft) -> Json:
        return {"held": judgments.save_draft(request.state.user.id, number, body.draft, body.sequence)}

    @router.post("/assignments/{number}/submit")
    def submit(request: Request, number: AssignmentId, body: Handed) -> Json:
        user_id = request.state.user.id
        judgment = judgments.submit(user_id, number, body.request_id, body.answer, body.seconds)
        return {"judgment": judgment.id, "kind": judgment.kind}

    @router.post("/assignments/{number}/skip")
    def skip(request: Request, number: AssignmentId, body: Handed) -> Json:
        judgment = judgments.skip(request.state.user.id, number, body.request_id, body.reason, body.seconds)
        return {"judgment": judgment.id, "kind": judgment.kind}

    @router.get("/history")
    def history(request: Request, before: Annotated[int | None, Query(ge=1, le=2**31 - 1)] = None) -> Json:
        """What the labeler handed in, newest first, a page at a time."""
        done = judgments.history(request.state.user.id, before, PAGE + 1)
        return {"rows": [_handed_in(*each) for each in done[:PAGE]], "more": len(done) > PAGE}

    @router.post("/assignments/{number}/reopen")
    def reopen(request: Request, number: AssignmentId) -> Json:
        judgments.reopen(request.state.user.id, number)
        return {}

    @router.post("/assignments/{number}/keep")
    def keep(request: Request, number: AssignmentId) -> Json:
        judgments.keep(request.state.user.id, number)
        return {}

    return router


def _text_routes(services: Services) -> APIRouter:
    router = APIRouter()

    @router.post("/preview")
    def preview(body: Text) -> Json:
        return {"html": to_html(body.text)}

    @router.post("/assignments/{number}/say")
    def say(request: Request, number: AssignmentId, body: Text) -> StreamingResponse:
        """Send a message to the probed model; its reply streams back as plain text."""
        user_id = request.state.user.id
        checkpoint, messages = services.probing.say(user_id, number, body.text)
        reply = services.probing.reply(user_id, number, checkpoint, messages)
        return StreamingResponse(reply, media_type="text/plain; charset=utf-8")

    @router.get("/assignments/{number}/transcript")
    def transcript(request: Request, number: AssignmentId) -> Json:
        assignment = services.judgments.open(request.state.user.id, number).assignment
        return {"messages": messages_html(assignment.transcript or [])}

    return router


def _handed_in(judgment: Judgment, item: Item, task: str) -> Json:
    return {
        "judgment": judgment.id,
        "assignment": judgment.assignment_id,
        "task": task,
        "title": TASKS[task].title,
        "prompt": excerpt(item.content["prompt"]),
        "said": TASKS[task].summary(judgment.answer or {}),
        "at": judgment.created_at,
        "edited": judgment.kind == "edit",
    }


def _item(services: Services, user_id: int, assignment_id: int) -> Json:
    work = services.judgments.open(user_id, assignment_id)
    assignment, task = work.assignment, TASKS[work.batch.task]
    return {
        "assignment": assignment.id,
        "view": task.view(work.item.content, assignment.shown_order, work.batch.settings, work.rules),
        "draft": assignment.draft,
        "sequence": assignment.draft_seq,
        "changing": assignment.current_id is not None,
        "transcript": messages_html(assignment.transcript) if assignment.transcript is not None else None,
        "others": _others(services, work) if assignment.adjudication else None,
    }


def _others(services: Services, work: Work) -> list[Json]:
    """For an adjudicating lead: what the labelers said, in the order shown to the lead."""
    order, task = work.assignment.shown_order, TASKS[work.batch.task]
    query = (
        select(User.pseudonym, Judgment)
        .join(Judgment, Judgment.user_id == User.id)
        .join(Assignment, Assignment.current_id == Judgment.id)
        .where(Assignment.item_id == work.item.id, ~Assignment.adjudication)
    )
    with services.database.read() as session:
        said = session.execute(query).all()
    return [
        {"labeler": name, "answer": task.shown(task.canonical(judgment.answer or {}, judgment.shown_order), order)}
        for name, judgment in said
    ]


def _done(services: Services, user_id: int, task: str) -> int:
    with services.database.read() as session:
        mine = (Assignment.user_id == user_id, Assignment.task == task, Assignment.state == "done")
        return session.scalar(select(func.count()).select_from(Assignment).where(*mine)) or 0


def _guidelines(services: Services, task: str) -> str:
    with services.database.read() as session:
        newest = select(Guideline.text).where(Guideline.task == task).order_by(Guideline.id.desc()).limit(1)
        return to_html(session.scalar(newest) or "")
