"""The oldest schema that is upgraded. New databases are created from the models; a change of the models adds a revision."""

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Nothing: `Database.upgrade` marks a new database with the newest revision."""
