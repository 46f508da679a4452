"""Databases of every earlier version are opened, with their judgments."""

import json

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import inspect, text

from annotation_ui.reports.export import Selection, rows_to_export
from annotation_ui.store.database import Database, _alembic_config
from annotation_ui.store.judgments import Judgments
from annotation_ui.store.leases import Leases
from annotation_ui.store.schema import Base
from tests.annotation_ui.store import first_schema

CONTENT = {"prompt": "p", "responses": ["a", "b"]}
ROWS = {
    "users": {"id": 1, "name": "ann", "pseudonym": "p-1", "role": "labeler", "password_hash": "!", "active": True},
    "batches": {"id": 1, "name": "old", "task": "compare", "overlap": 1, "priority": 0, "open": True, "settings": {}},
    "items": {"id": 1, "batch_id": 1, "position": 1, "external_id": "x", "content": CONTENT, "needed": 1, "taken": 1,
              "returned": False},
    "assignments": {"id": 1, "item_id": 1, "user_id": 1, "batch_id": 1, "position": 1, "task": "compare",
                    "adjudication": False,
                    "state": "done", "shown_order": [0, 1], "draft_seq": 1, "opened_at": 1.0, "leased_at": 1.0,
                    "expires_at": 2.0, "current_id": 1},
    "judgments": {"id": 1, "request_id": "one", "assignment_id": 1, "item_id": 1, "user_id": 1, "kind": "submit",
                  "answer": {"choice": "A"}, "shown_order": [0, 1], "seconds": 2.0, "created_at": 3.0},
}  # fmt: skip


def old_database(url, revision):
    """A database of the first version with one judgment, which was upgraded to a later revision then."""
    database = Database(url)
    with database.engine.begin() as connection, Operations.context(MigrationContext.configure(connection)):
        first_schema.create()
        for table, row in ROWS.items():
            row = {"created_at": 1.0, **row} if table in ("users", "batches") else row
            values = {name: json.dumps(value) if isinstance(value, dict | list) else value for name, value in row.items()}
            places = ", ".join(f":{name}" for name in values)
            connection.execute(text(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({places})"), values)
            if connection.dialect.name == "postgresql":  # ids that were given do not advance the sequence
                connection.execute(text(f"SELECT setval(pg_get_serial_sequence('{table}', 'id'), 1)"))
        config = _alembic_config()
        config.attributes["connection"] = connection
        command.stamp(config, "0001")
        command.upgrade(config, revision)
    return database


@pytest.mark.parametrize("revision", ["0001", "0002_batch_versions", "0004_judgments_of_a_day", "0007_labelers_per_item"])
def test_a_database_of_an_earlier_version_is_upgraded_with_its_judgments(database_url, revision):
    database = old_database(database_url, revision)
    database.upgrade()
    assert database.revisions()[0] == database.revisions()[1]
    with database.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
    assert not inspect(database.engine).has_table("webhook_events")
    (row,) = rows_to_export(database, Selection("rankings"))
    assert (row["id"], row["choice"], row["labeler"]) == ("x", "A", "p-1")
    judgments = Judgments(Leases(database))
    judgments.reopen(1, 1)
    judgments.submit(1, 1, "two", {"choice": "B"}, 1)
    assert rows_to_export(database, Selection("rankings"))[0]["choice"] == "B"
    database.close()
