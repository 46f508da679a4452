"""SQLite: INSERT OR REPLACE changes no judgment any more; it does not fire the triggers of UPDATE and DELETE."""

from alembic import op

revision = "0005_no_replaced_judgments"
down_revision = "0004_judgments_of_a_day"


def upgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":
        op.execute(
            "CREATE TRIGGER judgments_no_replace BEFORE INSERT ON judgments "
            "WHEN EXISTS (SELECT 1 FROM judgments WHERE id = NEW.id OR request_id = NEW.request_id) "
            "BEGIN SELECT RAISE(ABORT, 'judgments are append-only'); END"
        )
