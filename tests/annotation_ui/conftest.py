"""Databases of both kinds, a server in its own process and a browser for the tests of the labeling app."""

import os
import secrets
import shutil
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import psycopg
import pytest

from annotation_ui.store.database import Database
from annotation_ui.store.judgments import Judgments
from annotation_ui.store.leases import Leases
from tests.annotation_ui import postgres
from tests.annotation_ui.running import Client, Server, use_quick_hashes


def pytest_collection_modifyitems(items):
    """A limit for each test here, which a loaded machine keeps: most start a server or a browser."""
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(400))


def missing(what):
    """Skip the test if a developer's machine lacks a program; fail if ALIGN_NO_SKIP is 1."""
    if os.environ.get("ALIGN_NO_SKIP") == "1":
        pytest.fail(f"{what} is not installed")
    pytest.skip(f"{what} is not installed")


@pytest.fixture(scope="session", autouse=True)
def quick_hashes():
    """Users are made in hundreds of tests."""
    use_quick_hashes()


@pytest.fixture(scope="session")
def postgres_url():
    if postgres.binaries() is None:
        missing("postgresql")
    with postgres.cluster() as url:
        yield url


def new_database(request, kind, folder, template="template1"):
    """The URL of a new database: an empty one, or on PostgreSQL a copy of another."""
    if kind == "sqlite":
        return f"sqlite:///{folder / 'annotations.db'}"
    cluster = request.getfixturevalue("postgres_url")
    name = f"test_{secrets.token_hex(4)}"
    with psycopg.connect(f"{cluster}/postgres", autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
    return f"{cluster}/{name}"


@pytest.fixture(params=["sqlite", "postgresql"])
def database_kind(request):
    """SQLite and PostgreSQL."""
    return str(request.param)


@pytest.fixture
def database_url(request, database_kind, tmp_path):
    """The URL of an empty database, on SQLite and on PostgreSQL."""
    return new_database(request, database_kind, tmp_path)


@pytest.fixture(scope="session")
def migrated(request, tmp_path_factory):
    """`migrated("sqlite")`: a file, or on PostgreSQL a name, of a database with all tables and no rows, to be copied."""

    @cache
    def make(kind):
        url = new_database(request, kind, tmp_path_factory.mktemp("migrated"))
        made = Database(url)
        made.upgrade()
        made.close()
        return url.removeprefix("sqlite:///") if kind == "sqlite" else url.rsplit("/", 1)[1]

    return make


@pytest.fixture
def database(request, database_kind, migrated, tmp_path):
    """A database with all tables and no rows; each test has a copy of one that was migrated once."""
    template = migrated(database_kind)
    if database_kind == "sqlite":
        shutil.copyfile(template, tmp_path / "annotations.db")
    database = Database(new_database(request, database_kind, tmp_path, template))
    yield database
    database.close()


@pytest.fixture
def leases(database):
    return Leases(database)


@pytest.fixture
def judgments(leases):
    return Judgments(leases)


@pytest.fixture(scope="session")
def servers(request, tmp_path_factory):
    """`servers("sqlite")`, `servers("postgresql")`: one app of each kind for all tests; use `server` or `any_server`."""
    running = {}
    with ExitStack() as stack:

        def start_server(kind):
            if kind not in running:
                folder = tmp_path_factory.mktemp("annotate")
                running[kind] = stack.enter_context(Server(new_database(request, kind, folder), folder).started())
            running[kind].close_all_batches()
            return running[kind]

        yield start_server


@pytest.fixture
def server(servers):
    """The running app on SQLite with nothing to do in it."""
    return servers("sqlite")


@pytest.fixture(params=["sqlite", "postgresql"])
def any_server(request, servers):
    """The running app on each of the two databases, with nothing to do in it."""
    return servers(request.param)


@pytest.fixture(scope="module")
def own_server(tmp_path_factory):
    """A new app on SQLite for the tests of one file, which may break it."""
    folder = tmp_path_factory.mktemp("own")
    with Server(f"sqlite:///{folder / 'annotations.db'}", folder).started() as server:
        yield server


@pytest.fixture(autouse=True)
def close_pages(request):
    """No page outlives its test, also of one that fails: an open page goes on drawing and asking its server."""
    yield
    if "browser" in request.fixturenames:
        for context in request.getfixturevalue("browser").contexts:
            context.close()


def in_pairs(*usual):
    """These pairs of a database and a hand; the slow tests take all four."""
    pairs = [(kind, hand) for kind in ("sqlite", "postgresql") for hand in ("mouse", "keyboard")]
    marked = [pytest.param(*pair, marks=[pytest.mark.slow] * (pair not in usual)) for pair in pairs]
    return pytest.mark.parametrize(("any_server", "how"), marked, indirect=["any_server"])


@pytest.fixture
def ann(server):
    return Client(server, server.token(f"ann-{secrets.token_hex(4)}"))  # of this test alone: the server serves others, too


@pytest.fixture
def bob(server):
    return Client(server, server.token(f"bob-{secrets.token_hex(4)}"))


@pytest.fixture
def boss(server):
    return Client(server, server.token("sec-boss", "lead"))
