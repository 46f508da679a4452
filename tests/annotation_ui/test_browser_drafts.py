"""What was written or clicked is kept: through an ended session, a reload, a second window, a late answer, a held key."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, Page, Route, expect
from sqlalchemy import delete, select

from annotation_ui.auth import Auth
from annotation_ui.export import Selection, rows_to_export
from annotation_ui.schema import Assignment, SignIn, User

from .conftest import SCREENSHOTS
from .running import Server
from .test_browser_rank import open_rank

pytestmark = pytest.mark.timeout(240)
PASSWORD = "correct horse battery"


def user_id(server: Server, name: str) -> int:
    with server.database.read() as session:
        found = session.scalar(select(User.id).where(User.name == name))
    assert found is not None
    return found


def end_session(server: Server, name: str) -> None:
    number = user_id(server, name)
    with server.database.write() as session:
        session.execute(delete(SignIn).where(SignIn.user_id == number))


def stored_text(server: Server, name: str) -> str:
    with server.database.read() as session:
        mine = select(Assignment.draft).where(Assignment.user_id == user_id(server, name), Assignment.state == "leased")
        draft = session.scalar(mine)
    return draft["state"]["completion"] if draft else ""


def open_writing(server: Server, browser: Browser, name: str) -> Page:
    page = server.page(browser, name)
    page.goto("/?task=demonstrate")
    page.wait_for_selector("textarea")
    return page


def test_a_text_outlives_the_end_of_the_session(server: Server, browser: Browser) -> None:
    server.add_batch([("t", {"prompt": "Q"})], "demonstrate")
    server.token("writer")
    Auth(server.database).set_password("writer", PASSWORD)
    page = open_writing(server, browser, "writer")
    page.keyboard.type("one")
    expect(page.locator(".saved")).to_have_text("Saved")
    end_session(server, "writer")
    page.keyboard.type(" two")
    dialog = page.locator(".sign-in")
    expect(dialog).to_be_visible()
    page.keyboard.press("Escape")  # does not lose it
    page.screenshot(path=SCREENSHOTS / "sign-in-again.png")
    page.fill(".sign-in [type=password]", "wrong")
    page.keyboard.press("Enter")
    expect(dialog).to_contain_text("Wrong password.")
    page.fill(".sign-in [type=password]", PASSWORD)
    page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()
    expect(page.locator(".saved")).to_have_text("Saved")
    expect(page.locator("textarea")).to_have_value("one two")
    assert stored_text(server, "writer") == "one two"

    end_session(server, "writer")
    page.locator("textarea").press("End")
    page.keyboard.type(" three")
    expect(dialog).to_be_visible()
    page.reload()  # instead of signing in there
    page.fill('[name="name"]', "writer")
    page.fill('[name="password"]', PASSWORD)
    page.keyboard.press("Enter")
    expect(page.locator("textarea")).to_have_value("one two three")
    expect(page.locator(".saved")).to_have_text("Saved")
    assert stored_text(server, "writer") == "one two three"
    page.context.close()


def test_a_second_window_says_what_is_saved(server: Server, browser: Browser) -> None:
    server.add_batch([("t", {"prompt": "Q"})], "demonstrate")
    one, two = open_writing(server, browser, "twice"), open_writing(server, browser, "twice")
    one.keyboard.type("first")
    expect(one.locator(".saved")).to_have_text("Saved")
    two.keyboard.type("second")
    expect(two.locator(".saved")).to_have_text("Not saved")
    expect(two.locator(".notice.urgent")).to_contain_text("another window")
    two.screenshot(path=SCREENSHOTS / "second-window.png")
    assert stored_text(server, "twice") == "first"
    two.click('[data-action="take-over"]')
    expect(two.locator(".saved")).to_have_text("Saved")
    expect(two.locator(".notice.urgent")).to_have_count(0)
    assert stored_text(server, "twice") == "second"
    one.keyboard.type(" more")
    expect(one.locator(".saved")).to_have_text("Not saved")
    one.click('[data-action="load"]')
    expect(one.locator("textarea")).to_have_value("second")
    one.context.close()
    two.context.close()


def test_an_answer_that_is_late_does_not_disturb_the_next_task(server: Server, browser: Browser) -> None:
    server.add_batch([("t", {"prompt": "Q", "responses": ["a", "b"]})] * 2, "compare")
    server.add_batch([("t", {"prompt": "Q"})], "demonstrate")
    page = server.page(browser, "quick")
    page.goto("/?task=compare")
    page.wait_for_selector(".choices")
    held: list[Route] = []
    page.route("**/submit", lambda route: held.append(route))  # the answer takes its time
    page.keyboard.press("t")
    page.keyboard.press("Enter")
    while not held:
        page.wait_for_timeout(20)
    page.click('[data-task="demonstrate"]')
    page.wait_for_selector("textarea")
    page.keyboard.type("on")
    with page.expect_response("**/submit"):
        held[0].continue_()
    page.keyboard.type("ward")
    expect(page.locator("textarea")).to_have_value("onward")
    expect(page.locator(".saved")).to_have_text("Saved")
    assert stored_text(server, "quick") == "onward"
    page.context.close()


def test_an_answer_that_is_refused_stays_as_it_was(server: Server, browser: Browser) -> None:
    server.add_batch(2)
    page = open_rank(server, browser, "refused")
    held: list[Route] = []
    page.route("**/submit", lambda route: held.append(route))
    page.keyboard.type("1234")
    page.keyboard.press("Enter")
    while not held:
        page.wait_for_timeout(20)
    page.keyboard.type("4321")  # for the next item, as the labeler thinks
    held[0].fulfill(status=422, json={"error": "not like this"})
    expect(page.get_by_text("not like this")).to_be_visible()
    expect(page.locator(".problem")).to_have_text("A > B > C > D")
    page.unroute("**/submit")
    page.keyboard.press("Enter")
    expect(page.locator(".count")).to_have_text("1 done")
    expect(page.locator(".problem")).to_have_text("Not placed yet: A, B, C, D")  # those keys were meant for no item
    page.context.close()


def test_a_key_that_is_held_decides_one_item(server: Server, browser: Browser) -> None:
    batch = server.add_batch(5)
    page = open_rank(server, browser, "holder")

    def hold(key: str) -> None:
        for _ in range(8):  # the browser repeats it, as a keyboard does
            page.keyboard.down(key)
            page.wait_for_timeout(60)
        page.keyboard.up(key)

    for done in (1, 2):
        page.keyboard.type("1234")
        page.keyboard.press("Enter")
        expect(page.locator(".count")).to_have_text(f"{done} done")
    page.keyboard.type("12")
    hold("u")  # both places, and not the answers before
    expect(page.locator(".problem")).to_have_text("Not placed yet: A, B, C, D")
    expect(page.locator(".count")).to_have_text("2 done")
    page.keyboard.press("u")
    expect(page.locator(".count")).to_have_text("1 done")
    hold("s")  # asks, and skips nothing
    expect(page.locator("dialog[open] .skip")).to_be_visible()
    assert rows_to_export(server.database, Selection("skips", batches=(batch,))) == []
    page.keyboard.press("s")
    expect(page.locator("dialog[open]")).to_have_count(0)
    page.context.close()
