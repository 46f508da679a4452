"""The number of labelers of each item is called labelers_per_item, as in the settings."""

from alembic import op

revision = "0007_labelers_per_item"
down_revision = "0006_tokens_audit_webhook"

TABLES = ("batches", "webhook_events")


def upgrade() -> None:
    for table in TABLES:
        op.execute(f"ALTER TABLE {table} RENAME COLUMN overlap TO labelers_per_item")
