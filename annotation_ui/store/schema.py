"""Tables. SQLite and PostgreSQL have the same schema, and `migrations/` upgrades older databases.

Triggers keep the table `judgments` append-only by rejecting UPDATE and DELETE. An edit or an undo adds a row. All other data
(leases, drafts, counters) can be lost or rebuilt. Times are UTC seconds since 1970.
"""

import time
from typing import Any

from sqlalchemy import (
    JSON,
    CheckConstraint,
    Connection,
    Float,
    ForeignKey,
    Index,
    MetaData,
    String,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

USER_ROLES = ("labeler", "lead")
PURPOSES = ("work", "training", "attention")


class Base(DeclarativeBase):
    """Names all constraints, so that migrations can drop them on either database."""

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
        list[dict[str, Any]]: JSON(none_as_null=True),
        float: Float(precision=53),
    }


class User(Base):
    """A user. Exports identify labelers only by `pseudonym`."""

    __tablename__ = "users"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(64), unique=True)
    pseudonym: Mapped[str] = mapped_column(String(32), unique=True)
    role: Mapped[str] = mapped_column(String(16))
    password_hash: Mapped[str] = mapped_column(Text)
    active: Mapped[bool] = mapped_column(default=True)
    created_at: Mapped[float] = mapped_column(default=time.time)


class SignIn(Base):
    """A session. The cookie's token is stored only as a hash."""

    __tablename__ = "sign_ins"
    token_hash: Mapped[str] = mapped_column(String(64), primary_key=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"), index=True)
    created_at: Mapped[float] = mapped_column(default=time.time)
    expires_at: Mapped[float]


class FailedSignIn(Base):
    """A failed or pending sign-in, for the rate limit."""

    __tablename__ = "failed_sign_ins"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(64), index=True)
    address: Mapped[str] = mapped_column(String(64), index=True)
    at: Mapped[float] = mapped_column(default=time.time)


class RuleSet(Base):
    """A version of a rule set. A changed file adds a row."""

    __tablename__ = "rule_sets"
    __table_args__ = (UniqueConstraint("name", "digest"),)
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(64))
    digest: Mapped[str] = mapped_column(String(64))
    content: Mapped[dict[str, Any]]
    created_at: Mapped[float] = mapped_column(default=time.time)


class Guideline(Base):
    """A version of a task's guidelines (Markdown). Labelers see the newest."""

    __tablename__ = "guidelines"
    id: Mapped[int] = mapped_column(primary_key=True)
    task: Mapped[str] = mapped_column(String(16), index=True)
    text: Mapped[str] = mapped_column(Text)
    author_id: Mapped[int | None] = mapped_column(ForeignKey("users.id"))
    created_at: Mapped[float] = mapped_column(default=time.time)


class GuidelineRead(Base):
    """Records that a labeler opened a version of the guidelines."""

    __tablename__ = "guideline_reads"
    guideline_id: Mapped[int] = mapped_column(ForeignKey("guidelines.id"), primary_key=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"), primary_key=True)
    created_at: Mapped[float] = mapped_column(default=time.time)


class Batch(Base):
    """Items with the same task, labelers per item and priority (higher first).

    `complete` is set once all items are imported. Until then, the batch is closed. `version` increases with every change by
    a lead. A deleted batch is closed and excluded from all tables and exports, but its judgments are kept.
    """

    __tablename__ = "batches"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(128), unique=True)
    task: Mapped[str] = mapped_column(String(16))
    labelers_per_item: Mapped[int]
    priority: Mapped[int] = mapped_column(default=0)
    open: Mapped[bool] = mapped_column(default=True)
    rule_set_id: Mapped[int | None] = mapped_column(ForeignKey("rule_sets.id"))
    settings: Mapped[dict[str, Any]] = mapped_column(default=dict)
    complete: Mapped[bool] = mapped_column(default=True)
    version: Mapped[int] = mapped_column(default=1)
    created_at: Mapped[float] = mapped_column(default=time.time)
    deleted_at: Mapped[float | None]


