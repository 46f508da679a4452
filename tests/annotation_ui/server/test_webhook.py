"""The webhook: when a batch counts as complete, signed requests, retries that survive a restart, no other address."""

import base64
import json
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from sqlalchemy import select, update

from align.core.errors import UserError
from annotation_ui.cli import _parser, main
from annotation_ui.client import verified_event, webhook_key, webhook_signature
from annotation_ui.server.webhook import DELAYS_S, Webhook, checked_key
from annotation_ui.store import audit
from annotation_ui.store.batches import BatchSettings, change_batch, delete_batch
from annotation_ui.store.judgments import Judgments
from annotation_ui.store.leases import Leases
from annotation_ui.store.schema import Batch, WebhookEvent
from tests.annotation_ui.running import Server, add_batch, add_users, do, fake_server, stored
from tests.ports import free_port

SECRET = base64.b64encode(b"k" * 32).decode()
ANSWER = {"ranks": [1, 2, 3, 4]}


@contextmanager
def receiver(*statuses, headers=()):
    """A program that gets the events and answers with these statuses; yields its address and the requests it got."""
    with fake_server(*((status, b"", *headers) for status in statuses)) as (url, got):
        yield f"{url}/hook?key=1", got


def events(database):
    return stored(database, select(WebhookEvent).order_by(WebhookEvent.id))


def complete_batch(database, judgments, user):
    name = add_batch(database, 1)
    do(judgments, user, "rank", ANSWER)
    return name


def due_now(database):
    with database.write() as session:
        session.execute(update(WebhookEvent).where(WebhookEvent.next_at.is_not(None)).values(next_at=0.0))


def test_a_batch_is_reported_once_when_its_last_item_is_judged(database):
    judgments, (ann, ben) = Judgments(Leases(database)), add_users(database, "ann", "ben")
    rows = [{"prompt": "p", "responses": ["a", "b"], **more} for more in ({}, {}, {"gold": {"ranks": [1, 2]}})]
    name = add_batch(database, [("t", row) for row in rows], labelers_per_item=2, settings={"attention_every": 1000})
    with receiver(200) as (url, got):
        webhook = Webhook(database, url, webhook_key(SECRET))
        answer = {"ranks": [1, 2]}
        for user in (ann, ben):
            for _ in range(2):
                webhook.look()
                assert got == []
                do(judgments, user, "rank", answer)
        judgments.undo(ben, "rank", "request-undo")
        webhook.look()
        assert got == []  # it is open again
        do_again = judgments.leases.next(ben, "rank")
        judgments.submit(ben, do_again.id, "request-again", {**answer, "ranks": [2, 1]}, 1.0)
        for _ in range(3):
            webhook.look()
        (request,) = got
    event = verified_event(SECRET, request.headers, request.body)
    assert event["type"] == "batch.complete"
    assert event["data"] == {"batch": name, "task": "rank", "items": 2, "judgments": 4}
    (stored,) = events(database)
    assert (stored.attempts, stored.next_at, stored.error) == (1, None, None)
    assert stored.delivered_at is not None
    with database.read() as session:
        assert audit.records(session)[0]["detail"] == f"attempts 1, event {stored.event_id}, outcome delivered"
        version = session.scalars(select(Batch.version)).one()
    change_batch(database, name, BatchSettings(name, labelers_per_item=1), version)
    webhook.look()
    assert len(events(database)) == 1  # a lower number is nothing new


def test_a_skipped_item_a_deleted_batch_and_more_labelers_per_item(database):
    judgments, (ann, ben) = Judgments(Leases(database)), add_users(database, "ann", "ben")
    name = add_batch(database, 2)
    with receiver(204) as (url, got):
        webhook = Webhook(database, url, webhook_key(SECRET))
        do(judgments, ann, "rank", ANSWER)
        skipped = judgments.leases.next(ann, "rank")
        judgments.skip(ann, skipped.id, "request-skip", "", 1.0)
        webhook.look()
        assert got == []  # somebody else has to judge it
        do(judgments, ben, "rank", ANSWER)
        webhook.look()
        assert len(got) == 1
        (batch,) = stored(database, select(Batch))
        change_batch(database, name, BatchSettings(name, labelers_per_item=2), batch.version)
        webhook.look()
        assert len(got) == 1
        for _ in range(2):
            while judgments.leases.next(ben, "rank") is not None:
                do(judgments, ben, "rank", ANSWER)
            (cat,) = add_users(database, f"cat-{secrets.token_hex(2)}")
            while judgments.leases.next(cat, "rank") is not None:
                do(judgments, cat, "rank", ANSWER)
        webhook.look()
        assert len(got) == 2  # complete with the new number
        delete_batch(database, complete_batch(database, judgments, ann))
        webhook.look()
        assert len(got) == 2


