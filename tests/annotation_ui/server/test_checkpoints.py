import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import ClassVar

import pytest
from playwright.sync_api import expect

from align.commands.chat import Speaker
from align.core.errors import UserError
from align.data.records import RuleJudgment
from align.models.checkpoint import save_model, weights_of
from annotation_ui.rendering.markdown import messages_html
from annotation_ui.reports.export import Selection, rows_to_export
from annotation_ui.server.checkpoints import Checkpoints, Piece, Status, _OutOfMemoryError, pieces_of_reply
from annotation_ui.server.probing import Probing
from annotation_ui.store import rule_sets
from annotation_ui.store.judgments import ConflictError, Judgments
from tests.annotation_ui.running import Client, add_batch, add_users

CARD = {"title": "A model", "stage": "sft"}
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize("kind", ["built-in", "folder", "adapter"])
def test_any_model_that_sample_takes_replies(load_sharp, sharp_folders, tmp_path, kind):
    if kind == "adapter":
        loaded = load_sharp("tiny-llama", lora_r=2)
        save_model(tmp_path / "adapter", loaded, weights_of(loaded.backbone), CARD)
    name = {"built-in": "tiny-t5", "folder": sharp_folders["tiny-gpt2"], "adapter": str(tmp_path / "adapter")}[kind]
    *pieces, end = pieces_of_reply(Speaker(name), HELLO, 8)
    assert 1 < len(pieces) <= 9
    assert "".join(text for kind, text in pieces if kind == "piece").strip()
    assert end in (("done", "cut"), ("done", ""))


@pytest.mark.parametrize("ended", [True, False])
def test_a_reply_that_reaches_the_limit_is_cut(ended):
    class Answering:
        def answer(self, messages, sampling):
            assert sampling.max_new_tokens == 3
            yield SimpleNamespace(text="He", ended=False)
            yield SimpleNamespace(text="Hello", ended=ended)

    pieces = [("piece", "He"), ("piece", "llo"), ("done", "" if ended else "cut")]
    assert list(pieces_of_reply(Answering(), HELLO, 3)) == pieces


class Loaded:
    """In place of a model's process: it loads, or finds no memory beside another model."""

    running: ClassVar = []

    def __init__(self, name):
        self.name, self.detail = name, ""
        self.process = self
        self.running.append(name)

    def is_alive(self):
        return self.name in self.running

    def stop(self):
        self.running.remove(self.name)

    def read(self):
        if self.name == "large" and len(self.running) > 1:
            raise _OutOfMemoryError("the model's process has ended")
        if self.name == "broken":
            raise UserError("no such model")
        return "ready", "a model"


def test_the_two_models_used_last_stay_in_memory(monkeypatch):
    monkeypatch.setattr("annotation_ui.server.checkpoints._start_process", Loaded)
    monkeypatch.setattr(Loaded, "running", [])
    checkpoints = Checkpoints()
    for name, running in (
        ("a", "a"), ("b", "ab"), ("a", "ab"), ("c", "ac"), ("a", "ac"), ("b", "ab"),
    ):  # fmt: skip
        checkpoints._ensure_loaded(name)
        assert (sorted(Loaded.running), checkpoints.status.name) == (list(running), name)
    with pytest.raises(UserError, match="no such model"):
        checkpoints._ensure_loaded("broken")
    assert checkpoints.status.state == "failed"
    checkpoints._ensure_loaded("b")
    checkpoints._ensure_loaded("large")  # alone, after it did not fit beside another
    assert Loaded.running == ["large"]
    assert checkpoints.status.state == "loaded"
    checkpoints.unload()
    assert Loaded.running == []


def test_a_conversation_that_is_too_long_is_refused_with_a_message(sharp_folders):
    with pytest.raises(UserError, match=r"20018 tokens.*context length \(1024\).*max_new_tokens"):
        next(pieces_of_reply(Speaker(sharp_folders["tiny-gpt2"]), [{"role": "user", "content": "x" * 20_000}], 8))


