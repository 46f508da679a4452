"""Databases of both kinds, a server in its own process and a browser for the tests of the labelling app."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from annotation_ui.database import Database
from annotation_ui.importing import NewBatch, import_rows
from annotation_ui.judgments import Judgments
from annotation_ui.leases import Leases
from annotation_ui.schema import User


@pytest.fixture
def database_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'annotations.db'}"


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    database = Database(database_url)
    database.upgrade()
    yield database
    database.close()


@pytest.fixture
def leases(database: Database) -> Leases:
    return Leases(database)


@pytest.fixture
def judgments(leases: Leases) -> Judgments:
    return Judgments(leases)


def add_users(database: Database, *names: str, role: str = "labeler") -> list[int]:
    """Users without a usable password, for tests that do not sign in."""
    with database.write() as session:
        rows = [User(name=name, role=role, password_hash="!", pseudonym=f"p-{name}") for name in names]
        session.add_all(rows)
        session.flush()
        return [row.id for row in rows]


def rank_rows(count: int, responses: int = 4) -> list[tuple[str, dict]]:
    return [
        (f"test:{i}", {"prompt": f"Prompt {i}", "responses": [f"Response {i}.{k}" for k in range(responses)],
                       "model": [f"model-{k}" for k in range(responses)], "id": f"item-{i}"})
        for i in range(count)
    ]  # fmt: skip


def add_batch(database: Database, count: int = 3, overlap: int = 1, name: str = "batch", **more: object) -> int:
    return import_rows(database, NewBatch(name=name, task="rank", overlap=overlap, **more), rank_rows(count))  # type: ignore[arg-type]
