"""The tables. One schema for SQLite and PostgreSQL; `migrations/` creates it.

What a person judged lives in `judgments`, which the database itself keeps append-only (a trigger refuses UPDATE and
DELETE): an edit or an undo is a further row. Everything else (leases, drafts, counters) may be lost and rebuilt.
Times are UTC seconds since 1970.
"""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import JSON, CheckConstraint, Float, ForeignKey, Index, MetaData, String, Text, UniqueConstraint, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

TASKS = ("rank", "rules", "demonstrate", "probe", "compare")
ROLES = ("labeler", "lead")
KINDS = ("submit", "edit", "late", "adjudicate", "skip", "undo")


class Base(DeclarativeBase):
    """Named constraints, so that a migration can drop what it made on either database."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012  (SQLAlchemy's own form)
        dict[str, Any]: JSON(none_as_null=True),
        list[int]: JSON(none_as_null=True),
        list[dict[str, str]]: JSON(none_as_null=True),
        float: Float(precision=53),
    }


class User(Base):
    """Someone who signs in. Exports name a labeler only by `pseudonym`."""

    __tablename__ = "users"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(64), unique=True)
    pseudonym: Mapped[str] = mapped_column(String(32), unique=True)
    role: Mapped[str] = mapped_column(String(16))
    password_hash: Mapped[str] = mapped_column(Text)
    active: Mapped[bool] = mapped_column(default=True)
    created_at: Mapped[float] = mapped_column(default=time.time)


class SignIn(Base):
    """A session: the cookie's token is kept only as its hash."""

    __tablename__ = "sign_ins"
    token_hash: Mapped[str] = mapped_column(String(64), primary_key=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"), index=True)
    created_at: Mapped[float] = mapped_column(default=time.time)
    expires_at: Mapped[float]


class FailedSignIn(Base):
    """One wrong password; the rate limit counts these."""

    __tablename__ = "failed_sign_ins"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(64), index=True)
    address: Mapped[str] = mapped_column(String(64), index=True)
    at: Mapped[float] = mapped_column(default=time.time)


class RuleSet(Base):
    """One version of a rule file; a changed file is a new row."""

    __tablename__ = "rule_sets"
    __table_args__ = (UniqueConstraint("name", "digest"),)
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(64))
    digest: Mapped[str] = mapped_column(String(64))
    content: Mapped[dict[str, Any]]
    created_at: Mapped[float] = mapped_column(default=time.time)


class Guideline(Base):
    """One version of a task's guidelines (Markdown); the newest is shown."""

    __tablename__ = "guidelines"
    id: Mapped[int] = mapped_column(primary_key=True)
    task: Mapped[str] = mapped_column(String(16), index=True)
    text: Mapped[str] = mapped_column(Text)
    author_id: Mapped[int | None] = mapped_column(ForeignKey("users.id"))
    created_at: Mapped[float] = mapped_column(default=time.time)


class Batch(Base):
    """Items that are given out together: one task, one overlap, one priority (higher first)."""

    __tablename__ = "batches"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(128), unique=True)
    task: Mapped[str] = mapped_column(String(16))
    overlap: Mapped[int]
    priority: Mapped[int] = mapped_column(default=0)
    open: Mapped[bool] = mapped_column(default=True)
    rule_set_id: Mapped[int | None] = mapped_column(ForeignKey("rule_sets.id"))
    settings: Mapped[dict[str, Any]] = mapped_column(default=dict)
    created_at: Mapped[float] = mapped_column(default=time.time)


class Item(Base):
    """One thing to judge. `taken` slots of `needed` are leased or done; `returned` says that a slot came back."""

    __tablename__ = "items"
    __table_args__ = (
        UniqueConstraint("batch_id", "position"),
        CheckConstraint("taken >= 0 AND taken <= needed", name="slots"),
        Index("ix_items_free", "batch_id", "position", sqlite_where=text("taken < needed"),
              postgresql_where=text("taken < needed")),
        Index("ix_items_returned", "batch_id", "position", sqlite_where=text("returned AND taken < needed"),
              postgresql_where=text("returned AND taken < needed")),
    )  # fmt: skip
    id: Mapped[int] = mapped_column(primary_key=True)
    batch_id: Mapped[int] = mapped_column(ForeignKey("batches.id"))
    position: Mapped[int]
    external_id: Mapped[str | None] = mapped_column(Text)
    content: Mapped[dict[str, Any]]
    gold: Mapped[dict[str, Any] | None]
    needed: Mapped[int]
    taken: Mapped[int] = mapped_column(default=0)
    returned: Mapped[bool] = mapped_column(default=False)


class Assignment(Base):
    """A labeler's hold on an item: the lease, the order shown, the draft. State: leased, done, skipped or expired.

    `transcript` is a probe's conversation: the server writes it, the browser cannot.
    `current_id` is the judgment that counts now; it can be rebuilt from `judgments` alone. Leased with one: its labeler
    is changing it.
    """

    __tablename__ = "assignments"
    __table_args__ = (
        UniqueConstraint("item_id", "user_id", "adjudication"),
        Index("ix_assignments_cursor", "user_id", "batch_id", "position"),
        Index("ix_assignments_mine", "user_id", "task", "state", "leased_at"),
        Index("ix_assignments_expiry", "expires_at", sqlite_where=text("state = 'leased'"),
              postgresql_where=text("state = 'leased'")),
    )  # fmt: skip
    id: Mapped[int] = mapped_column(primary_key=True)
    item_id: Mapped[int] = mapped_column(ForeignKey("items.id"))
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    batch_id: Mapped[int] = mapped_column(ForeignKey("batches.id"))
    position: Mapped[int]
    task: Mapped[str] = mapped_column(String(16))
    adjudication: Mapped[bool] = mapped_column(default=False)
    state: Mapped[str] = mapped_column(String(16), default="leased")
    shown_order: Mapped[list[int]]
    draft: Mapped[dict[str, Any] | None]
    draft_seq: Mapped[int] = mapped_column(default=0)
    transcript: Mapped[list[dict[str, str]] | None]
    opened_at: Mapped[float]
    leased_at: Mapped[float]
    expires_at: Mapped[float]
    current_id: Mapped[int | None] = mapped_column(index=True)


class Judgment(Base):
    """Append-only: what one labeler decided, as it stood on the screen (`answer` is in the order shown)."""

    __tablename__ = "judgments"
    id: Mapped[int] = mapped_column(primary_key=True)
    request_id: Mapped[str] = mapped_column(String(64), unique=True)
    assignment_id: Mapped[int] = mapped_column(ForeignKey("assignments.id"), index=True)
    item_id: Mapped[int] = mapped_column(ForeignKey("items.id"), index=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"), index=True)
    kind: Mapped[str] = mapped_column(String(16))
    answer: Mapped[dict[str, Any] | None]
    shown_order: Mapped[list[int]]
    seconds: Mapped[float]
    rule_set_id: Mapped[int | None] = mapped_column(ForeignKey("rule_sets.id"))
    guideline_id: Mapped[int | None] = mapped_column(ForeignKey("guidelines.id"))
    created_at: Mapped[float] = mapped_column(default=time.time, index=True)


class Export(Base):
    """The manifest of each export made."""

    __tablename__ = "exports"
    id: Mapped[int] = mapped_column(primary_key=True)
    user_id: Mapped[int | None] = mapped_column(ForeignKey("users.id"))
    manifest: Mapped[dict[str, Any]]
    created_at: Mapped[float] = mapped_column(default=time.time)
