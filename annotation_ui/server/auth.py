"""Users, passwords and sessions. Passwords and session tokens are stored only as hashes."""

import hashlib
import re
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass

from argon2 import PasswordHasher
from argon2.exceptions import VerificationError
from sqlalchemy import delete, func, select

from align.core.errors import UserError
from annotation_ui.store.database import Database
from annotation_ui.store.schema import FailedSignIn, SignIn, User
from annotation_ui.store.users import MAX_NAME, keep_a_lead, lookalike, normal_name, user_named

MIN_PASSWORD, MAX_PASSWORD = 10, 200
FAILURES, WINDOW_SECONDS = 5, 900.0  # failed sign-ins per name and address within this time
NAME_FAILURES = 50  # failed sign-ins per name from all addresses, against attackers who change the address
RENEW_SECONDS = 300.0
_PSEUDONYM = re.compile(r"labeler-[0-9a-f]{8}")
_HASHER = PasswordHasher()
# Verified if the user does not exist, so that the response time does not reveal which names exist.
_UNKNOWN_USER_HASH = _HASHER.hash(secrets.token_hex(16))


class TooManyAttemptsError(Exception):
    """Raised while sign-in is blocked after too many failed attempts."""


@dataclass(frozen=True)
class SignedIn:
    """User of a session. If `renewed`, the session was extended and its cookie must be set again."""

    user: User
    renewed: bool


