import hashlib
import json
import re
import secrets
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from sqlalchemy import select, update

from align.core.errors import UserError
from align.extras.loop_labels import batch_name, make_labeler
from annotation_ui import client as client_module
from annotation_ui.client import Client
from annotation_ui.reports.events import new_judgments
from annotation_ui.reports.export import Selection, rows_to_export
from annotation_ui.store import audit
from annotation_ui.store.judgments import Judgments
from annotation_ui.store.leases import Leases
from annotation_ui.store.schema import Batch, Judgment, User
from annotation_ui.store.tokens import SCOPES, Tokens
from tests.annotation_ui.running import ROOT, add_batch, add_users, do, fake_server, rank_rows, read, stored
from tests.files import read_rows, write_rows

ROWS = [row for _, row in rank_rows(3)]


def new_token(server, *scopes):
    return Tokens(server.database).create(secrets.token_hex(4), scopes or tuple(SCOPES))


@pytest.fixture
def remote(any_server):
    return Client(any_server.url, new_token(any_server))


def test_rows_go_in_and_rankings_come_out(any_server, remote, tmp_path):
    batch, judgments = f"remote {secrets.token_hex(4)} ü&?", any_server.judgments
    ann = any_server.user_id(f"remote-{secrets.token_hex(4)}")
    assert remote.progress(batch) is None
    assert remote.import_rows(batch, "rank", ROWS, priority=5, settings={"attention_every": 7}) == 3
    with pytest.raises(UserError, match="already exists"):
        remote.import_rows(batch, "rank", ROWS)
    with pytest.raises(UserError, match="not UTF-8 text"):
        remote.import_rows(f"{batch} 2", "rank", [{"prompt": "\ud800", "responses": ["a", "b"]}])
    assert (remote.progress(batch)["done"], remote.progress(batch)["slots"]) == (0, 3)
    for ranks in ([1, 2, 3, 4], [4, 3, 2, 1], [2, 1, 1, 3]):
        do(judgments, ann, "rank", {"ranks": ranks})
    assert remote.wait(batch)["done"] == 3
    target = tmp_path / "rankings.jsonl"
    manifest = remote.export("rankings", target, batches=[batch])
    rows = read_rows(target)
    assert rows == rows_to_export(any_server.database, Selection("rankings", batches=(batch,)))
    assert [row["ranks"] for row in rows] == [[1, 2, 3, 4], [4, 3, 2, 1], [2, 1, 1, 3]]
    assert manifest["file"]["sha256"] == hashlib.sha256(target.read_bytes()).hexdigest()
    assert json.loads((tmp_path / "rankings.jsonl.manifest.json").read_text()) == manifest
    assert remote.export("rankings", tmp_path / "r.parquet", batches=[batch], aggregated=True)["rows"] == 3


def test_new_judgments_come_in_order_with_edits_undos_and_skips(any_server, remote):
    leases = Leases(any_server.database)
    judgments, name = Judgments(leases), f"stream-{secrets.token_hex(4)}"
    batch, ann = any_server.add_batch(rank_rows(2, ids=name)), any_server.user_id(name)
    before = max(stored(any_server.database, select(Judgment.id)), default=0)
    stream = remote.judgments(after=before, batches=[batch], poll_seconds=0.05)
    do(judgments, ann, "rank", {"ranks": [1, 2, 3, 4]})
    first = next(stream)
    assert (first["kind"], first["id"], first["purpose"]) == ("submit", f"{name}-0", "work")
    assert first["rows"][0]["ranks"] == [1, 2, 3, 4]  # in the item's own order, whatever was shown
    assert first["rows"][0]["responses"] == ROWS[0]["responses"]

    threading.Timer(0.3, lambda: judgments.undo(ann, "rank", f"undo-{name}")).start()
    undone = next(stream)  # it waits for it
    assert (undone["kind"], undone["rows"]) == ("undo", [])
    do_again = leases.next(ann, "rank")
    judgments.skip(ann, do_again.id, f"skip-{name}", "too long", 1.0)
    skipped = next(stream)
    assert (skipped["kind"], skipped["reason"], skipped["rows"]) == ("skip", "too long", [])
    all_of_it = list(remote.judgments(after=before, batches=[batch], follow=False))
    assert [event["kind"] for event in all_of_it] == ["submit", "undo", "skip"]
    assert list(remote.judgments(after=skipped["judgment"], batches=[batch], follow=False)) == []


