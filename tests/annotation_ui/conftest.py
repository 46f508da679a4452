"""Databases of both kinds, a server in its own process and a browser for the tests of the labeling app."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import NoReturn

import psycopg
import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from annotation_ui.database import Database
from annotation_ui.judgments import Judgments
from annotation_ui.leases import Leases
from tests import chromium

from . import postgres
from .client import Client
from .quick_hashes import use_quick_hashes
from .running import Server

SCREENSHOTS = Path("ci-output/annotation_ui")


def missing(what: str) -> NoReturn:
    """Skip the test if a developer's machine lacks a program; fail if ALIGN_NO_SKIP is 1."""
    if os.environ.get("ALIGN_NO_SKIP") == "1":
        pytest.fail(f"{what} is not installed")
    pytest.skip(f"{what} is not installed")


@pytest.fixture(scope="session", autouse=True)
def quick_hashes() -> None:
    """Users are made in hundreds of tests."""
    use_quick_hashes()


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    if postgres.binaries() is None:
        missing("postgresql")
    with postgres.cluster() as url:
        yield url


def new_database(request: pytest.FixtureRequest, kind: str, folder: Path, template: str = "template1") -> str:
    """The URL of a new database: an empty one, or on PostgreSQL a copy of another."""
    if kind == "sqlite":
        return f"sqlite:///{folder / 'annotations.db'}"
    cluster = request.getfixturevalue("postgres_url")
    name = f"test_{secrets.token_hex(4)}"
    with psycopg.connect(f"{cluster}/postgres", autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')  # type: ignore[call-overload]
    return f"{cluster}/{name}"


@pytest.fixture(params=["sqlite", "postgresql"])
def database_kind(request: pytest.FixtureRequest) -> str:
    """SQLite and PostgreSQL."""
    return str(request.param)


@pytest.fixture
def database_url(request: pytest.FixtureRequest, database_kind: str, tmp_path: Path) -> str:
    """The URL of an empty database, on SQLite and on PostgreSQL."""
    return new_database(request, database_kind, tmp_path)


@pytest.fixture(scope="session")
def migrated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """`migrated("sqlite")`: a file, or on PostgreSQL a name, of a database with all tables and no rows, to be copied."""

    @cache
    def make(kind: str) -> str:
        url = new_database(request, kind, tmp_path_factory.mktemp("migrated"))
        made = Database(url)
        made.upgrade()
        made.close()
        return url.removeprefix("sqlite:///") if kind == "sqlite" else url.rsplit("/", 1)[1]

    return make


@pytest.fixture
def database(
    request: pytest.FixtureRequest, database_kind: str, migrated: Callable[[str], str], tmp_path: Path
) -> Iterator[Database]:
    """A database with all tables and no rows; each test has a copy of one that was migrated once."""
    template = migrated(database_kind)
    if database_kind == "sqlite":
        shutil.copyfile(template, tmp_path / "annotations.db")
    database = Database(new_database(request, database_kind, tmp_path, template))
    yield database
    database.close()


@pytest.fixture
def leases(database: Database) -> Leases:
    return Leases(database)


@pytest.fixture
def judgments(leases: Leases) -> Judgments:
    return Judgments(leases)


@pytest.fixture(scope="session")
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Server]]:
    """`servers("sqlite")`, `servers("postgresql")`: one app of each kind for all tests; use `server` or `any_server`."""
    running: dict[str, Server] = {}
    with ExitStack() as stack:

        def start_server(kind: str) -> Server:
            if kind not in running:
                folder = tmp_path_factory.mktemp("annotate")
                running[kind] = stack.enter_context(Server(new_database(request, kind, folder), folder).started())
            running[kind].close_all_batches()
            return running[kind]

        yield start_server


@pytest.fixture
def server(servers: Callable[[str], Server]) -> Server:
    """The running app on SQLite with nothing to do in it."""
    return servers("sqlite")


@pytest.fixture(params=["sqlite", "postgresql"])
def any_server(request: pytest.FixtureRequest, servers: Callable[[str], Server]) -> Server:
    """The running app on each of the two databases, with nothing to do in it."""
    return servers(request.param)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if chromium.program() is None:
        missing("chromium")
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    expect.set_options(timeout=20_000)  # a loaded machine takes its time
    with sync_playwright() as playwright:
        browser = chromium.launch(playwright)
        yield browser
        browser.close()


@pytest.fixture(autouse=True)
def close_pages(request: pytest.FixtureRequest) -> Iterator[None]:
    """No page outlives its test, also of one that fails: an open page goes on drawing and asking its server."""
    yield
    if "browser" in request.fixturenames:
        for context in request.getfixturevalue("browser").contexts:
            context.close()


def in_pairs(*usual: tuple[str, str]) -> pytest.MarkDecorator:
    """These pairs of a database and a hand; with ALIGN_FULL=1 all four."""
    pairs = [(kind, hand) for kind in ("sqlite", "postgresql") for hand in ("mouse", "keyboard")]
    marked = [pytest.param(*pair, marks=[pytest.mark.full] * (pair not in usual)) for pair in pairs]
    return pytest.mark.parametrize(("any_server", "how"), marked, indirect=["any_server"])


@pytest.fixture
def ann(server: Server) -> Client:
    return Client(server, server.token(f"ann-{secrets.token_hex(4)}"))  # of this test alone: the server serves others, too


@pytest.fixture
def bob(server: Server) -> Client:
    return Client(server, server.token(f"bob-{secrets.token_hex(4)}"))


@pytest.fixture
def boss(server: Server) -> Client:
    return Client(server, server.token("sec-boss", "lead"))
