"""Batches say whether all of their items are there and how often they were changed; one row shows that writing works."""

import sqlalchemy as sa
from alembic import op

revision = "0002_batch_versions"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("batches", sa.Column("complete", sa.Boolean(), nullable=False, server_default=sa.true()))
    op.add_column("batches", sa.Column("version", sa.Integer(), nullable=False, server_default="1"))
    op.create_table(
        "heartbeats",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("at", sa.Float(53), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_heartbeats"),
    )
