"""What goes wrong in the server is a page for people, one line for programs, and never a blank or a lost answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect
from sqlalchemy import text

from annotation_ui.auth import Auth
from annotation_ui.guard import COOKIE

from .client import Client, form
from .conftest import SCREENSHOTS
from .running import Server

pytestmark = pytest.mark.timeout(180)
PASSWORD = "correct horse battery"


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of this file's own, which its tests may break."""
    folder: Path = tmp_path_factory.mktemp("broken")
    with Server(f"sqlite:///{folder / 'annotations.db'}", folder).started() as server:
        yield server


def opened(page: Page, path: str) -> int:
    """The status of a page that was opened."""
    answer = page.goto(path)
    assert answer is not None
    return answer.status


def test_a_mistake_of_the_server_is_a_page(own_server: Server, browser: Browser) -> None:
    page = own_server.page(browser, "unlucky")
    with own_server.database.write() as session:  # a value that no version of the app writes, and none can read
        session.execute(text("UPDATE sign_ins SET expires_at = 'never'"))
    assert opened(page, "/") == 500
    expect(page.get_by_role("heading", name="The server made a mistake")).to_be_visible()
    expect(page.locator("main")).to_contain_text("Nothing that was acknowledged is lost")
    page.screenshot(path=SCREENSHOTS / "error-500.png")
    (cookie,) = [each["value"] for each in page.context.cookies() if each["name"] == COOKIE]
    status, headers, body = Client(own_server, cookie)("GET", "/api/tasks")
    assert (status, body) == (500, '{"error":"the server made a mistake"}')
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["cache-control"] == "no-store"
    assert "Traceback" in (own_server.folder / "log").read_text()  # for whoever runs the server
    with own_server.database.write() as session:
        session.execute(text("DELETE FROM sign_ins"))
    page.get_by_role("link", name="To the labeling page").click()
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    page.context.close()


def test_a_full_disk_is_a_page_and_an_open_page_goes_on(own_server: Server, browser: Browser) -> None:
    own_server.add_batch(1)
    Auth(own_server.database).create_user("ann", "labeler", PASSWORD)
    page = own_server.page(browser, "ann")
    page.goto("/?task=rank")
    page.wait_for_selector(".card")
    other = browser.new_context(base_url=own_server.url).new_page()
    other.goto("/login")
    other.fill('[name="name"]', "ann")
    other.fill('[name="password"]', PASSWORD)
    with own_server.full_disk():
        page.keyboard.press("1")
        expect(page.locator(".saved")).to_have_text("The server cannot answer, trying again…")
        other.keyboard.press("Enter")
        expect(other.get_by_role("heading", name="Nothing can be stored now")).to_be_visible()
        other.screenshot(path=SCREENSHOTS / "error-503.png")
        status, _, body = Client(own_server)("POST", "/login", *form(name="ann", password=PASSWORD))
        assert (status, body) == (503, '{"error":"nothing can be stored now; this page tries again"}')
    expect(page.locator(".saved")).to_have_text("Saved")
    other.go_back()
    other.fill('[name="name"]', "ann")
    other.fill('[name="password"]', PASSWORD)
    other.keyboard.press("Enter")
    expect(other.locator(".rank-badge.placed")).to_have_text("1")  # the draft that waited has arrived
    for each in (page, other):
        each.context.close()


def test_a_page_that_starts_while_the_server_cannot_answer_starts_later(own_server: Server, browser: Browser) -> None:
    page = own_server.page(browser, "early")
    with own_server.database.write() as session:
        session.execute(text("ALTER TABLE batches RENAME TO hidden"))
    page.goto("/")
    expect(page.locator(".workbench")).to_have_text("The server cannot answer, trying again…")
    with own_server.database.write() as session:
        session.execute(text("ALTER TABLE hidden RENAME TO batches"))
    expect(page.locator(".tabs")).to_be_visible()
    page.context.close()


def test_what_is_gone_or_needs_a_session_is_a_page(own_server: Server, browser: Browser) -> None:
    page = own_server.page(browser, "boss", "lead")
    assert opened(page, "/lead/exports/rankings-20260101-000000-0123abcd.jsonl") == 404
    expect(page.get_by_role("heading", name="There is no such page")).to_be_visible()
    page.goto("/")
    page.wait_for_selector(".tabs")
    page.context.clear_cookies()
    page.locator(".menu summary").click()
    page.get_by_role("button", name="Sign out").click()  # the session has ended before: no error, either
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    body, headers = form(name="x" * 300, password="y")
    status, _, shown = Client(own_server)("POST", "/login", body, {**headers, "Accept": "text/html"})
    assert (status, "Something is missing" in shown) == (422, True)
    page.context.close()
