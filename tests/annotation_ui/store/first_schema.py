"""The first schema of the labeling database, of 2026-11-21, for the test of its upgrade."""

import sqlalchemy as sa
from alembic import op


def create() -> None:
    _create_users()
    _create_batches()
    _create_items()
    _create_assignments()
    _create_judgments()
    _forbid_changes_to_judgments()


def _forbid_changes_to_judgments() -> None:
    if op.get_bind().dialect.name == "sqlite":
        for verb in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER judgments_no_{verb.lower()} BEFORE {verb} ON judgments "
                "BEGIN SELECT RAISE(ABORT, 'judgments are append-only'); END"
            )
        return
    op.execute(
        "CREATE FUNCTION judgments_are_append_only() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'judgments are append-only'; END $$"
    )
    op.execute(
        "CREATE TRIGGER judgments_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON judgments "
        "FOR EACH STATEMENT EXECUTE FUNCTION judgments_are_append_only()"
    )


def _create_users() -> None:
    op.create_table(
        "users",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("pseudonym", sa.String(length=32), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("password_hash", sa.Text(), nullable=False),
        sa.Column("active", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_users"),
        sa.UniqueConstraint("name", name="uq_users_name"),
        sa.UniqueConstraint("pseudonym", name="uq_users_pseudonym"),
    )
    op.create_table(
        "sign_ins",
        sa.Column("token_hash", sa.String(length=64), nullable=False),
        sa.Column("user_id", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("expires_at", sa.Float(53), nullable=False),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name="fk_sign_ins_user_id"),
        sa.PrimaryKeyConstraint("token_hash", name="pk_sign_ins"),
    )
    op.create_index("ix_sign_ins_user_id", "sign_ins", ["user_id"])
    op.create_table(
        "failed_sign_ins",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("address", sa.String(length=64), nullable=False),
        sa.Column("at", sa.Float(53), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_failed_sign_ins"),
    )
    op.create_index("ix_failed_sign_ins_address", "failed_sign_ins", ["address"])
    op.create_index("ix_failed_sign_ins_name", "failed_sign_ins", ["name"])


def _create_batches() -> None:
    op.create_table(
        "rule_sets",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("content", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_rule_sets"),
        sa.UniqueConstraint("name", "digest", name="uq_rule_sets_name_digest"),
    )
    op.create_table(
        "guidelines",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("task", sa.String(length=16), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("author_id", sa.Integer(), nullable=True),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.ForeignKeyConstraint(["author_id"], ["users.id"], name="fk_guidelines_author_id"),
        sa.PrimaryKeyConstraint("id", name="pk_guidelines"),
    )
    op.create_index("ix_guidelines_task", "guidelines", ["task"])
    op.create_table(
        "batches",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("task", sa.String(length=16), nullable=False),
        sa.Column("overlap", sa.Integer(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("open", sa.Boolean(), nullable=False),
        sa.Column("rule_set_id", sa.Integer(), nullable=True),
        sa.Column("settings", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.ForeignKeyConstraint(["rule_set_id"], ["rule_sets.id"], name="fk_batches_rule_set_id"),
        sa.PrimaryKeyConstraint("id", name="pk_batches"),
        sa.UniqueConstraint("name", name="uq_batches_name"),
    )


def _create_items() -> None:
    op.create_table(
        "items",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("batch_id", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("external_id", sa.Text(), nullable=True),
        sa.Column("content", sa.JSON(), nullable=False),
        sa.Column("gold", sa.JSON(), nullable=True),
        sa.Column("needed", sa.Integer(), nullable=False),
        sa.Column("taken", sa.Integer(), nullable=False),
        sa.Column("returned", sa.Boolean(), nullable=False),
        sa.CheckConstraint("taken >= 0 AND taken <= needed", name="ck_items_slots"),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.id"], name="fk_items_batch_id"),
        sa.PrimaryKeyConstraint("id", name="pk_items"),
        sa.UniqueConstraint("batch_id", "position", name="uq_items_batch_id_position"),
    )
    op.create_index(
        "ix_items_free",
        "items",
        ["batch_id", "position"],
        sqlite_where=sa.text("taken < needed"),
        postgresql_where=sa.text("taken < needed"),
    )
    op.create_index(
        "ix_items_returned",
        "items",
        ["batch_id", "position"],
        sqlite_where=sa.text("returned AND taken < needed"),
        postgresql_where=sa.text("returned AND taken < needed"),
    )


def _create_assignments() -> None:
    op.create_table(
        "assignments",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("item_id", sa.Integer(), nullable=False),
        sa.Column("user_id", sa.Integer(), nullable=False),
        sa.Column("batch_id", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("task", sa.String(length=16), nullable=False),
        sa.Column("adjudication", sa.Boolean(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("shown_order", sa.JSON(), nullable=False),
        sa.Column("draft", sa.JSON(), nullable=True),
        sa.Column("draft_seq", sa.Integer(), nullable=False),
        sa.Column("transcript", sa.JSON(), nullable=True),
        sa.Column("opened_at", sa.Float(53), nullable=False),
        sa.Column("leased_at", sa.Float(53), nullable=False),
        sa.Column("expires_at", sa.Float(53), nullable=False),
        sa.Column("current_id", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.id"], name="fk_assignments_batch_id"),
        sa.ForeignKeyConstraint(["item_id"], ["items.id"], name="fk_assignments_item_id"),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name="fk_assignments_user_id"),
        sa.PrimaryKeyConstraint("id", name="pk_assignments"),
        sa.UniqueConstraint("item_id", "user_id", "adjudication", name="uq_assignments_item_id_user_id_adjudication"),
    )
    op.create_index("ix_assignments_current_id", "assignments", ["current_id"])
    op.create_index("ix_assignments_cursor", "assignments", ["user_id", "batch_id", "position"])
    op.create_index(
        "ix_assignments_expiry",
        "assignments",
        ["expires_at"],
        sqlite_where=sa.text("state = 'leased'"),
        postgresql_where=sa.text("state = 'leased'"),
    )
    op.create_index("ix_assignments_mine", "assignments", ["user_id", "task", "state", "leased_at"])


def _create_judgments() -> None:
    op.create_table(
        "judgments",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("request_id", sa.String(length=64), nullable=False),
        sa.Column("assignment_id", sa.Integer(), nullable=False),
        sa.Column("item_id", sa.Integer(), nullable=False),
        sa.Column("user_id", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("answer", sa.JSON(), nullable=True),
        sa.Column("shown_order", sa.JSON(), nullable=False),
        sa.Column("seconds", sa.Float(53), nullable=False),
        sa.Column("rule_set_id", sa.Integer(), nullable=True),
        sa.Column("guideline_id", sa.Integer(), nullable=True),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.ForeignKeyConstraint(["assignment_id"], ["assignments.id"], name="fk_judgments_assignment_id"),
        sa.ForeignKeyConstraint(["guideline_id"], ["guidelines.id"], name="fk_judgments_guideline_id"),
        sa.ForeignKeyConstraint(["item_id"], ["items.id"], name="fk_judgments_item_id"),
        sa.ForeignKeyConstraint(["rule_set_id"], ["rule_sets.id"], name="fk_judgments_rule_set_id"),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name="fk_judgments_user_id"),
        sa.PrimaryKeyConstraint("id", name="pk_judgments"),
        sa.UniqueConstraint("request_id", name="uq_judgments_request_id"),
    )
    op.create_index("ix_judgments_assignment_id", "judgments", ["assignment_id"])
    op.create_index("ix_judgments_created_at", "judgments", ["created_at"])
    op.create_index("ix_judgments_item_id", "judgments", ["item_id"])
    op.create_index("ix_judgments_user_id", "judgments", ["user_id"])
    op.create_table(
        "exports",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("user_id", sa.Integer(), nullable=True),
        sa.Column("manifest", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name="fk_exports_user_id"),
        sa.PrimaryKeyConstraint("id", name="pk_exports"),
    )