@pytest.mark.slow  # the test of the lead's page loads one
def test_a_model_loads_in_the_background_fails_with_its_process_and_is_unloaded(tmp_path):
    checkpoints = Checkpoints()
    with pytest.raises(UserError, match="no model"):
        next(checkpoints.reply("", HELLO, 8))
    checkpoints._status = Status("loaded", "tiny-llama")  # as after a message of a batch that names it
    with pytest.raises(UserError, match="no model"):  # another batch does not talk to it
        next(checkpoints.reply("", HELLO, 8))
    checkpoints.load("tiny-gpt2")
    assert checkpoints.status.state == "loading"  # it returned before the model was there
    pieces = list(checkpoints.reply("", HELLO, 8))  # waits until the model is loaded
    assert {piece.model for piece in pieces} == {"tiny-gpt2"}
    assert pieces[-1].cut  # random weights
    process = checkpoints._models["tiny-gpt2"].process
    list(checkpoints.reply("tiny-llama", HELLO, 8))
    list(checkpoints.reply("", HELLO, 8))
    assert checkpoints._models["tiny-gpt2"].process is process  # both are in memory
    assert checkpoints.status.state == "loaded"
    assert "GPT2LMHeadModel" in checkpoints.status.detail
    process.kill()  # as the kernel does when memory runs out
    process.join()
    assert checkpoints.status.state == "failed"
    checkpoints.unload()
    assert checkpoints.status.state == "none"


def test_a_model_that_waits_is_not_loaded_after_it_was_unloaded():
    checkpoints = Checkpoints()
    with checkpoints._lock:  # as while a reply is being generated
        checkpoints.load("tiny-gpt2")
        assert checkpoints.status.detail == "waiting until the current reply is complete"
        checkpoints.unload()
    time.sleep(0.5)  # its turn
    assert checkpoints.status.state == "none"


def test_the_lead_loads_and_unloads_a_model(server, browser, tmp_path):
    server.add_batch([("t", {"rule": "no-threats"})], "probe", rule_set="sparrow-dialogue")
    page = server.lead_page(browser, "model-boss")
    page.get_by_role("tab", name="Model", exact=True).click()
    status = page.locator("#model-status .status")
    page.get_by_role("button", name="Unload", exact=True).click()  # the app is all tests' own: one may have left a model
    expect(status).to_have_class("status none")
    for name, says in (
        (str(tmp_path), "neither config.json nor adapter_config.json"),
        ("tiny-llama", "LlamaForCausalLM"),
    ):
        page.get_by_label("Model", exact=True).locator("visible=true").fill(name)
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Load", exact=True).click()
        expect(status).to_contain_text(says, timeout=180_000)
        assert len(status.inner_text().splitlines()) == 1
    labeler = server.page(browser, "model-labeler", "/?task=probe")
    labeler.locator(".say textarea").fill("Hello")
    labeler.click('[data-action="send"]')
    expect(labeler.locator(".message.assistant .markdown")).not_to_be_empty(timeout=120_000)
    page.get_by_role("button", name="Unload", exact=True).click()
    expect(status).to_have_class("status none")
    labeler.locator(".say textarea").fill("Are you there?")
    labeler.click('[data-action="send"]')
    expect(labeler.locator(".toast")).to_contain_text("no model")


