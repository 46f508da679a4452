"""Every order and every tie by keyboard, mouse and touch: what was clicked is what is exported."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, CDPSession, Page

from .running import Server, rank_rows
from .test_browser_rank import drag, exported, open_rank

pytestmark = pytest.mark.timeout(600)
SHOWN = """() => [document.querySelector('.conversation .markdown').innerText.trim(),
  [...document.querySelectorAll('.card .markdown')].map((each) => each.innerText.trim())]"""
NEXT = "(old) => document.querySelector('.conversation .markdown')?.innerText.trim() !== old"


def all_orders(size: int) -> Iterator[list[int]]:
    """Every way to give `size` responses the ranks 1 to m, ties included: 3, 13, 75 ... of them."""
    for ranks in itertools.product(range(1, size + 1), repeat=size):
        if set(ranks) == set(range(1, max(ranks) + 1)):
            yield list(ranks)


def in_slots(rng: random.Random, ranks: list[int]) -> list[int]:
    """The same order in places that need not follow each other."""
    places = sorted(rng.sample(range(1, len(ranks) + 1), max(ranks)))
    return [places[rank - 1] for rank in ranks]


def typed(page: Page, places: list[int]) -> None:
    for place in places:
        page.keyboard.press(str(place))


def clicked(page: Page, places: list[int]) -> None:
    for index, place in enumerate(places):
        page.click(f'[data-card="{index}"] [aria-label="Place {place}"]')


def dragged(page: Page, places: list[int]) -> None:
    for index, place in enumerate(places):
        drag(page, f'.tray [data-response="{index}"]', f'[data-slot="{place}"]')


def tapped(page: Page, places: list[int]) -> None:
    for index, place in enumerate(places):
        page.tap(f'[data-card="{index}"] [aria-label="Place {place}"]')


def touch_dragged(page: Page, places: list[int]) -> None:
    touch = page.context.new_cdp_session(page)
    for index, place in enumerate(places):
        page.locator(".board").scroll_into_view_if_needed()
        _touch_drag(touch, page, f'.tray [data-response="{index}"]', f'[data-slot="{place}"]')


def _touch_drag(touch: CDPSession, page: Page, source: str, target: str) -> None:
    def send(kind: str, *points: dict[str, float]) -> None:
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": list(points)})

    def middle(selector: str) -> dict[str, float]:
        box = page.locator(selector).first.bounding_box()
        assert box is not None
        return {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}

    start = middle(source)
    send("touchStart", start)
    send("touchMove", {"x": start["x"] + 9, "y": start["y"] + 9})
    for _ in range(2):  # the gaps grow while something is dragged
        send("touchMove", middle(target))
    send("touchEnd")


@pytest.mark.full  # test_browser_rank.py has one order
def test_every_order_and_tie_is_exported_as_it_was_clicked(any_server: Server, browser: Browser) -> None:
    """All orders of 2 to 4 responses (91) and random ones of 5 to 9, each in random places: 200 in all.

    Most by keyboard, the quickest; the orders of 3 with each pointer. Without ALIGN_FULL=1, 30 of them, drawn at random:
    of each size and by each hand.
    """
    rng = random.Random(0)
    hands: dict[str, Callable[[Page, list[int]], None]] = {
        "keyboard": typed, "mouse": clicked, "drag": dragged, "touch": tapped, "touch-drag": touch_dragged
    }  # fmt: skip
    plan = [("keyboard", ranks) for size in (2, 3, 4) for ranks in all_orders(size)]
    plan += [(hand, ranks) for hand in ("mouse", "touch") for ranks in all_orders(3)]
    plan += [(hand, ranks) for hand in ("drag", "touch-drag") for ranks in rng.sample(list(all_orders(3)), 7)]
    sizes = [rng.randint(5, 9) for _ in range(200 - len(plan))]
    plan += [(rng.choice(["keyboard"] * 9 + ["mouse"]), dense([rng.randint(1, k) for _ in range(k)])) for k in sizes]
    rng.shuffle(plan)
    if os.environ.get("ALIGN_FULL") != "1":
        plan = plan[:30]
        assert {hand for hand, _ in plan} == set(hands)
    rows = [rank_rows(1, len(ranks))[0] for _, ranks in plan]
    for number, (_, row) in enumerate(rows):
        row["prompt"], row["id"] = f"Question {number}", f"q-{number}"
    batch = any_server.add_batch(rows)
    desk = open_rank(any_server, browser, "orders", viewport={"width": 1280, "height": 1000})
    phone: Page | None = None
    expected: dict[str, dict[str, int]] = {}
    for hand, ranks in plan:
        if hand.startswith("touch") and phone is None:
            phone = open_rank(any_server, browser, "orders", viewport={"width": 390, "height": 1400}, has_touch=True)
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
    for each in (desk, phone):
        if each is not None:
            each.context.close()


def dense(ranks: list[int]) -> list[int]:
    taken = sorted(set(ranks))
    return [taken.index(rank) + 1 for rank in ranks]