def test_a_failure_is_repeated_with_growing_pauses_and_given_up_at_last(database, capsys):
    judgments, (ann,) = Judgments(Leases(database)), add_users(database, "ann")
    complete_batch(database, judgments, ann)
    with receiver(500, 503, 200) as (url, got):
        for attempt, status in ((1, "status 500"), (2, "status 503"), (3, None)):
            before = time.time()
            Webhook(database, url, webhook_key(SECRET)).look()  # another process: nothing is kept in memory
            Webhook(database, url, webhook_key(SECRET)).look()  # it is not due yet
            (stored,) = events(database)
            assert (stored.attempts, stored.error, len(got)) == (attempt, status, attempt)
            if status:
                assert stored.next_at == pytest.approx(before + DELAYS_S[attempt - 1], abs=30)
                due_now(database)
    assert len({each.headers["webhook-id"] for each in got}) == 1  # the receiver can tell that it is the same
    printed = capsys.readouterr().err.splitlines()
    assert printed[0] == f"align annotate: webhook: 127.0.0.1: status 500; event {stored.event_id} is sent again in 10 s"
    assert all("key=1" not in line for line in printed)

    complete_batch(database, judgments, ann)
    webhook = Webhook(database, "http://127.0.0.1:9/", webhook_key(SECRET), delays=(0.0, 0.0))
    webhook.look()
    (_, stored) = events(database)
    assert (stored.attempts, stored.next_at, stored.error) == (3, None, "NewConnectionError")
    assert capsys.readouterr().err.splitlines()[-1].endswith("is given up")


def test_a_redirection_is_not_followed(database, judgments):
    (ann,) = add_users(database, "ann")
    complete_batch(database, judgments, ann)
    with receiver(200) as (private, reached), receiver(307, headers=[("Location", private)]) as (url, got):
        Webhook(database, url, webhook_key(SECRET)).look()
        assert (len(got), len(reached)) == (1, 0)
    assert events(database)[0].error == "status 307"


def test_two_servers_on_one_database_send_an_event_once(database):
    judgments, (ann,) = Judgments(Leases(database)), add_users(database, "ann")
    for _ in range(5):
        complete_batch(database, judgments, ann)
    with receiver(200) as (url, got):
        webhooks = [Webhook(database, url, webhook_key(SECRET)) for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(Webhook.look, webhooks))
    assert len(got) == len({each.headers["webhook-id"] for each in got}) == 5


def test_only_the_servers_request_of_now_is_taken():
    body, key, now = b'{"type": "batch.complete"}', webhook_key(f"whsec_{SECRET}"), int(time.time())
    headers = {"Webhook-Id": "msg_1", "Webhook-Timestamp": str(now)}
    headers["Webhook-Signature"] = f"v1,other {webhook_signature(key, 'msg_1', now, body)}"
    assert verified_event(SECRET, headers, body) == {"type": "batch.complete"}
    old = now - 600
    replayed = {"Webhook-Id": "msg_1", "Webhook-Timestamp": str(old)}
    replayed["Webhook-Signature"] = webhook_signature(key, "msg_1", old, body)
    for wrong, content, line in (
        (headers, body + b" ", "signature"),
        ({**headers, "Webhook-Id": "msg_2"}, body, "signature"),
        ({**headers, "Webhook-Signature": "v1,é"}, body, "signature"),
        ({}, body, "no time"),
        (replayed, body, "too old"),
    ):
        with pytest.raises(UserError, match=line):
            verified_event(SECRET, wrong, content)
    with pytest.raises(UserError, match="signature"):
        verified_event(base64.b64encode(b"x" * 32).decode(), headers, body)


def test_the_known_signature_of_the_specification():
    """The example of the reference libraries (standard-webhooks)."""
    key = webhook_key("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    signature = webhook_signature(key, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert signature == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


@pytest.mark.parametrize(
    ("url", "secret", "line"),
    [
        ("host", SECRET, "--webhook host: not an address"),
        ("ftp://host", SECRET, "not an address"),
        ("http://[x", SECRET, "not an address"),
        ("https://host/", "", "--webhook: set ALIGN_WEBHOOK_SECRET to base64 of 24 bytes or more: openssl rand -base64 32"),
        ("https://host/", "short", "the secret of the webhook must be base64 of 24 bytes or more"),
    ],
)
def test_a_wrong_address_or_secret_is_one_line(url, secret, line):
    with pytest.raises(UserError, match=line):
        checked_key(url, secret)


def test_without_a_secret_nothing_starts_and_nothing_is_made(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("ALIGN_WEBHOOK_SECRET", raising=False)
    words = ("--data-dir", str(tmp_path / "new"), "serve", "--port", str(free_port()), "--webhook", "https://host/")
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("align annotate: --webhook: set ALIGN_WEBHOOK_SECRET")
    assert not (tmp_path / "new").exists()


def test_a_server_with_a_webhook(database_url, tmp_path, monkeypatch):
    monkeypatch.setenv("ALIGN_WEBHOOK_SECRET", SECRET)
    server = Server(database_url, tmp_path)
    (ann,) = add_users(server.database, "ann")
    with receiver(200) as (url, got), server.started("serve", "--webhook", url):
        name = server.add_batch(1)
        do(server.judgments, ann, "rank", ANSWER)
        for _ in range(600):
            if got:
                break
            time.sleep(0.1)
        assert json.loads(got[0].body)["data"]["batch"] == name


def test_options_of_the_server_stand_before_or_behind_the_command():
    parse = _parser().parse_args
    assert parse(["--port", "1"]).port == parse(["--port", "1", "serve"]).port == parse(["serve", "--port", "1"]).port == 1
    assert parse(["--port", "1", "serve", "--port", "2"]).port == 2
    assert parse(["serve"]).port == parse([]).port == 7860
    assert parse(["serve"]).webhook is None
