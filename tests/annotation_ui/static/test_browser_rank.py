import json
import random
import re

import pytest
from playwright.sync_api import expect
from sqlalchemy import select

from annotation_ui.store.schema import Judgment
from tests.annotation_ui.pages import drag_order, exported, open_task, press, shown_texts, submit, type_order
from tests.annotation_ui.running import rank_rows, stored

pytestmark = pytest.mark.timeout(600)


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
    expect(phone.locator(".problem")).to_have_text(re.compile("B > A · .*: C, D"))


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
    (order,) = stored(server.database, select(Judgment.shown_order).order_by(Judgment.id.desc()).limit(1))
    assert [row["ranks"][index] for index in order] == [1, 4, 3, 2]


def test_help_and_keys_that_move(server, browser):
    server.add_batch(1)
    page = open_task(server, browser, "keys", "rank")
    page.keyboard.press("?")
    expect(page.locator("dialog .keys")).to_contain_text("Backspace")
    page.keyboard.press("Escape")
    page.keyboard.press("Enter")  # refused: nothing is placed
    expect(page.locator(".toast")).to_be_visible()
    steps = [("2", "2"), ("4", "24"), ("1", "241"), ("1", "241=1="), ("ArrowDown", "3412"), ("ArrowDown", "2413"),
             ("ArrowUp", "3412"), ("t", "341=1="), ("ArrowUp", "3421"), ("Backspace", "342"), ("t", "342"),
             ("ArrowUp", "3421"), ("ArrowUp", "3421")]  # fmt: skip
    for key, wanted in steps:
        page.keyboard.press(key)
        badges = [badge.inner_text() for badge in page.locator(".rank-badge").all()]
        assert "".join(badges).replace("not ranked", "").replace(" tied", "=") == wanted, key


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


def clicked(page, places):
    for index, place in enumerate(places):
        page.click(f'[data-card="{index}"] [aria-label="Rank {place}"]')


def tapped(page, places):
    for index, place in enumerate(places):
        page.tap(f'[data-card="{index}"] [aria-label="Rank {place}"]')


def touch_dragged(page, places):
    touch = page.context.new_cdp_session(page)

    def send(kind, *points):
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": list(points)})

    def middle(selector):
        box = page.locator(selector).first.bounding_box()
        return {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}

    for index, place in enumerate(places):
        page.locator(".board").scroll_into_view_if_needed()
        start = middle(f'.tray [data-response="{index}"]')
        send("touchStart", start)
        send("touchMove", {"x": start["x"] + 9, "y": start["y"] + 9})
        for _ in range(2):  # the gaps grow while something is dragged
            send("touchMove", middle(f'[data-slot="{place}"]'))
        send("touchEnd")


HANDS = {"keyboard": type_order, "mouse": clicked, "drag": drag_order, "touch": tapped, "touch-drag": touch_dragged}


@pytest.mark.parametrize(
    ("any_server", "hand", "size", "count"),
    [
        ("sqlite", "keyboard", 2, 4),
        ("postgresql", "keyboard", 3, 27),
        ("sqlite", "keyboard", 9, 10),
        *(("sqlite", hand, 3, 5) for hand in HANDS if hand != "keyboard"),
        *(pytest.param(kind, "keyboard", 4, 256, marks=pytest.mark.slow) for kind in ("sqlite", "postgresql")),
    ],
    indirect=["any_server"],
)
def test_every_order_and_tie_is_exported_as_it_was_entered(any_server, browser, hand, size, count):
    """`count` different ways to give `size` responses a place: all of them for 2, 3 and 4."""
    rng, entered, expected = random.Random(0), set(), {}
    while len(entered) < count:
        entered.add(tuple(rng.choices(range(1, size + 1), k=size)))
    batch = any_server.add_batch(rank_rows(count, size))
    screen = {"width": 390, "height": 1400} if hand.startswith("touch") else {"width": 1280, "height": 1000}
    page = open_task(any_server, browser, f"orders-{hand}", "rank", viewport=screen, has_touch=hand.startswith("touch"))
    for places in sorted(entered):
        prompt, texts = page.evaluate(SHOWN)
        HANDS[hand](page, places)
        taken = sorted(set(places))
        expected[prompt] = {text: taken.index(place) + 1 for text, place in zip(texts, places, strict=True)}
        page.keyboard.press("Enter")
        page.wait_for_function(NEXT, arg=prompt)
    got = {row["prompt"]: dict(zip(row["responses"], row["ranks"], strict=True)) for row in exported(any_server, batch)}
    assert got == expected


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