def test_reading_judgments_is_recorded_from_the_beginning_and_once_a_day(any_server):
    judgments, ann = any_server.judgments, any_server.user_id(f"read-{secrets.token_hex(4)}")
    batch = any_server.add_batch(2)
    for _ in range(2):
        do(judgments, ann, "rank", {"ranks": [1, 2, 3, 4]})

    def recorded(token):
        rows = read(any_server.database, audit.records)
        return [row["detail"] for row in rows if (row["action"], row["by"]) == ("follow", f"token {token}")]

    names = [secrets.token_hex(4) for _ in range(2)]
    first, second = (Client(any_server.url, Tokens(any_server.database).create(name, ("export",))) for name in names)
    one, two = (row["judgment"] for row in first.judgments(batches=[batch], follow=False))
    assert recorded(names[0]) == [f"after 0, batches {batch}"]
    assert list(first.judgments(after=two, batches=[batch], follow=False)) == []
    assert len(list(first.judgments(after=one, batches=[batch], follow=False))) == 1
    assert len(recorded(names[0])) == 1
    assert len(list(first.judgments(batches=[batch], follow=False))) == 2
    assert len(recorded(names[0])) == 2
    assert len(list(second.judgments(after=one, follow=False))) >= 1
    assert recorded(names[1]) == [f"after {one}, batches all"]


@pytest.mark.parametrize("database_kind", ["postgresql"], indirect=True)
def test_a_judgment_that_is_stored_late_is_not_passed_over(database, leases, judgments):
    """PostgreSQL gives a transaction its id early; one that ends later must not be behind the reader then.

    SQLite has one writer at a time.
    """
    ann, ben = add_users(database, "ann", "ben")
    add_batch(database, 2, labelers_per_item=2)
    mine, his = leases.next(ann, "rank"), leases.next(ben, "rank")
    answer = {"ranks": [1, 2, 3, 4], "ratings": [None] * 4, "flags": [[]] * 4}
    with database.write() as slow:
        values = {key: getattr(mine, key) for key in ("item_id", "user_id", "shown_order")}
        slow.add(Judgment(request_id="slow", assignment_id=mine.id, kind="submit", answer=answer, seconds=1.0, **values))
        slow.flush()  # it has its id and is not visible yet
        judgments.submit(ben, his.id, "request-ben", answer, 1.0)
        seen = []
        reader = threading.Thread(target=lambda: seen.extend(new_judgments(database, 0)))
        reader.start()
        time.sleep(0.5)
        assert seen == []  # it waits for the slow one
    reader.join(timeout=30)
    assert [event["judgment"] for event in seen] == sorted(event["judgment"] for event in seen)
    assert [event["labeler"] for event in seen] == stored(database, select(User.pseudonym).order_by(User.id))


def test_a_busy_server_is_asked_again_and_an_import_is_not_sent_twice(monkeypatch, tmp_path):
    monkeypatch.setattr(client_module, "RETRIES", 2)
    with fake_server((429, b"{}"), (503, b"{}"), (200, b"[]")) as (url, got):
        assert Client(url, "t").batches() == []
        assert len(got) == 3
        assert got[0].headers["Authorization"] == "Bearer t"
    with fake_server((429, b"{}"), None, (200, b'{"items": 1}')) as (url, got):
        with pytest.raises(UserError, match=f"{url}: no response"):  # it may have arrived
            Client(url, "t").import_rows("b", "rank", [{"prompt": "p"}])
        assert len(got) == 2
    with fake_server((302, b"", ("Location", "http://127.0.0.1:9/"))) as (url, got):
        with pytest.raises(UserError, match=f"{url}: status 302"):  # the token goes to no other server
            Client(url, "t").batches()
        assert len(got) == 1
    manifest = json.dumps({"file": {"name": "n", "sha256": "0" * 64}}).encode()
    target = tmp_path / "x.jsonl"
    target.write_text("earlier")
    incomplete = pytest.raises(UserError, match="rankings is incomplete")
    with fake_server((200, manifest), (200, b"cut off")) as (url, _), incomplete:
        Client(url, "t").export("rankings", target)
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]
    assert target.read_text() == "earlier"
    with fake_server((200, b"<html>")) as (url, _), pytest.raises(UserError, match="the response is not JSON"):
        Client(url, "t").batches()


def test_what_the_server_refuses_is_its_own_line(any_server, monkeypatch, tmp_path):
    monkeypatch.delenv(client_module.TOKEN_VARIABLE, raising=False)
    for url in ("localhost:7860", "ftp://host", "https://", "http://[x", "http://host:port"):
        with pytest.raises(UserError, match="server address"):
            Client(url, "t")
    with pytest.raises(UserError, match="ALIGN_ANNOTATION_TOKEN"):
        Client(any_server.url)
    monkeypatch.setenv(client_module.TOKEN_VARIABLE, "align_wrong")
    with pytest.raises(UserError, match=f"{any_server.url}: this token is not valid"):
        Client(any_server.url).batches()
    monkeypatch.setenv(client_module.TOKEN_VARIABLE, new_token(any_server, "read"))
    reader = Client(any_server.url)
    with pytest.raises(UserError, match="does not have the scope 'export'"):
        reader.export("rankings", tmp_path / "x.jsonl")
    with pytest.raises(UserError, match="no batch 'none'"):
        reader.wait("none")
    monkeypatch.setenv(client_module.TOKEN_VARIABLE, new_token(any_server, "export"))
    with pytest.raises(UserError, match="no batch 'typo'"):
        next(Client(any_server.url).judgments(batches=["typo"]))
    monkeypatch.setattr(client_module, "RETRIES", 0)
    with pytest.raises(UserError, match=r"http://127.0.0.1:9: no response \(.*refused"):
        Client("http://127.0.0.1:9", "t").batches()


