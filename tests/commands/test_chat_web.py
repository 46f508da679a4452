"""The page of `align chat --web` in a browser: streaming, figures, stop and keys."""

import re
import socket

import pytest
from playwright.sync_api import expect

from align import cli
from align.commands.chat import ChatConfig, Speaker
from align.commands.chat_web import ChatRoom, start
from align.core.errors import UserError
from tests.commands.words import words_of
from tests.files import write_rows
from tests.ports import free_port

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def models(tmp_path_factory, sharp_folders):
    """An adapter of the sharp Llama and a reward model."""
    folder = tmp_path_factory.mktemp("models")
    write_rows(folder / "sft.jsonl", ({"prompt": f"{i}?", "completion": "yes"} for i in range(8)))
    ranked = [{"prompt": f"{i}?", "responses": ["yes", "no"], "ranks": [1, 2]} for i in range(8)]
    write_rows(folder / "ranked.jsonl", ranked)
    shared = {"batch_size": 4, "report_to": "none", "dtype": "float32", "model": sharp_folders["tiny-llama"]}
    cli.main(
        [
            "sft",
            *words_of(train_data=folder / "sft.jsonl", output_dir=folder / "lora", lora_r=2, learning_rate="3e-2", **shared),
        ]
    )
    cli.main(
        ["reward", *words_of(train_data=folder / "ranked.jsonl", output_dir=folder / "reward", demonstrations="", **shared)]
    )
    return folder


@pytest.fixture
def open_chat(browser):
    """`open_chat(model=[...])`: the room and a browser page of it."""
    servers, contexts = [], []

    def open_one(**settings):
        config = ChatConfig(web=True, port=free_port(), **({"dtype": "float32", "max_new_tokens": 12} | settings))
        room = ChatRoom(config)
        servers.append(start(room))
        contexts.append(browser.new_context())
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: (_ for _ in ()).throw(AssertionError(f"script error: {error}")))
        page.goto(f"http://127.0.0.1:{config.port}/")
        expect(page.get_by_label("Message", exact=True)).to_be_visible()
        return room, page

    yield open_one
    for context in contexts:
        context.close()
    for server in servers:
        server.close()


def ask(page, text):
    """Send a message; the page takes none while it is answering."""
    box = page.get_by_label("Message", exact=True)
    box.fill(text)
    for _ in range(40):
        box.press("Enter")
        page.wait_for_timeout(500)
        if not box.input_value():
            return
    raise AssertionError("the message was not taken")


def bubbles(page, number, role):
    return page.locator(f"#chat-{number} .message.{role}")


def test_two_models_answer_with_rewards_and_colored_tokens(models, sharp_folders, open_chat):
    lora, base = str(models / "lora" / "model"), sharp_folders["tiny-llama"]
    room, page = open_chat(model=[lora, base], temperature=0.0, reward_model=str(models / "reward"))
    assert room.references == [room.speakers[1], None], "the base of the adapter, which is loaded once"
    ask(page, "Name a moon.")
    for number in (0, 1):
        expect(bubbles(page, number, "user")).to_have_text("Name a moon.")
        expect(page.locator(f"#facts-{number}")).to_contain_text(re.compile(r"reward -?\d+\.\d{3}"))
    expect(page.locator("#facts-0")).to_contain_text("log-ratio")
    tokens = page.locator("#ratios-0 .score-token")
    expect(tokens.first).to_be_visible()
    styles = [token.get_attribute("style") for token in tokens.all()]
    assert any(not style.endswith(", 0);") for style in styles), "some token has a color"
    expect(page.locator("#ratios-1")).to_be_hidden()
    ask(page, "And another?")
    expect(bubbles(page, 0, "user")).to_have_count(2)
    expect(page.locator("#facts-1")).to_contain_text("reward")


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_an_answer_is_stopped_and_the_conversation_continues(how, open_chat):
    _, page = open_chat(model=["tiny-t5"], max_new_tokens=2000, temperature=0.0)  # it reads texts of any length
    ask(page, "Hi")
    expect(bubbles(page, 0, "bot")).to_contain_text(re.compile(r"\S"))
    if how == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    page.wait_for_timeout(500)
    text = bubbles(page, 0, "bot").inner_text()
    page.wait_for_timeout(500)
    assert bubbles(page, 0, "bot").inner_text() == text, "it is no longer written"
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Longest answer, in tokens").first.fill("5")
    ask(page, "And?")
    expect(bubbles(page, 0, "user")).to_have_count(2)
    page.get_by_role("button", name="New conversation").click()
    expect(bubbles(page, 0, "user")).to_have_count(0)


def test_settings_and_mistakes_are_shown(open_chat):
    _, page = open_chat(model=["tiny-llama"], temperature=0.0)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System message").fill("Be kind.")
    ask(page, "Hi")
    speaker = Speaker("tiny-llama", "float32")
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    *_, expected = speaker.answer(messages, ChatConfig(model="m", max_new_tokens=12, temperature=0).sampling)
    expect(bubbles(page, 0, "bot")).to_have_count(1)
    assert expected.ids
    page.get_by_label("Longest answer, in tokens").first.fill("5000")
    ask(page, "x")
    expect(page.locator("#status")).to_contain_text("start a new conversation, or lower max_new_tokens")
    expect(bubbles(page, 0, "user")).to_have_count(1)


def test_a_reference_with_another_tokenizer_is_refused(sharp_folders):
    with pytest.raises(UserError, match="reference tiny-t5: its tokenizer or chat template differs from that of tiny-gpt2"):
        ChatRoom(ChatConfig(model="tiny-gpt2", reference="tiny-t5", web=True))


def test_a_taken_port_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{port}; give another --port"):
            start(ChatRoom(ChatConfig(model="tiny-gpt2", web=True, port=port)))
