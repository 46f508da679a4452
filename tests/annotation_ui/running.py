"""The app in its own process, as `align annotate` runs it, and helpers that fill its database."""

import http.client
import json
import multiprocessing
import os
import resource
import secrets
import signal
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlencode

from sqlalchemy import select, update

from annotation_ui.server.auth import Auth
from annotation_ui.server.headers import COOKIE
from annotation_ui.store import guidelines
from annotation_ui.store.database import Database
from annotation_ui.store.importing import NewBatch, import_rows
from annotation_ui.store.judgments import Judgments
from annotation_ui.store.leases import Leases
from annotation_ui.store.schema import Batch, User
from annotation_ui.tasks import TASKS
from tests.files import ROOT
from tests.http_stand_in import answering
from tests.ports import free_port

_PROCESSES = multiprocessing.get_context("spawn")  # a forked app sometimes answered no request


def run_app(words, folder, environment, setup):
    """Run `align annotate WORDS` in a process of its own with quick password hashes; it prints to the file `log`."""
    os.chdir(folder)
    os.environ.update(environment)
    tempfile.tempdir = None  # else the folder of the process that started this one
    log = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    from annotation_ui.cli import main

    use_quick_hashes()
    if setup:
        setup()
    raise SystemExit(main(words))


def use_quick_hashes():
    """Hash with argon2's least memory and time from now on: what is tested is never how hard a hash is to break."""
    from argon2 import PasswordHasher

    from annotation_ui.server import auth

    hasher = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
    auth._HASHER, auth._UNKNOWN_USER_HASH = hasher, hasher.hash("nobody")


def stored(database, query):
    """What a query of one column, or of whole rows, finds."""
    with database.read() as session:
        return list(session.scalars(query))


def read(database, report, *arguments, **named):
    """What a report returns, which is a function of a session."""
    with database.read() as session:
        return report(session, *arguments, **named)


def add_users(database, *names, role="labeler"):
    """Users without a usable password, for tests that do not sign in."""
    with database.write() as session:
        rows = [User(name=n, role=role, password_hash="!", pseudonym=f"p-{secrets.token_hex(6)}") for n in names]
        session.add_all(rows)
        session.flush()
        return [row.id for row in rows]


def rank_rows(count, responses=4, ids="item"):
    return [
        (
            f"test:{i}",
            {
                "prompt": f"Prompt {i}",
                "responses": [f"Response {i}.{k}" for k in range(responses)],
                "model": [f"model-{k}" for k in range(responses)],
                "id": f"{ids}-{i}",
            },
        )
        for i in range(count)
    ]


def add_batch(database, rows=3, task="rank", **more):
    """Import a batch under a new name and return the name."""
    name = more.pop("name", f"{task}-{secrets.token_hex(4)}")
    rows = rank_rows(rows) if isinstance(rows, int) else rows
    import_rows(database, NewBatch(name=name, task=task, **more), rows)
    return str(name)


def do(judgments, user, task, answer):
    """Answer the labeler's next item in the item's own order."""
    assignment = judgments.leases.next(user, task)
    shown = TASKS[task].shown(answer, assignment.shown_order)
    with judgments.leases.database.read() as session:
        newest = guidelines.newest(session, task)
    judgments.submit(user, assignment.id, f"{user}-{assignment.id}-{task}", shown, 3.0, newest and newest.id)