@dataclass(frozen=True)
class Auth:
    """Manages users and sessions in `database`. A session expires `hours` after its last use."""

    database: Database
    hours: float = 12.0

    def create_user(self, name: str, role: str, password: str | None = None) -> str:
        """Create a user and return the password. Default: a random password."""
        given, name = name, normal_name(name)
        if not name:
            rule = f"letters of one alphabet, digits, '.', '_', '-', '@' and '+' only, at most {MAX_NAME}"
            raise UserError(f"user name {given!r}: {rule}")
        if _PSEUDONYM.fullmatch(lookalike(name)):
            raise UserError(f"user name {name!r} has the form of a pseudonym; choose another name")
        password = password or secrets.token_urlsafe(12)
        hashed = hash_password(password)
        with self.database.write() as session:
            for other in session.scalars(select(User.name)):  # `Ann` and `ann` would look like one person
                if lookalike(other) == lookalike(name):
                    raise UserError(f"user {other!r} already exists")
            pseudonym = f"labeler-{secrets.token_hex(4)}"
            session.add(User(name=name, role=role, password_hash=hashed, pseudonym=pseudonym))
        return password

    def set_password(self, name: str, password: str | None = None) -> str:
        """Set a user's password (default: a random password), end the user's sessions, and return the password."""
        password = password or secrets.token_urlsafe(12)
        hashed = hash_password(password)
        with self.database.write() as session:
            user = user_named(session, name)
            user.password_hash = hashed
            session.execute(delete(SignIn).where(SignIn.user_id == user.id))
            session.execute(delete(FailedSignIn).where(FailedSignIn.name == user.name))
        return password

    def set_active(self, name: str, active: bool) -> None:
        """Activate or deactivate a user. Deactivation ends the user's sessions and keeps the judgments."""
        with self.database.write() as session:
            user = user_named(session, name)
            if active:
                session.execute(delete(FailedSignIn).where(FailedSignIn.name == user.name))
            else:
                keep_a_lead(self.database, session, user)
                session.execute(delete(SignIn).where(SignIn.user_id == user.id))
            user.active = active

    def set_role(self, name: str, role: str) -> None:
        """Set a user's role."""
        with self.database.write() as session:
            user = user_named(session, name)
            if role != "lead":
                keep_a_lead(self.database, session, user)
            user.role = role

    def first_lead(self) -> str | None:
        """Create the user `lead` and return the password, or return None if there is an active lead."""
        with self.database.read() as session:
            if session.scalar(select(User.id).where(User.role == "lead", User.active).limit(1)) is not None:
                return None
            taken = session.scalar(select(User.id).where(User.name == "lead")) is not None
        if taken:
            raise UserError("no active lead; run `align annotate activate-user NAME --role lead`")
        return self.create_user("lead", "lead")

    def sign_in(self, name: str, password: str, address: str) -> str | None:
        """Start a session and return its token, or return None if the name or password is wrong.

        Raises:
            TooManyAttemptsError: If sign-in is blocked after too many wrong passwords.
        """
        name = normal_name(name)
        if not name:  # no user has an invalid name, and PostgreSQL cannot store some of them
            _verify(_UNKNOWN_USER_HASH, password)
            return None
        attempt = self._begin_attempt(name, address[:64])
        with self.database.read() as session:
            user = session.scalar(select(User).where(User.name == name, User.active))
        correct = _verify(user.password_hash if user else _UNKNOWN_USER_HASH, password)
        if user is None or not correct:
            return None
        with self.database.write() as session:
            session.execute(delete(FailedSignIn).where(FailedSignIn.id == attempt))
        return self.start_session(user.id)

    def start_session(self, user_id: int) -> str:
        """Start a session for a user and return its token."""
        token = secrets.token_urlsafe(32)
        now = time.time()
        with self.database.write() as session:
            session.execute(delete(SignIn).where(SignIn.expires_at < now))
            session.add(SignIn(token_hash=_hash_token(token), user_id=user_id, expires_at=now + self.hours * 3600))
        return token

    def signed_in(self, token: str | None) -> SignedIn | None:
        """Return the user of a token's session, or None. Extend the session at most once per `RENEW_SECONDS`."""
        if not token:
            return None
        now = time.time()
        with self.database.read() as session:
            query = select(User, SignIn.expires_at).join(SignIn, SignIn.user_id == User.id)
            row = session.execute(query.where(SignIn.token_hash == _hash_token(token), User.active)).first()
        if row is None or row.expires_at < now:
            return None
        length = self.hours * 3600
        renewed = row.expires_at - now < length - min(RENEW_SECONDS, length / 2)
        if renewed:
            with self.database.write() as session:
                sign_in = session.get(SignIn, _hash_token(token))
                if sign_in is not None:
                    sign_in.expires_at = now + length
        return SignedIn(row[0], renewed)

    def named_by_proxy(self, name: str) -> SignedIn | None:
        """Return the active user signed in by the proxy. No session is stored."""
        with suppress(UnicodeError):  # headers are decoded as Latin-1
            name = name.encode("latin-1").decode()
        with self.database.read() as session:
            user = session.scalar(select(User).where(User.name == normal_name(name), User.active))
        return SignedIn(user, renewed=False) if user else None

    def sign_out(self, token: str | None) -> None:
        """End the session of a token, if there is one."""
        if token:
            with self.database.write() as session:
                session.execute(delete(SignIn).where(SignIn.token_hash == _hash_token(token)))

    def _begin_attempt(self, name: str, address: str) -> int:
        """Record an attempt as failed before verifying the password, so that parallel attempts are counted.

        Attempts are counted per name, because users in a lab often share one address and must not lock each other out.
        """
        with self.database.write() as session:
            self.database.lock_table(session, FailedSignIn)
            session.execute(delete(FailedSignIn).where(FailedSignIn.at < time.time() - WINDOW_SECONDS))
            failures = select(func.count(FailedSignIn.id)).where(FailedSignIn.name == name)
            from_address = session.scalar(failures.where(FailedSignIn.address == address)) or 0
            if from_address >= FAILURES or (session.scalar(failures) or 0) >= NAME_FAILURES:
                raise TooManyAttemptsError("too many failed sign-ins; wait 15 minutes")
            attempt = FailedSignIn(name=name, address=address)
            session.add(attempt)
            session.flush()
            return attempt.id


def hash_password(password: str) -> str:
    """Return the Argon2 hash of a password."""
    if not MIN_PASSWORD <= len(password) <= MAX_PASSWORD:
        raise UserError(f"passwords must have {MIN_PASSWORD} to {MAX_PASSWORD} characters")
    return _HASHER.hash(password)


def _verify(hashed: str, password: str) -> bool:
    try:
        return len(password) <= MAX_PASSWORD and _HASHER.verify(hashed, password)
    except VerificationError:
        return False


def _hash_token(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
