"""Ranking in a real browser: with the mouse, with the keyboard alone, and what comes out of the export."""

import itertools
import json
import random

import pytest
from playwright.sync_api import expect
from sqlalchemy import select

from align import cli
from annotation_ui.cli import main
from annotation_ui.reports.export import Selection, rows_to_export
from annotation_ui.store.schema import Judgment
from tests.annotation_ui.conftest import in_pairs
from tests.annotation_ui.pages import drag_order, exported, open_task, press, shown_texts, submit, type_order
from tests.annotation_ui.running import rank_rows, stored
from tests.files import read_rows

pytestmark = pytest.mark.timeout(600)


@in_pairs(("postgresql", "keyboard"))
def test_an_order_with_a_tie_is_exported_as_it_was_shown(any_server, browser, how):
    batch = any_server.add_batch(1)
    page = open_task(any_server, browser, f"rank-{how}", "rank")
    texts = shown_texts(page)
    places = [2, 3, 1, 2]
    if how == "mouse":
        drag_order(page, places)
        page.click('[data-action="submit"]')
        expect(page.locator(".count")).to_have_text("1 done")
    else:
        type_order(page, places)
        submit(page, 1)
    (row,) = exported(any_server, batch)
    by_text = dict(zip(row["responses"], row["ranks"], strict=True))
    assert by_text == dict(zip(texts, places, strict=True))
    assert row["prompt"] == "Prompt 0"
    assert row["model"] == [f"model-{k}" for k in range(4)]


def test_a_refresh_and_another_device_go_on_where_the_labeler_was(server, browser):
    server.add_batch(2)
    page = open_task(server, browser, "refresher", "rank")
    drag_order(page, [2, 1, 2])
    page.click('[data-card="1"] .ratings button:nth-of-type(6)')
    page.click('[data-card="0"] .flags summary')
    page.check('[data-card="0"] [data-flag="hallucination"]')
    expect(page.locator(".saved")).to_have_text("Saved")
    before = (shown_texts(page), page.locator(".board").inner_text())
    page.reload()
    page.wait_for_selector(".board .chip")
    assert (shown_texts(page), page.locator(".board").inner_text()) == before
    expect(page.locator('[data-card="1"] [aria-label="Quality 6 of 7"]')).to_have_attribute("aria-checked", "true")
    phone = open_task(server, browser, "refresher", "rank", viewport={"width": 390, "height": 800})
    phone.wait_for_selector(".board .chip")
    assert (shown_texts(phone), phone.locator(".board").inner_text()) == before
    assert phone.evaluate("document.querySelector('.workbench').scrollWidth") <= 390
    phone.keyboard.press("u")  # the flag
    phone.keyboard.press("u")  # the rating
    phone.keyboard.press("u")  # the last drop
    expect(phone.locator(".problem")).to_have_text("B > A · Not placed yet: C, D")


def test_undo_opens_the_submitted_ranking_again(server, browser):
    batch = server.add_batch(2)
    page = open_task(server, browser, "undoer", "rank")
    first = page.locator(".conversation").inner_text()
    type_order(page, [4, 3, 2, 1])
    submit(page, 1)
    expect(page.locator(".conversation")).not_to_have_text(first)
    page.keyboard.press("u")
    expect(page.locator(".count")).to_have_text("0 done")
    expect(page.locator(".conversation")).to_contain_text("Prompt 0")
    expect(page.locator('[data-card="3"] .rank-badge')).to_have_text("1")
    page.locator('[data-card="0"]').focus()
    press(page, "1", "ArrowUp")  # out of the tie with D, in front of it
    submit(page, 1)
    (row,) = exported(server, batch)
    judgments = stored(server.database, select(Judgment).order_by(Judgment.id))[-3:]
    assert [judgment.kind for judgment in judgments] == ["submit", "undo", "edit"]
    assert [row["ranks"][index] for index in judgments[-1].shown_order] == [1, 4, 3, 2]


def test_a_skip_asks_for_the_reason_and_gives_the_next_item(server, browser):
    batch = server.add_batch(2)
    page = open_task(server, browser, "skipper", "rank")
    first = page.locator(".conversation").inner_text()
    press(page, "s")
    page.wait_for_selector("dialog[open] .skip")
    press(page, "2")
    expect(page.locator(".conversation")).not_to_have_text(first)
    (skip,) = rows_to_export(server.database, Selection("skips", batches=(batch,)))
    assert skip["reason"] == "I do not know enough to judge it"