class Server:
    """The app on a free port; it can be killed and restarted on the same port."""

    def __init__(self, database_url, folder, setup=None):
        self.database_url, self.folder, self.setup = database_url, folder, setup
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.database = Database(database_url)
        self.database.upgrade()
        self.process = None

    @contextmanager
    def started(self, *arguments):
        self.start(*arguments)
        try:
            yield self
        finally:
            self.kill(signal.SIGTERM)
            self.database.close()

    def start(self, *arguments):
        words = ["--database", self.database_url, "--data-dir", str(self.folder), "--port", str(self.port), *arguments]
        temporary = self.folder / "tmp"  # of this server alone, so that a test sees what it leaves there
        temporary.mkdir(exist_ok=True)
        environment = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TMPDIR": str(temporary)}
        arguments = (words, self.folder, environment, self.setup)
        self.process = _PROCESSES.Process(target=run_app, args=arguments)  # a daemon could not start the model to probe
        self.process.start()
        for _ in range(1800):  # a loaded machine takes its time
            assert self.process.is_alive(), (self.folder / "log").read_text()
            try:
                urllib.request.urlopen(f"{self.url}/healthz", timeout=5)
                return
            except (urllib.error.URLError, TimeoutError, ConnectionError):
                time.sleep(0.1)
        raise TimeoutError("the server did not start")

    def kill(self, how=signal.SIGKILL):
        assert self.process.pid is not None
        os.kill(self.process.pid, how)
        self.process.join(timeout=10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    @contextmanager
    def full_disk(self):
        """A limit on the size of the server's files stands for the full disk: SQLite cannot write, as there."""
        pid = self.process.pid
        assert pid is not None
        everything = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, everything[1]))
        try:
            yield
        finally:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, everything)

    def close_all_batches(self):
        with self.database.write() as session:
            session.execute(update(Batch).values(open=False))

    def add_batch(self, rows=3, task="rank", **more):
        return add_batch(self.database, rows, task, **more)

    @property
    def judgments(self):
        return Judgments(Leases(self.database))

    def user_id(self, name, role="labeler"):
        """The id of a user, who is created if new."""
        found = stored(self.database, select(User.id).where(User.name == name))
        return (found or add_users(self.database, name, role=role))[0]

    def rank(self, name, *orders, **more):
        """Let a labeler answer the next rankings with these ranks, in the order of the items."""
        for ranks in orders:
            do(self.judgments, self.user_id(name), "rank", {"ranks": ranks, **more})

    def token(self, name, role="labeler"):
        """The token of a new session of a user."""
        return Auth(self.database).start_session(self.user_id(name, role))

    def page(self, browser, name, path="", role="labeler", **context):
        """A browser page of a signed-in user at a path, if one is given; an error in its scripts fails the test."""
        window = browser.new_context(base_url=self.url, **context)
        window.add_cookies([{"name": COOKIE, "value": self.token(name, role), "url": self.url}])
        page = window.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: (_ for _ in ()).throw(AssertionError(f"script error: {error}")))
        if path:
            page.goto(path)
        return page

    def lead_page(self, browser, name, **context):
        """A lead's browser page, with all tabs."""
        return self.page(browser, name, "/lead/", "lead", **context)


@dataclass
class Client:
    """Sends requests of one user as they are: no path is normalized and no header added."""

    server: Server
    token: str | None = None

    def __call__(self, method, path, body=None, headers=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=120)
        sent = {"Content-Type": "application/json", **(headers or {})}
        if self.token:
            sent["Cookie"] = f"{COOKIE}={self.token}"
        content = body if isinstance(body, str | bytes | None) else json.dumps(body)
        connection.request(method, path, content, sent)
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
        connection.close()
        return response.status, {key.lower(): value for key, value in response.getheaders()}, text

    def next(self, task="rank"):
        status, _, text = self("POST", f"/api/tasks/{task}/next", {})
        assert status == 200, text
        return json.loads(text)["item"]

    def here(self, task="rank"):
        """The path of the next item."""
        return f"/api/assignments/{self.next(task)['assignment']}"

    def submit(self, answer=None, task="rank"):
        """Answer the next item; the request that was sent."""
        request = {"request_id": secrets.token_hex(8), "answer": answer or {"ranks": [1, 2, 3, 4]}, "seconds": 1}
        status, _, text = self("POST", f"{self.here(task)}/submit", request)
        assert status == 200, text
        return request


def form(**fields):
    return urlencode(fields), {"Content-Type": "application/x-www-form-urlencoded"}


@contextmanager
def fake_server(*answers):
    """A server that gives these answers, as of `answering`, one after the other, and the last one for ever.

    Yields its address and the requests it got.
    """
    left, got = list(answers), []

    def answer(request):
        got.append(request)
        return left.pop(0) if len(left) > 1 else left[0]

    with answering(answer) as url:
        yield url, got
