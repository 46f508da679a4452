"""Users, passwords and sessions. A password and a cookie's token are stored only as hashes."""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from dataclasses import dataclass

from argon2 import PasswordHasher
from argon2.exceptions import VerificationError
from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from align.errors import UserError
from annotation_ui.database import Database
from annotation_ui.schema import ROLES, FailedSignIn, SignIn, User

MIN_PASSWORD, MAX_PASSWORD = 10, 200
FAILURES, WINDOW_SECONDS = 5, 900.0  # wrong passwords for one name from one address, in this time
ADDRESS_FAILURES = 50  # ... from one address, whatever the names
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HASHER = PasswordHasher()
_NOBODY = _HASHER.hash(secrets.token_hex(16))  # verified when there is no such user, so that time tells nothing


class TooManyAttemptsError(Exception):
    """Signing in is blocked for a while."""


@dataclass(frozen=True)
class Auth:
    """Sign-in against `database`; a session lasts `hours` after it was last used."""

    database: Database
    hours: float = 12.0

    def create_user(self, name: str, role: str, password: str | None = None) -> str:
        """Add a user and return the password (a random one if none is given)."""
        if not _NAME.fullmatch(name):
            raise UserError(f"user name {name!r}: letters, digits, '.', '_' and '-' only, at most 64")
        if role not in ROLES:
            raise UserError(f"role {role!r}: must be one of {', '.join(ROLES)}")
        password = password or secrets.token_urlsafe(12)
        hashed = hash_password(password)
        with self.database.write() as session:
            if session.scalar(select(User.id).where(User.name == name)) is not None:
                raise UserError(f"there is a user {name!r} already")
            pseudonym = f"labeler-{secrets.token_hex(4)}"
            session.add(User(name=name, role=role, password_hash=hashed, pseudonym=pseudonym))
        return password

    def set_password(self, name: str, password: str | None = None) -> str:
        """Give a user a new password and end their sessions."""
        password = password or secrets.token_urlsafe(12)
        hashed = hash_password(password)
        with self.database.write() as session:
            user = _named(session, name)
            user.password_hash = hashed
            session.execute(delete(SignIn).where(SignIn.user_id == user.id))
        return password

    def set_active(self, name: str, active: bool) -> None:
        """Let a user in, or keep them out and end their sessions; what they judged stays."""
        with self.database.write() as session:
            user = _named(session, name)
            user.active = active
            if not active:
                session.execute(delete(SignIn).where(SignIn.user_id == user.id))

    def first_lead(self) -> str | None:
        """The password of the user `lead`, made if there is no user at all; else None."""
        with self.database.read() as session:
            if session.scalar(select(func.count(User.id))):
                return None
        return self.create_user("lead", "lead")

    def sign_in(self, name: str, password: str, address: str) -> str | None:
        """A new session's token, or None for a wrong name or password."""
        self._check_rate(name, address)
        with self.database.read() as session:
            user = session.scalar(select(User).where(User.name == name, User.active))
        correct = _verify(user.password_hash if user else _NOBODY, password)
        if user is None or not correct:
            with self.database.write() as session:
                session.add(FailedSignIn(name=name[:64], address=address[:64]))
            return None
        return self.start_session(user.id)

    def start_session(self, user_id: int) -> str:
        """A token that stands for the user until it expires."""
        token = secrets.token_urlsafe(32)
        now = time.time()
        with self.database.write() as session:
            session.execute(delete(SignIn).where(SignIn.expires_at < now))
            session.add(SignIn(token_hash=_digest(token), user_id=user_id, expires_at=now + self.hours * 3600))
        return token

    def user_of(self, token: str | None) -> User | None:
        """The signed-in user of a cookie's token. A session in its second half is extended."""
        if not token:
            return None
        now = time.time()
        with self.database.read() as session:
            query = select(User, SignIn.expires_at).join(SignIn, SignIn.user_id == User.id)
            found = session.execute(query.where(SignIn.token_hash == _digest(token), User.active)).first()
        if found is None or found.expires_at < now:
            return None
        if found.expires_at - now < self.hours * 1800:
            with self.database.write() as session:
                row = session.get(SignIn, _digest(token))
                if row is not None:
                    row.expires_at = now + self.hours * 3600
        return found[0]

    def sign_out(self, token: str | None) -> None:
        if token:
            with self.database.write() as session:
                session.execute(delete(SignIn).where(SignIn.token_hash == _digest(token)))

    def _check_rate(self, name: str, address: str) -> None:
        recent = select(func.count(FailedSignIn.id)).where(FailedSignIn.at > time.time() - WINDOW_SECONDS)
        with self.database.read() as session:
            here = session.scalar(recent.where(FailedSignIn.address == address[:64])) or 0
            both = session.scalar(recent.where(FailedSignIn.address == address[:64], FailedSignIn.name == name[:64]))
        if here >= ADDRESS_FAILURES or (both or 0) >= FAILURES:
            raise TooManyAttemptsError("too many wrong passwords: wait a quarter of an hour")


def hash_password(password: str) -> str:
    if not MIN_PASSWORD <= len(password) <= MAX_PASSWORD:
        raise UserError(f"a password has {MIN_PASSWORD} to {MAX_PASSWORD} characters")
    return _HASHER.hash(password)


def _verify(hashed: str, password: str) -> bool:
    try:
        return len(password) <= MAX_PASSWORD and _HASHER.verify(hashed, password)
    except VerificationError:
        return False


def _named(session: Session, name: str) -> User:
    user = session.scalar(select(User).where(User.name == name))
    if user is None:
        raise UserError(f"no user {name!r}")
    return user


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
