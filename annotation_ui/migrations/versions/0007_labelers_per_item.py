"""The number of labelers of each item is called labelers_per_item, as in the settings."""

from alembic import op

revision = "0007_labelers_per_item"
down_revision = "0006_tokens_audit_webhook"

TABLES = ("batches", "webhook_events")


def upgrade() -> None:
    for table in TABLES:
        op.alter_column(table, "overlap", new_column_name="labelers_per_item")


def downgrade() -> None:
    for table in TABLES:
        op.alter_column(table, "labelers_per_item", new_column_name="overlap")
