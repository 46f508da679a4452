"""Databases of both kinds, a server in its own process and a browser for the tests of the labelling app."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import psycopg
import pytest
from playwright.sync_api import Browser, sync_playwright

from annotation_ui.database import Database
from annotation_ui.judgments import Judgments
from annotation_ui.leases import Leases

from . import postgres
from .running import Server

CHROMIUM = Path("/usr/bin/chromium")
CHROMIUM_ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
SCREENSHOTS = Path("ci-output/annotation_ui")


def missing(what: str) -> NoReturn:
    """Skip where a developer lacks a program, fail where nothing may be skipped."""
    if os.environ.get("ALIGN_NO_SKIP") == "1":
        pytest.fail(f"{what} is not installed")
    pytest.skip(f"{what} is not installed")


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    if postgres.binaries() is None:
        missing("postgresql")
    with postgres.cluster() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database, on SQLite and on PostgreSQL."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'annotations.db'}"
    server = request.getfixturevalue("postgres_url")
    name = f"test_{secrets.token_hex(4)}"
    with psycopg.connect(f"{server}/postgres", autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')  # type: ignore[call-overload]
    return f"{server}/{name}"


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


@pytest.fixture(scope="session")
def app_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One app on SQLite for all tests that go through HTTP; use `server`."""
    folder = tmp_path_factory.mktemp("annotate")
    with Server(f"sqlite:///{folder / 'annotations.db'}", folder).started() as running:
        yield running


@pytest.fixture
def server(app_server: Server) -> Server:
    """The running app with nothing to do in it."""
    app_server.close_all_batches()
    return app_server


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if not CHROMIUM.exists():
        missing("chromium")
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=CHROMIUM_ARGUMENTS)
        yield browser
        browser.close()
