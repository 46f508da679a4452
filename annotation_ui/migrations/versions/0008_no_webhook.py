"""Drops the events of the webhook, which earlier versions sent when a batch was complete."""

from alembic import op

revision = "0008_no_webhook"
down_revision = "0007_labelers_per_item"


def upgrade() -> None:
    op.drop_table("webhook_events")