class BatchLabeler(Base):
    """A labeler to whom a batch is assigned. A batch without rows is assigned to all labelers."""

    __tablename__ = "batch_labelers"
    batch_id: Mapped[int] = mapped_column(ForeignKey("batches.id"), primary_key=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"), primary_key=True)


class Item(Base):
    """An item to judge.

    `taken` of the `needed` slots are leased or done. `returned` is set if a slot was given back, because labelers may have
    passed the item while it was not free. `purpose` is work, training or attention. Training items come before a labeler's
    work in the batch, and attention items are mixed into it. Both have a known answer (`gold`).
    """

    __tablename__ = "items"
    __table_args__ = (
        UniqueConstraint("batch_id", "position"),
        CheckConstraint("taken >= 0 AND taken <= needed", name="slots"),
        Index("ix_items_free", "batch_id", "position", sqlite_where=text("taken < needed"),
              postgresql_where=text("taken < needed")),
        Index("ix_items_returned", "batch_id", "position", sqlite_where=text("returned AND taken < needed"),
              postgresql_where=text("returned AND taken < needed")),
        Index("ix_items_attention", "batch_id", "position", sqlite_where=text("purpose = 'attention'"),
              postgresql_where=text("purpose = 'attention'")),
    )  # fmt: skip
    id: Mapped[int] = mapped_column(primary_key=True)
    batch_id: Mapped[int] = mapped_column(ForeignKey("batches.id"))
    position: Mapped[int]
    external_id: Mapped[str | None] = mapped_column(Text)
    content: Mapped[dict[str, Any]]
    gold: Mapped[dict[str, Any] | None]
    purpose: Mapped[str] = mapped_column(String(16), default="work", server_default="work")
    needed: Mapped[int]
    taken: Mapped[int] = mapped_column(default=0)
    returned: Mapped[bool] = mapped_column(default=False)


class Assignment(Base):
    """An item assigned to a labeler, with the lease, the shown order and the draft.

    `state` is leased, done, skipped or expired. `transcript` is a probing conversation, written only by the server.
    `current_id` is the current judgment, and can be rebuilt from `judgments`. If it is set on a leased assignment, the
    labeler is editing the answer.
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
    transcript: Mapped[list[dict[str, Any]] | None]
    opened_at: Mapped[float]
    leased_at: Mapped[float]
    expires_at: Mapped[float]
    current_id: Mapped[int | None] = mapped_column(index=True)


class Judgment(Base):
    """A labeler's or lead's judgment, with the `answer` in the shown order. The table is append-only.

    `kind` is submit, edit, late, adjudicate, skip or undo.
    """

    __tablename__ = "judgments"
    __table_args__ = (Index("ix_judgments_day", "user_id", "created_at"),)
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


class Heartbeat(Base):
    """A single row, written to check that the database accepts writes."""

    __tablename__ = "heartbeats"
    id: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[float]


class Export(Base):
    """Manifest of an export."""

    __tablename__ = "exports"
    id: Mapped[int] = mapped_column(primary_key=True)
    user_id: Mapped[int | None] = mapped_column(ForeignKey("users.id"))
    manifest: Mapped[dict[str, Any]]
    created_at: Mapped[float] = mapped_column(default=time.time)


class ApiToken(Base):
    """A token for the API at /api/v1, stored only as a hash.

    `scopes` are keys of `tokens.SCOPES`, separated by commas. A token created by a lead expires with the lead's access.
    """

    __tablename__ = "api_tokens"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(64), unique=True)
    token_hash: Mapped[str] = mapped_column(String(64), unique=True)
    scopes: Mapped[str] = mapped_column(String(64))
    user_id: Mapped[int | None] = mapped_column(ForeignKey("users.id"))
    created_at: Mapped[float] = mapped_column(default=time.time)
    last_used_at: Mapped[float | None]
    revoked_at: Mapped[float | None]


class AuditRecord(Base):
    """An action of a lead or a token, or of a shell command if neither is set."""

    __tablename__ = "audit_records"
    id: Mapped[int] = mapped_column(primary_key=True)
    action: Mapped[str] = mapped_column(String(32))
    user_id: Mapped[int | None] = mapped_column(ForeignKey("users.id"))
    token_id: Mapped[int | None] = mapped_column(ForeignKey("api_tokens.id"))
    detail: Mapped[dict[str, Any]] = mapped_column(default=dict)
    created_at: Mapped[float] = mapped_column(default=time.time)


def create_tables(connection: Connection) -> None:
    """Create all tables, and the triggers that keep judgments append-only."""
    Base.metadata.create_all(connection)
    if connection.dialect.name == "sqlite":
        replaced = "WHEN EXISTS (SELECT 1 FROM judgments WHERE id = NEW.id OR request_id = NEW.request_id) "
        for verb, name, when in (("UPDATE", "update", ""), ("DELETE", "delete", ""), ("INSERT", "replace", replaced)):
            refuse = f"{when}BEGIN SELECT RAISE(ABORT, 'judgments are append-only'); END"
            connection.execute(text(f"CREATE TRIGGER judgments_no_{name} BEFORE {verb} ON judgments {refuse}"))
        return
    refuse = "$$ BEGIN RAISE EXCEPTION 'judgments are append-only'; END $$"
    connection.execute(text(f"CREATE FUNCTION judgments_are_append_only() RETURNS trigger LANGUAGE plpgsql AS {refuse}"))
    verbs = "UPDATE OR DELETE OR TRUNCATE"
    action = "FOR EACH STATEMENT EXECUTE FUNCTION judgments_are_append_only()"
    connection.execute(text(f"CREATE TRIGGER judgments_append_only BEFORE {verbs} ON judgments {action}"))
