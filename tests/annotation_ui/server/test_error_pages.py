import re
import secrets
import time

from playwright.sync_api import expect
from sqlalchemy import text

from annotation_ui.server import services
from annotation_ui.server.auth import Auth
from annotation_ui.server.headers import COOKIE
from annotation_ui.server.services import KEEP_SECONDS, Health
from tests.annotation_ui.pages import open_task, sign_in
from tests.annotation_ui.running import Client, form

PASSWORD = "correct horse battery"


def test_a_mistake_of_the_server_is_a_page(own_server, browser):
    page = own_server.page(browser, "unlucky")
    with own_server.database.write() as session:  # a value that no version of the app writes, and none can read
        session.execute(text("UPDATE sign_ins SET expires_at = 'never'"))
    assert page.goto("/").status == 500
    expect(page).to_have_title(re.compile("error"))
    (cookie,) = [each["value"] for each in page.context.cookies() if each["name"] == COOKIE]
    status, headers, body = Client(own_server, cookie)("GET", "/api/tasks")
    assert (status, body) == (500, '{"error":"internal server error"}')
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["cache-control"] == "no-store"
    assert "Traceback" in (own_server.folder / "log").read_text()  # for whoever runs the server
    with own_server.database.write() as session:
        session.execute(text("DELETE FROM sign_ins"))
    page.get_by_role("link", name="Back to labeling").click()
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()


def test_a_full_disk_is_a_page_and_an_open_page_goes_on(own_server, browser):
    own_server.add_batch(1)
    Auth(own_server.database).create_user("ann", "labeler", PASSWORD)
    ann = Client(own_server, own_server.token("ann"))
    here = f"/api/assignments/{ann.next()['assignment']}"
    request = {"request_id": secrets.token_hex(8), "answer": {"ranks": [1, 2, 3, 4]}, "seconds": 1}
    page = open_task(own_server, browser, "ann", "rank")
    with own_server.full_disk():
        page.keyboard.press("1")
        expect(page.locator(".saved")).to_have_text(re.compile("Retrying"))
        other = sign_in(own_server, browser, "ann", PASSWORD)
        expect(other).to_have_title(re.compile("unavailable"))
        status, _, body = Client(own_server)("POST", "/login", *form(name="ann", password=PASSWORD))
        assert (status, body) == (503, '{"error":"cannot store anything at the moment; the page retries"}')
        assert ann("POST", f"{here}/submit", request)[::2] == (status, body)
        time.sleep(KEEP_SECONDS)
        status, _, body = Client(own_server)("GET", "/healthz")
        assert (status, body.split(":")[0]) == (503, "the database cannot be written")
    expect(page.locator(".saved")).to_have_text("Saved")
    other = sign_in(own_server, browser, "ann", PASSWORD)
    expect(other.locator(".rank-badge.placed")).to_have_text("1")  # the draft that waited has arrived
    assert ann("POST", f"{here}/submit", request)[0] == 200
    time.sleep(KEEP_SECONDS)
    assert Client(own_server)("GET", "/healthz")[::2] == (200, "ok")


def test_a_page_that_starts_while_the_server_cannot_answer_starts_later(own_server, browser):
    page = own_server.page(browser, "early")
    with own_server.database.write() as session:
        session.execute(text("ALTER TABLE batches RENAME TO hidden"))
    page.goto("/")
    expect(page.locator(".workbench")).to_have_text(re.compile("Retrying"))
    with own_server.database.write() as session:
        session.execute(text("ALTER TABLE hidden RENAME TO batches"))
    expect(page.locator(".tabs")).to_be_visible()


def test_what_is_gone_or_needs_a_session_is_a_page(own_server, browser):
    page = own_server.page(browser, "boss", role="lead")
    assert page.goto("/lead/exports/rankings-20260101-000000-0123abcd.jsonl").status == 404
    expect(page).to_have_title(re.compile("not found"))
    eve = own_server.page(browser, "eve")
    assert eve.goto("/lead/").status == 403
    expect(eve).to_have_title(re.compile("denied"))
    assert eve.goto("/nosuch").status == 404
    eve.get_by_role("link", name="Back to labeling").click()
    expect(eve.locator(".stage")).to_be_visible()
    own_server.add_batch(1)
    # With an item: a page without one asks the server for the tasks again.
    page = open_task(own_server, browser, "leaver", "rank")
    page.context.clear_cookies()
    page.locator(".menu summary").click()
    page.get_by_role("button", name="Sign out").click()  # the session has ended before: no error, either
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    body, headers = form(name="x" * 300, password="y")
    status, _, shown = Client(own_server)("POST", "/login", body, {**headers, "Accept": "text/html"})
    assert (status, "Invalid input" in shown) == (422, True)


def test_little_space_counts_as_a_full_disk(database, tmp_path, monkeypatch):
    assert Health(database, tmp_path).problem() == ""
    monkeypatch.setattr(services, "MIN_FREE", 2**62)
    assert Health(database, tmp_path).problem().startswith("the disk is full: ")
