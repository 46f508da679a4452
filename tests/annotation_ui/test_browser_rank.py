"""Ranking in a real browser: with the mouse, with the keyboard alone, and what comes out of the export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect
from sqlalchemy import select

from annotation_ui.export import Selection, rows_to_export
from annotation_ui.schema import Assignment, Judgment

from .conftest import SCREENSHOTS, in_pairs
from .running import Server

pytestmark = pytest.mark.timeout(240)


def open_rank(server: Server, browser: Browser, name: str, **context: object) -> Page:
    page = server.page(browser, name, **context)
    page.goto("/?task=rank")
    page.wait_for_selector(".card")
    return page


def drag(page: Page, source: str, target: str) -> None:
    """Press, move and let go; the gaps grow while something is dragged, so the target is measured again."""
    start = page.locator(source).first.bounding_box()
    assert start is not None
    page.mouse.move(start["x"] + start["width"] / 2, start["y"] + start["height"] / 2)
    page.mouse.down()
    page.mouse.move(start["x"] + start["width"] / 2 + 9, start["y"] + start["height"] / 2 + 9)
    for _ in range(2):
        end = page.locator(target).first.bounding_box()
        assert end is not None
        page.mouse.move(end["x"] + end["width"] / 2, end["y"] + end["height"] / 2)
    page.mouse.up()


def drag_order(page: Page, tiers: list[list[int]]) -> None:
    """Build a ranking by dragging each letter to its place."""
    for place, group in enumerate(tiers, 1):
        for index in group:
            drag(page, f'.tray [data-response="{index}"]', f'[data-slot="{place}"]')


def type_order(page: Page, tiers: list[list[int]], size: int) -> None:
    """Build a ranking with the keyboard alone, from the first response to the last: each gets the key of its place."""
    place_of = {index: place for place, group in enumerate(tiers, 1) for index in group}
    for index in range(size):
        page.keyboard.press(str(place_of[index]))


def shown_texts(page: Page) -> list[str]:
    return [text.strip() for text in page.locator(".card .markdown").all_inner_texts()]


def submit(page: Page, done: int) -> None:
    page.locator("body").press("Enter")
    expect(page.locator(".count")).to_have_text(f"{done} done")


def exported(server: Server, batch: str) -> list[dict]:
    return rows_to_export(server.database, Selection("rankings", batches=(batch,), all_tied=True))


@in_pairs(("postgresql", "keyboard"))
def test_an_order_with_a_tie_is_exported_as_it_was_shown(any_server: Server, browser: Browser, how: str) -> None:
    batch = any_server.add_batch(1)
    page = open_rank(any_server, browser, f"rank-{how}")
    texts = shown_texts(page)
    tiers = [[2], [0, 3], [1]]
    if how == "mouse":
        drag_order(page, tiers)
        page.screenshot(path=SCREENSHOTS / "rank-by-mouse.png")
        page.click('[data-action="submit"]')
        expect(page.locator(".count")).to_have_text("1 done")
    else:
        type_order(page, tiers, 4)
        submit(page, 1)
    (row,) = exported(any_server, batch)
    by_text = dict(zip(row["responses"], row["ranks"], strict=True))
    assert {text: by_text[text] for text in texts} == {texts[2]: 1, texts[0]: 2, texts[3]: 2, texts[1]: 3}
    assert row["prompt"] == "Prompt 0"
    assert row["model"] == [f"model-{k}" for k in range(4)]
    page.context.close()


def test_a_refresh_and_another_device_go_on_where_the_labeler_was(server: Server, browser: Browser) -> None:
    server.add_batch(2)
    page = open_rank(server, browser, "refresher")
    drag_order(page, [[1], [0, 2]])
    page.click('[data-card="1"] .ratings button:nth-of-type(6)')
    page.click('[data-card="0"] .flags summary')
    page.check('[data-card="0"] [data-flag="hallucination"]')
    expect(page.locator(".saved")).to_have_text("Saved")
    before = (shown_texts(page), page.locator(".board").inner_text())
    page.reload()
    page.wait_for_selector(".board .chip")
    assert (shown_texts(page), page.locator(".board").inner_text()) == before
    expect(page.locator('[data-card="1"] [aria-label="Quality 6 of 7"]')).to_have_attribute("aria-checked", "true")
    phone = open_rank(server, browser, "refresher", viewport={"width": 390, "height": 800})
    phone.wait_for_selector(".board .chip")
    assert (shown_texts(phone), phone.locator(".board").inner_text()) == before
    assert phone.evaluate("document.querySelector('.workbench').scrollWidth") <= 390
    phone.screenshot(path=SCREENSHOTS / "rank-on-a-phone.png")
    phone.keyboard.press("u")  # the flag
    phone.keyboard.press("u")  # the rating
    phone.keyboard.press("u")  # the last drop
    expect(phone.locator(".problem")).to_have_text("B > A · Not placed yet: C, D")
    phone.context.close()
    page.context.close()


def test_undo_opens_the_submitted_ranking_again(server: Server, browser: Browser) -> None:
    batch = server.add_batch(2)
    page = open_rank(server, browser, "undoer")
    first = page.locator(".conversation").inner_text()
    type_order(page, [[3], [2], [1], [0]], 4)
    submit(page, 1)
    expect(page.locator(".conversation")).not_to_have_text(first)
    page.keyboard.press("u")
    expect(page.locator(".count")).to_have_text("0 done")
    expect(page.locator(".conversation")).to_contain_text("Prompt 0")
    expect(page.locator('[data-card="3"] .rank-badge')).to_have_text("1")
    page.locator('[data-card="0"]').focus()
    page.keyboard.press("1")
    page.keyboard.press("ArrowUp")  # out of the tie with D, in front of it
    submit(page, 1)
    (row,) = exported(server, batch)
    with server.database.read() as session:
        kinds = session.scalars(
            select(Judgment.kind).join(Assignment, Assignment.id == Judgment.assignment_id).order_by(Judgment.id)
        ).all()[-3:]
        order = session.scalars(select(Judgment).order_by(Judgment.id.desc())).first()
    assert kinds == ["submit", "undo", "edit"]
    assert order is not None
    assert [row["ranks"][index] for index in order.shown_order] == [1, 4, 3, 2]
    page.context.close()


def test_two_labelers_at_once_get_different_items(server: Server, browser: Browser) -> None:
    server.add_batch(2)
    one, two = open_rank(server, browser, "together-1"), open_rank(server, browser, "together-2")
    prompts = {page.locator(".conversation .markdown").inner_text() for page in (one, two)}
    assert prompts == {"Prompt 0", "Prompt 1"}
    type_order(one, [[0, 1, 2, 3]], 4)
    submit(one, 1)
    expect(one.locator(".nothing")).to_be_visible()
    one.context.close()
    two.context.close()


def test_skip_help_and_keys_that_move(server: Server, browser: Browser) -> None:
    server.add_batch(2)
    page = open_rank(server, browser, "keys")
    page.keyboard.press("?")
    expect(page.locator("dialog")).to_contain_text("tie it with the one above")
    page.screenshot(path=SCREENSHOTS / "help.png")
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
    first = page.locator(".conversation").inner_text()
    page.keyboard.press("s")
    page.keyboard.press("s")
    expect(page.locator(".conversation")).not_to_have_text(first)
    page.context.close()


def test_models_and_ids_never_reach_a_labeler(server: Server, browser: Browser) -> None:
    server.add_batch(1)
    page = server.page(browser, "blind")
    bodies: list[str] = []
    page.on("response", lambda answer: bodies.append(answer.text()) if "/api/" in answer.url else None)
    page.goto("/?task=rank")
    page.wait_for_selector(".card")
    everything = json.dumps(bodies) + page.content()
    assert "Response 0.1" in everything
    assert "model-1" not in everything
    assert "item-0" not in everything
    page.context.close()


def test_screenshots_land_in_an_ignored_folder() -> None:
    assert "ci-output/" in Path(".gitignore").read_text().split()