@pytest.mark.slow
def test_replies_in_progress_delay_no_labeler(server):
    """Four labelers probe at once; a fifth gets and submits rankings meanwhile, each in under a second."""
    server.add_batch(3000)
    server.add_batch(
        [("t", {})], "probe", rule_set="sparrow-dialogue", labelers_per_item=4, settings={"checkpoint": "tiny-llama"}
    )
    probers = [Client(server, server.token(f"prober-{number}")) for number in range(4)]
    replies = []

    def probe(client):
        replies.append(client("POST", f"{client.here('probe')}/say", {"text": "Hello"})[2])

    ranker = Client(server, server.token("unhindered"))
    threads = [threading.Thread(target=probe, args=(client,)) for client in probers]
    for thread in threads:
        thread.start()
    slowest, submits, begun = 0.0, 0, time.perf_counter()
    while any(thread.is_alive() for thread in threads):  # loading the model, then four replies
        start = time.perf_counter()
        ranker.submit()
        slowest = max(slowest, time.perf_counter() - start)
        submits += 1
        time.sleep(0.1)
    assert [reply for reply in replies if "[no reply" in reply] == []
    assert len(replies) == 4
    assert submits >= 5
    assert slowest < max(1, 0.25 * (time.perf_counter() - begun))  # of a loaded machine, a share


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

    def reply(checkpoint, messages, limit):
        yield Piece("model", "Hel")
        assert skipped.wait(20)
        yield Piece("model", "lo")

    probing = Probing(judgments, reply)

    async def read(text):
        asked = await asyncio.to_thread(probing.add_message, ann, number, text)
        pieces = []
        async for piece in probing.stream_reply(ann, number, *asked):
            pieces.append(piece)
            if not skipped.is_set():
                with pytest.raises(ConflictError, match="still answering"):
                    probing.add_message(ann, number, "more")
                await asyncio.to_thread(judgments.skip, ann, number, "skip-it", "no more of this", 1.0)
                skipped.set()
        return pieces

    with ThreadPoolExecutor(1) as pool:  # the browser of other tests has a loop in this thread
        assert pool.submit(asyncio.run, read("Hi")).result() == ["Hel", "lo"]
    now = judgments.load(ann, number)
    assert (now.assignment.state, now.assignment.transcript[-1]["content"]) == ("skipped", "Hello")
    assert now.item.taken == 0
    assert judgments.leases.next(ann, "probe") is None
    assert [row["reason"] for row in rows_to_export(database, Selection("skips"))] == ["no more of this"]


def test_a_reply_that_nobody_reads_is_stored(judgments, opened):
    """The browser went away before the reply began, and the labeler goes on in another one."""
    ann, number = opened
    probing = Probing(judgments, lambda *_: iter([Piece("model", "Hello")]))

    async def leave_at_once():
        probing.stream_reply(ann, number, *probing.add_message(ann, number, "Hi"))
        for _ in range(200):
            if not probing._busy:
                return
            await asyncio.sleep(0.05)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, leave_at_once()).result()
    assert probing.add_message(ann, number, "More?")[1][1]["content"] == "Hello"


def test_a_message_that_could_not_be_stored_can_be_sent_again(judgments, opened, monkeypatch):
    ann, number = opened
    probing = Probing(judgments, lambda *_: iter(()))

    def full(*_):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(Judgments, "save_transcript", full)
        with pytest.raises(OSError, match="no space"):
            probing.add_message(ann, number, "Hi")
    assert probing.add_message(ann, number, "Hi") == ("", [{"role": "user", "content": "Hi"}], 256)


@pytest.mark.parametrize("cut", [True, False])
def test_a_cut_reply_is_stored_marked_and_exported_and_the_batch_sets_the_limit(database, judgments, opened, cut):
    limits = []
    settings = {"max_new_tokens": 7}
    add_batch(database, [("t", {"rule": "no-threats"})], "probe", rule_set="sparrow-dialogue", settings=settings, priority=1)
    (bob,) = add_users(database, "bob")
    number = judgments.leases.next(bob, "probe").id

    def reply(checkpoint, messages, limit):
        limits.append(limit)
        yield Piece("model", "Hello")
        yield Piece("model", "", cut)

    probing = Probing(judgments, reply)

    async def talk():
        return [piece async for piece in probing.stream_reply(bob, number, *probing.add_message(bob, number, "Hi"))]

    with ThreadPoolExecutor(1) as pool:
        assert "".join(pool.submit(asyncio.run, talk()).result()) == "Hello"
    assert limits == [7]
    transcript = judgments.load(bob, number).assignment.transcript
    assert [message.get("cut", False) for message in messages_html(transcript)] == [False, cut]
    judgments.submit(bob, number, "judged", {"verdict": "follows", "note": ""}, 1)
    (row,) = rows_to_export(database, Selection("rule_judgments"))
    assert (row["response"], row["model"], row.get("cut", False)) == ("Hello", "model", cut)
    RuleJudgment.from_row(row)


@pytest.mark.parametrize("limit", [0, -1, 2.5, "7", True, 100_000])
def test_a_limit_that_is_none_is_refused_at_import(database, opened, limit):
    with pytest.raises(UserError, match="max_new_tokens"):
        add_batch(database, [("t", {})], "probe", rule_set="sparrow-dialogue", settings={"max_new_tokens": limit})
