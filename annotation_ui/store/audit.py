"""Audit trail of changes to tokens, data and personal data. Records are append-only."""

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from annotation_ui.store.schema import ApiToken, AuditRecord, User
from annotation_ui.tasks import Json


@dataclass(frozen=True)
class Actor:
    """Lead or token that performs an action. Default: a shell command or the server."""

    user_id: int | None = None
    token_id: int | None = None


SHELL = Actor()


def record(session: Session, action: str, detail: Json, by: Actor = SHELL) -> None:
    """Add a record to the open transaction. `detail` must not contain users' names, because a name can be erased later."""
    session.add(AuditRecord(action=action, detail=detail, user_id=by.user_id, token_id=by.token_id))


def records(session: Session, limit: int = 100) -> list[Json]:
    """Return the newest `limit` records, newest first, with the name of the lead or token."""
    query = (
        select(AuditRecord, User.name, ApiToken.name)
        .outerjoin(User, User.id == AuditRecord.user_id)
        .outerjoin(ApiToken, ApiToken.id == AuditRecord.token_id)
        .order_by(AuditRecord.id.desc())
        .limit(limit)
    )
    return [
        {
            "at": row.created_at,
            "action": row.action,
            "by": f"token {token}" if token else user or "shell",
            "detail": ", ".join(f"{key} {value}" for key, value in sorted(row.detail.items())),
        }
        for row, user, token in session.execute(query)
    ]