def test_help_and_keys_that_move(server, browser):
    server.add_batch(1)
    page = open_task(server, browser, "keys", "rank")
    page.keyboard.press("?")
    expect(page.locator("dialog")).to_contain_text("tie it with the one above")
    page.keyboard.press("Escape")
    page.keyboard.press("Enter")  # refused: nothing is placed
    expect(page.locator(".toast")).to_contain_text("Not placed yet")
    steps = [("2", "2"), ("4", "24"), ("1", "241"), ("1", "241=1="), ("ArrowDown", "3412"), ("ArrowDown", "2413"),
             ("ArrowUp", "3412"), ("t", "341=1="), ("ArrowUp", "3421"), ("Backspace", "342"), ("t", "342"),
             ("ArrowUp", "3421"), ("ArrowUp", "3421")]  # fmt: skip
    for key, wanted in steps:
        page.keyboard.press(key)
        badges = [badge.inner_text() for badge in page.locator(".rank-badge").all()]
        assert "".join(badges).replace("not placed", "").replace(" tied", "=") == wanted, key


def test_what_a_key_acts_on_and_what_is_dragged_come_into_view(server, browser):
    long = [f"{k} " + "long text " * 150 for k in range(9)]
    server.add_batch([("t", {"prompt": "Q", "responses": long})])
    page = open_task(server, browser, "scroller", "rank", viewport={"width": 1100, "height": 520})
    first = page.locator('[data-card="0"]')
    for keys in ("f", ("q", "5"), "ArrowUp"):
        page.mouse.move(400, 300)
        page.mouse.wheel(0, 4000)
        expect(first).not_to_be_in_viewport()
        for key in keys if isinstance(keys, tuple) else (keys,):
            page.keyboard.press(key)
        expect(first).to_be_in_viewport()
    side = page.locator(".side")
    side.evaluate("(each) => each.scrollTo(0, 0)")
    box, chip = side.bounding_box(), page.locator('.board .chip[data-response="0"]').bounding_box()
    page.mouse.move(chip["x"] + 10, chip["y"] + 10)
    page.mouse.down()
    page.mouse.move(box["x"] + 60, box["y"] + box["height"] - 20)
    page.mouse.move(box["x"] + 60, box["y"] + box["height"] - 10)  # and rest there
    page.wait_for_function("() => document.querySelector('.side').scrollTop > 60")
    page.mouse.up()


def test_models_and_ids_never_reach_a_labeler(server, browser):
    server.add_batch(1)
    page = server.page(browser, "blind")
    bodies = []
    page.on("response", lambda answer: bodies.append(answer.text()) if "/api/" in answer.url else None)
    page.goto("/?task=rank")
    page.wait_for_selector(".card")
    everything = json.dumps(bodies) + page.content()
    assert "Response 0.1" in everything
    assert "model-1" not in everything
    assert "item-0" not in everything


SHOWN = """() => [document.querySelector('.conversation .markdown').innerText.trim(),
  [...document.querySelectorAll('.card .markdown')].map((each) => each.innerText.trim())]"""
NEXT = "(old) => document.querySelector('.conversation .markdown')?.innerText.trim() !== old"


def all_orders(size):
    """Every way to give `size` responses the ranks 1 to m, ties included: 3, 13, 75 ... of them."""
    for ranks in itertools.product(range(1, size + 1), repeat=size):
        if set(ranks) == set(range(1, max(ranks) + 1)):
            yield list(ranks)


def in_slots(rng, ranks):
    """The same order in places that need not follow each other."""
    places = sorted(rng.sample(range(1, len(ranks) + 1), max(ranks)))
    return [places[rank - 1] for rank in ranks]


def clicked(page, places):
    for index, place in enumerate(places):
        page.click(f'[data-card="{index}"] [aria-label="Place {place}"]')


def tapped(page, places):
    for index, place in enumerate(places):
        page.tap(f'[data-card="{index}"] [aria-label="Place {place}"]')


def touch_dragged(page, places):
    touch = page.context.new_cdp_session(page)
    for index, place in enumerate(places):
        page.locator(".board").scroll_into_view_if_needed()
        _touch_drag(touch, page, f'.tray [data-response="{index}"]', f'[data-slot="{place}"]')


def _touch_drag(touch, page, source, target):
    def send(kind, *points):
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": list(points)})

    def middle(selector):
        box = page.locator(selector).first.bounding_box()
        return {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}

    start = middle(source)
    send("touchStart", start)
    send("touchMove", {"x": start["x"] + 9, "y": start["y"] + 9})
    for _ in range(2):  # the gaps grow while something is dragged
        send("touchMove", middle(target))
    send("touchEnd")


