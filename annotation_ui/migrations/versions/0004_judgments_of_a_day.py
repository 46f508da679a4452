"""An index for a labeler's judgments of one day."""

from alembic import op

revision = "0004_judgments_of_a_day"
down_revision = "0003_lead_batches_and_reading"


def upgrade() -> None:
    op.create_index("ix_judgments_day", "judgments", ["user_id", "created_at"])
