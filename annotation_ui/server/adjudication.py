"""A lead's decisions of disagreements, worst first. They do not take labelers' slots."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, HTTPException, Request
from sqlalchemy import select

from annotation_ui.reports import overview
from annotation_ui.server.bodies import NextDecision
from annotation_ui.store.database import Database
from annotation_ui.store.judgments import AssignmentNotFoundError
from annotation_ui.store.leases import Leases
from annotation_ui.store.schema import Assignment, Batch, Item
from annotation_ui.tasks import Json, comparable_tasks


@dataclass(frozen=True)
class Decision:
    """An item opened for a lead's decision, and how many disagreements are left with it."""

    assignment: Assignment
    agreement: float | None
    left: int


def next_decision(leases: Leases, user_id: int, task: str, item_id: int | None = None) -> Decision | None:
    """Open an item for decision.

    Args:
        task: one of `comparable_tasks`.
        item_id: the item; None for the one that this lead has open, else the worst disagreement that they have not skipped.

    Returns:
        The decision, or None if no disagreement is left.

    Raises:
        AssignmentNotFoundError: if the task has no such item.
    """
    rows = _undecided(leases.database, user_id, task)
    agreement = {row["item"]: row["agreement"] for row in rows}
    if item_id is None:
        item_id = _open_item(leases.database, user_id, task) or next(iter(agreement), None)
    if item_id is None:
        return None
    with leases.database.read() as session:
        known = select(Item.id).join(Batch, Batch.id == Item.batch_id).where(Item.id == item_id, Batch.task == task)
        if session.scalar(known) is None:
            raise AssignmentNotFoundError(f"no item {item_id} of this task")
    assignment = leases.adjudicate(user_id, item_id)
    return Decision(assignment, agreement.get(item_id), len(agreement))


def _undecided(database: Database, user_id: int, task: str) -> list[dict[str, Any]]:
    """The disagreements, worst first, without those that this lead skipped."""
    own = (Assignment.user_id == user_id, Assignment.adjudication, Assignment.state == "skipped")
    with database.read() as session:
        skipped = set(session.scalars(select(Assignment.item_id).where(*own)))
        return [row for row in overview.disagreements(session, task, limit=None) if row["item"] not in skipped]


def _open_item(database: Database, user_id: int, task: str) -> int | None:
    """The item that this lead has open for decision."""
    own = (Assignment.user_id == user_id, Assignment.task == task, Assignment.adjudication)
    with database.read() as session:
        query = select(Assignment.item_id).where(*own, Assignment.state == "leased", Assignment.expires_at > time.time())
        return session.scalar(query.order_by(Assignment.leased_at.desc()).limit(1))


def decision_routes(leases: Leases, page: Callable[[int, str, Assignment | None], Json]) -> APIRouter:
    """The route that the page calls after "Decide it".

    Args:
        page: (user id, task, assignment or None) -> its view on the labelers' page.
    """
    router = APIRouter()

    @router.post("/decide/{task}/next")
    def next_disagreement(request: Request, task: str, body: NextDecision) -> Json:
        user = request.state.user
        if user.role != "lead":
            raise HTTPException(403, "for leads only")
        if task not in comparable_tasks():
            raise HTTPException(404, "no such task")
        decision = next_decision(leases, user.id, task, body.item)
        if decision is None:
            return {**page(user.id, task, None), "deciding": {"left": 0, "agreement": None}}
        state = {"left": decision.left, "agreement": decision.agreement, "item": decision.assignment.item_id}
        return {**page(user.id, task, decision.assignment), "deciding": state}

    return router
