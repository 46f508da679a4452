"""Conversations with a model: what a labeler does while it answers, and a disk that is full for a moment."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from annotation_ui.reports.export import Selection, rows_to_export
from annotation_ui.server.probing import Probing
from annotation_ui.store import rule_sets
from annotation_ui.store.judgments import ConflictError, Judgments
from annotation_ui.store.schema import Assignment, Item
from tests.annotation_ui.running import add_batch, add_users


@pytest.fixture
def opened(database, judgments):
    """(a labeler, the number of an open conversation)."""
    with database.write() as session:
        rule_sets.store_shipped(session)
    add_batch(database, [("t", {"rule": "no-threats"})], "probe", rule_set="sparrow-dialogue")
    (ann,) = add_users(database, "ann")
    return ann, judgments.leases.next(ann, "probe").id


def test_an_item_that_is_skipped_while_the_model_answers_stays_skipped(database, judgments, opened):
    ann, number = opened
    skipped = threading.Event()

    def reply(checkpoint, messages):
        yield "model", "Hel"
        assert skipped.wait(20)
        yield "model", "lo"

    probing = Probing(judgments, reply)

    async def read(text):
        checkpoint, messages = await asyncio.to_thread(probing.add_message, ann, number, text)
        pieces = []
        async for piece in probing.stream_reply(ann, number, checkpoint, messages):
            pieces.append(piece)
            if not skipped.is_set():
                with pytest.raises(ConflictError, match="still answering"):
                    probing.add_message(ann, number, "more")
                await asyncio.to_thread(judgments.skip, ann, number, "skip-it", "no more of this", 1.0)
                skipped.set()
        return pieces

    with ThreadPoolExecutor(1) as pool:  # the browser of other tests has a loop in this thread
        assert pool.submit(asyncio.run, read("Hi")).result() == ["Hel", "lo"]
    with database.read() as session:
        now = session.get_one(Assignment, number)
        assert (now.state, now.transcript[-1]["content"]) == ("skipped", "Hello")
        assert session.get_one(Item, now.item_id).taken == 0
    assert judgments.leases.next(ann, "probe") is None
    assert [row["reason"] for row in rows_to_export(database, Selection("skips"))] == ["no more of this"]


def test_a_reply_that_nobody_reads_is_stored(judgments, opened):
    """The browser went away before the reply began, and the labeler goes on in another one."""
    ann, number = opened
    probing = Probing(judgments, lambda checkpoint, messages: iter([("model", "Hello")]))

    async def leave_at_once():
        checkpoint, messages = probing.add_message(ann, number, "Hi")
        probing.stream_reply(ann, number, checkpoint, messages)
        for _ in range(200):
            if not probing._busy:
                return
            await asyncio.sleep(0.05)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, leave_at_once()).result()
    assert probing.add_message(ann, number, "More?")[1][1]["content"] == "Hello"


def test_a_message_that_could_not_be_stored_can_be_sent_again(judgments, opened, monkeypatch):
    ann, number = opened
    probing = Probing(judgments, lambda checkpoint, messages: iter(()))

    def full(*_):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(Judgments, "save_transcript", full)
        with pytest.raises(OSError, match="no space"):
            probing.add_message(ann, number, "Hi")
    assert probing.add_message(ann, number, "Hi") == ("", [{"role": "user", "content": "Hi"}])