def test_the_client_needs_no_extra():
    program = "import sys, annotation_ui.client; print({'sqlalchemy', 'gradio', 'fastapi', 'torch'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout == "set()\n"


@pytest.fixture
def loop_app(any_server, monkeypatch):
    """A loop's labeler that uses the server."""
    monkeypatch.setenv(client_module.TOKEN_VARIABLE, new_token(any_server))
    return make_labeler("app", any_server.url, 1)


def test_a_loop_on_another_machine_labels_through_the_server(any_server, loop_app, tmp_path):
    batch, name, target = f"round-{secrets.token_hex(4)}", f"loop-{secrets.token_hex(4)}", tmp_path / "rankings.jsonl"
    write_rows(tmp_path / "samples.jsonl", (row for _, row in rank_rows(3, ids=name)))
    for done in range(3):
        waiting = loop_app.collect(batch, tmp_path / "samples.jsonl", target)
        assert f"{done} of 3 judgments" in waiting
        assert not target.exists()
        any_server.rank(name, [1, 2, 3, 4])
    assert loop_app.collect(batch, tmp_path / "samples.jsonl", target) == ""
    assert [(row["id"], row["ranks"]) for row in read_rows(target)] == [(f"{name}-{n}", [1, 2, 3, 4]) for n in range(3)]


def test_an_import_that_runs_or_was_killed_is_not_taken_for_a_closed_batch(
    any_server, remote, loop_app, monkeypatch, tmp_path
):
    samples, target, round_name = tmp_path / "samples.jsonl", tmp_path / "rankings.jsonl", f"round-{secrets.token_hex(4)}"
    write_rows(samples, ROWS)
    name = any_server.add_batch(3, name=batch_name(round_name, samples))

    def set_complete(complete):
        with any_server.database.write() as session:
            session.execute(update(Batch).where(Batch.name == name).values(complete=complete, open=False))

    set_complete(False)
    assert f"batch {name!r} is only partly imported" in loop_app.collect(round_name, samples, target)
    assert not target.exists()
    monkeypatch.setattr(client_module.time, "sleep", lambda _: set_complete(True))
    assert remote.wait(name)["complete"]
    assert loop_app.collect(round_name, samples, target) == ""  # closed by a lead without a judgment


def test_two_loops_on_one_server_do_not_share_rankings(any_server, loop_app, tmp_path):
    round_name, name = f"round-{secrets.token_hex(4)}", f"loops-{secrets.token_hex(4)}"
    mine, theirs, target = tmp_path / "mine.jsonl", tmp_path / "theirs.jsonl", tmp_path / "rankings.jsonl"
    write_rows(mine, ROWS[:1])
    write_rows(theirs, ROWS[1:])
    assert "0 of 2 judgments" in loop_app.collect(round_name, theirs, target)
    any_server.rank(name, [1, 2, 3, 4], [1, 2, 3, 4])
    assert "0 of 1 judgments" in loop_app.collect(round_name, mine, target)
    assert not target.exists()


def test_the_example_of_the_page_runs(any_server, monkeypatch, tmp_path, capsys):
    page = (ROOT / "docs" / "howto" / "labeling-client.md").read_text(encoding="utf-8")
    work, follow = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    monkeypatch.setenv(client_module.TOKEN_VARIABLE, new_token(any_server))
    monkeypatch.chdir(tmp_path)
    batch = f"week-{secrets.token_hex(4)}"
    work, follow = (
        text.replace("week-1", batch).replace("https://labels.example.org", any_server.url) for text in (work, follow)
    )

    def judge(*_):
        for name in ("ann", "ben"):
            any_server.rank(f"{batch}-{name}", [2, 1])

    with monkeypatch.context() as patched:
        patched.setattr(client_module.time, "sleep", judge)  # the labelers work while the example waits
        exec(compile(work, "example", "exec"), {})
    (row,) = read_rows(Path("rankings.jsonl"))
    assert (row["id"], row["ranks"]) == ("mars", [2, 1])
    exec(compile(follow, "example", "exec"), {})
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["submit", "submit"]
