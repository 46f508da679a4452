"""The audit trail: who did what with tokens, data and personal data. Records are only added."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from annotation_ui.store.schema import ApiToken, AuditRecord, User
from annotation_ui.tasks import Json

SHELL = "shell"


def record(session: Session, action: str, detail: Json, *, user_id: int | None = None, token_id: int | None = None) -> None:
    """Add a record to the open transaction. `detail` must not name a person: users are named by `user_id` alone."""
    session.add(AuditRecord(action=action, detail=detail, user_id=user_id, token_id=token_id))


def records(session: Session, limit: int = 100) -> list[Json]:
    """The newest records, newest first, each with the name of the lead or the token."""
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
            "by": f"token {token}" if token else user or SHELL,
            **{"detail": ", ".join(f"{key} {value}" for key, value in sorted(row.detail.items()))},
        }
        for row, user, token in session.execute(query)
    ]
