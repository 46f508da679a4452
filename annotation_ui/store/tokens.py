"""API tokens: scoped, revocable, and stored only as SHA-256 hashes."""

import hashlib
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import or_, select, update

from align.core.errors import UserError
from annotation_ui.store import audit
from annotation_ui.store.audit import Actor
from annotation_ui.store.database import Database
from annotation_ui.store.schema import ApiToken, User
from annotation_ui.tasks import Json

SCOPES = {
    "import": "create batches",
    "read": "read progress",
    "export": "export and follow judgments",
}
"""Scope -> description of the requests that it allows."""
PREFIX = "align_"  # lets secret scanners recognize a token
BYTES = 32
USED_SECONDS = 60.0  # minimum interval between writes of the time of last use
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Tokens:
    """Manages the tokens in `database`."""

    database: Database

    def create(self, name: str, scopes: Sequence[str], user_id: int | None = None) -> str:
        """Create a token and return it. It cannot be retrieved later.

        Args:
            name: unique name of the token. It cannot be reused, even after the token is revoked.
            scopes: keys of `SCOPES`.
            user_id: id of the lead who creates the token, or None for a shell command.
        """
        if not _NAME.fullmatch(name):
            raise UserError(f"token name {name!r}: use at most 64 letters, digits, '.', '_' and '-'")
        unknown = [scope for scope in scopes if scope not in SCOPES]
        if unknown or not scopes:
            raise UserError(f"scope {unknown[0] if unknown else ''!r}: must be one or more of {', '.join(SCOPES)}")
        token = PREFIX + secrets.token_urlsafe(BYTES)
        with self.database.write() as session:
            self.database.lock_table(session, ApiToken)
            if session.scalar(select(ApiToken.id).where(ApiToken.name == name)) is not None:
                raise UserError(f"token name {name!r} is already used, or was used by a revoked token")
            kept = ",".join(scope for scope in SCOPES if scope in scopes)
            session.add(ApiToken(name=name, token_hash=_hashed(token), scopes=kept, user_id=user_id))
            audit.record(session, "create token", {"token": name, "scopes": kept}, Actor(user_id))
        return token

    def revoke(self, name: str, user_id: int | None = None) -> None:
        """Revoke a token."""
        with self.database.write() as session:
            token = session.scalar(select(ApiToken).where(ApiToken.name == name).with_for_update())
            if token is None:
                raise UserError(f"no token {name!r}")
            if token.revoked_at is not None:
                raise UserError(f"token {name!r} is already revoked")
            token.revoked_at = time.time()
            audit.record(session, "revoke token", {"token": name}, Actor(user_id))

    def check(self, token: str) -> ApiToken | None:
        """Return the stored token, or None if it is unknown or revoked, or its creator is no longer an active lead."""
        query = select(ApiToken).outerjoin(User, User.id == ApiToken.user_id)
        by_a_lead = or_(ApiToken.user_id.is_(None), (User.role == "lead") & User.active)
        with self.database.read() as session:
            found = session.scalar(
                query.where(ApiToken.token_hash == _hashed(token), ApiToken.revoked_at.is_(None), by_a_lead)
            )
        now = time.time()
        if found is not None and now - (found.last_used_at or 0) > USED_SECONDS:
            with self.database.write() as session:
                session.execute(update(ApiToken).where(ApiToken.id == found.id).values(last_used_at=now))
        return found

    def rows(self) -> list[Json]:
        """Return all tokens without secrets, sorted by name."""
        query = select(ApiToken, User.name).outerjoin(User, User.id == ApiToken.user_id).order_by(ApiToken.name)
        with self.database.read() as session:
            return [
                {
                    "token": token.name,
                    "scopes": token.scopes.replace(",", ", "),
                    "made by": user or "shell",
                    "valid": token.revoked_at is None,
                    "added": token.created_at,
                    "last used": token.last_used_at,
                }
                for token, user in session.execute(query)
            ]


def _hashed(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
