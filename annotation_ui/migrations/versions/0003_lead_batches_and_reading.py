"""Batches for named labelers, deleted batches, training and attention items, and who has read which guidelines."""

import sqlalchemy as sa
from alembic import op

revision = "0003_lead_batches_and_reading"
down_revision = "0002_batch_versions"


def upgrade() -> None:
    op.add_column("batches", sa.Column("deleted_at", sa.Float(53), nullable=True))
    op.add_column("items", sa.Column("purpose", sa.String(length=16), nullable=False, server_default="work"))
    op.execute("UPDATE items SET purpose = 'attention' WHERE gold IS NOT NULL")
    attention = sa.text("purpose = 'attention'")
    op.create_index(
        "ix_items_attention", "items", ["batch_id", "position"], sqlite_where=attention, postgresql_where=attention
    )
    op.create_table(
        "batch_labelers",
        sa.Column("batch_id", sa.Integer(), nullable=False),
        sa.Column("user_id", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.id"], name="fk_batch_labelers_batch_id"),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name="fk_batch_labelers_user_id"),
        sa.PrimaryKeyConstraint("batch_id", "user_id", name="pk_batch_labelers"),
    )
    op.create_table(
        "guideline_reads",
        sa.Column("guideline_id", sa.Integer(), nullable=False),
        sa.Column("user_id", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.ForeignKeyConstraint(["guideline_id"], ["guidelines.id"], name="fk_guideline_reads_guideline_id"),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name="fk_guideline_reads_user_id"),
        sa.PrimaryKeyConstraint("guideline_id", "user_id", name="pk_guideline_reads"),
    )