@pytest.mark.slow  # test_browser_rank.py has one order
def test_every_order_and_tie_is_exported_as_it_was_clicked(any_server, browser):
    """All orders of 2 to 4 responses (91) and random ones of 5 to 9, each in random places: 200 in all.

    Most by keyboard, the quickest; the orders of 3 with each pointer.
    """
    rng = random.Random(0)
    hands = {
        "keyboard": type_order, "mouse": clicked, "drag": drag_order, "touch": tapped, "touch-drag": touch_dragged
    }  # fmt: skip
    plan = [("keyboard", ranks) for size in (2, 3, 4) for ranks in all_orders(size)]
    plan += [(hand, ranks) for hand in ("mouse", "touch") for ranks in all_orders(3)]
    plan += [(hand, ranks) for hand in ("drag", "touch-drag") for ranks in rng.sample(list(all_orders(3)), 7)]
    sizes = [rng.randint(5, 9) for _ in range(200 - len(plan))]
    plan += [(rng.choice(["keyboard"] * 9 + ["mouse"]), dense([rng.randint(1, k) for _ in range(k)])) for k in sizes]
    rng.shuffle(plan)
    rows = [rank_rows(1, len(ranks))[0] for _, ranks in plan]
    for number, (_, row) in enumerate(rows):
        row["prompt"], row["id"] = f"Question {number}", f"q-{number}"
    batch = any_server.add_batch(rows)
    desk = open_task(any_server, browser, "orders", "rank", viewport={"width": 1280, "height": 1000})
    phone = None
    expected = {}
    for hand, ranks in plan:
        if hand.startswith("touch") and phone is None:
            phone = open_task(any_server, browser, "orders", "rank", viewport={"width": 390, "height": 1400}, has_touch=True)
        page = phone if phone and hand.startswith("touch") else desk
        prompt, texts = page.evaluate(SHOWN)
        if prompt in expected:  # the other device has answered this one
            page.reload()
            page.wait_for_selector(".card")
            prompt, texts = page.evaluate(SHOWN)
        hands[hand](page, in_slots(rng, ranks))
        expected[prompt] = dict(zip(texts, ranks, strict=True))
        page.keyboard.press("Enter")
        page.wait_for_function(NEXT, arg=prompt)
    got = {row["prompt"]: dict(zip(row["responses"], row["ranks"], strict=True)) for row in exported(any_server, batch)}
    assert got == expected


def dense(ranks):
    taken = sorted(set(ranks))
    return [taken.index(rank) + 1 for rank in ranks]


def test_nine_responses_are_read_in_two_columns_or_one_at_a_time(server, browser):
    rows = rank_rows(2, responses=9)
    for _, row in rows:
        row["responses"] = [f"{text} " + "word " * 150 for text in row["responses"]]
    server.add_batch(rows)
    page = open_task(server, browser, "viewer", "rank", viewport={"width": 1280, "height": 800})
    cards = page.locator(".card[data-card]")
    expect(cards.locator("visible=true")).to_have_count(9)
    page.click('[data-view="two"]')
    first, second = cards.nth(0).bounding_box(), cards.nth(1).bounding_box()
    assert first["y"] == second["y"]
    assert second["x"] > first["x"] + 300
    press(page, "v")
    expect(cards.locator("visible=true")).to_have_count(1)
    expect(page.locator('[data-card="0"] .more')).to_be_hidden()  # all of it is shown
    press(page, "3")  # placed, and the next one is shown
    expect(page.locator('[data-card="1"]')).to_be_visible()
    expect(page.locator('[data-card="1"]')).to_be_focused()
    expect(page.locator('[data-letter="0"]')).to_have_text("A · 3")
    page.click('[data-letter="8"]')
    expect(page.locator('[data-card="8"]')).to_be_visible()
    press(page, "ArrowRight")
    expect(page.locator('[data-card="0"]')).to_be_visible()
    page.reload()  # the view is remembered in this browser
    expect(cards.locator("visible=true")).to_have_count(1)
    press(page, "v")
    expect(cards.locator("visible=true")).to_have_count(9)


QUIET = ["--report_to", "none", "--dtype", "float32"]


def export(server, folder, record, path, batch):
    words = ["--database", server.database_url, "--data-dir", str(folder), "export", record, str(path), "--batch", batch]
    assert main(words) == 0
    return read_rows(path)


def test_30_rankings_train_a_reward_model(server, browser, tmp_path):
    rows = rank_rows(30)
    rows[0][1]["responses"][1] = ""  # as policies write it
    batch = server.add_batch(rows)
    page = open_task(server, browser, "trainer", "rank")
    rng = random.Random(30)
    for done in range(1, 31):
        type_order(page, [rng.randint(1, 4) for _ in range(4)])
        submit(page, done)
    path = tmp_path / "rankings.jsonl"
    rows = export(server, tmp_path, "rankings", path, batch)
    left_out = json.loads(path.with_name("rankings.jsonl.manifest.json").read_text())["all_tied_left_out"]
    assert len(rows) + left_out == 30
    output = tmp_path / "reward"
    reward = ["--model", "tiny-gpt2", "--train_data", str(path), "--output_dir", str(output), "--batch_size", "15"]
    cli.main(["reward", *reward, *QUIET])
    assert list(output.rglob("*.safetensors"))
