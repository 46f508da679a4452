"""Migrations on both databases."""

from __future__ import annotations

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect

from annotation_ui.database import Database
from annotation_ui.schema import Base

from .running import add_batch


def test_migrations_go_up_and_down_and_match_the_models(database: Database) -> None:
    with database.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
    assert database.revisions()[0] == database.revisions()[1]
    database.downgrade("base")
    with database.engine.connect() as connection:
        assert set(inspect(connection).get_table_names()) <= {"alembic_version"}
    database.upgrade()
    add_batch(database, 1)
