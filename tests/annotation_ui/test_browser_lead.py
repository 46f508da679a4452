"""The lead's tabs by mouse: users, import, batches and an aggregated export, from one end to the other."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect
from sqlalchemy import select

from annotation_ui.judgments import Judgments
from annotation_ui.leases import Leases
from annotation_ui.schema import Batch, User

from .conftest import SCREENSHOTS
from .running import Server, do, rank_rows

pytestmark = pytest.mark.timeout(180)
BLANK = {"ratings": [None] * 4, "flags": [[]] * 4}


def open_tab(page: Page, name: str) -> Locator:
    """The panel of a tab, clicked."""
    page.get_by_role("tab", name=name, exact=True).click()
    panel = page.locator('[role="tabpanel"]:visible').first
    expect(panel).to_be_visible()
    return panel


def choose(panel: Locator, label: str, value: str) -> None:
    """Pick a value from one of Gradio's lists by typing it."""
    field = panel.get_by_label(label, exact=True)
    field.click()
    field.fill(value)
    panel.page.get_by_role("option", name=value, exact=True).click()


@contextmanager
def answers_awaited(page: Page) -> Iterator[Callable[[], None]]:
    """The server hears of a block's events when it ends. What is yielded waits until the first of them was sent."""
    held: list[Route] = []
    page.route("**/queue/join*", lambda route: held.append(route))

    def wait_for_first() -> None:
        while not held:
            page.wait_for_timeout(20)

    yield wait_for_first
    page.wait_for_timeout(300)  # for the others, if they are sent before the first is answered
    for route in held:
        route.continue_()
    page.unroute("**/queue/join*")


def sign_in(server: Server, browser: Browser, name: str, password: str) -> Page:
    page = browser.new_context(base_url=server.url).new_page()
    page.goto("/login")
    page.fill('input[name="name"]', name)
    page.fill('input[name="password"]', password)
    page.click('button[type="submit"]')
    return page


def test_a_labeler_is_added_shut_out_after_a_question_let_in_and_made_a_lead(server: Server, browser: Browser) -> None:
    page = server.page(browser, "office", "lead")
    page.goto("/lead/")
    panel = open_tab(page, "Users")
    panel.get_by_label("Name", exact=True).fill("newcomer")
    panel.get_by_role("button", name="Add", exact=True).click()
    result = panel.get_by_label("Result")
    expect(result).to_have_value(re.compile("^Password of newcomer"))
    password = result.input_value().rsplit(": ", 1)[1]
    panel.locator('[data-key="newcomer"] button').click()
    expect(panel.get_by_label("Chosen user")).to_have_value("newcomer")
    page.screenshot(path=SCREENSHOTS / "lead-users.png")
    labeler = sign_in(server, browser, "newcomer", password)
    work = re.compile(re.escape(server.url) + r"/(\?task=\w+)?$")
    labeler.wait_for_url(work)
    panel.get_by_role("button", name="Shut out", exact=True).click()
    expect(panel.get_by_text("Shut out newcomer?")).to_be_visible()
    panel.get_by_role("button", name="No", exact=True).click()
    expect(panel.get_by_text("Shut out newcomer?")).to_be_hidden()
    labeler.reload()
    expect(labeler).to_have_url(work)  # nothing has happened yet
    panel.get_by_role("button", name="Shut out", exact=True).click()
    panel.get_by_role("button", name="Yes, shut out").click()
    expect(result).to_have_value("newcomer is signed out and cannot sign in.")
    labeler.reload()
    expect(labeler).to_have_url(re.compile("/login"))
    panel.get_by_role("button", name="Let in", exact=True).click()
    expect(result).to_have_value("newcomer can sign in.")
    for role in ("lead", "labeler"):
        panel.get_by_role("button", name="Change role").click()
        expect(result).to_have_value(f"newcomer is a {role} now.")
    again = sign_in(server, browser, "newcomer", password)
    again.wait_for_url(work)
    panel.get_by_role("button", name="Add", exact=True).click()
    expect(page.locator(".toast-body").last).to_contain_text("newcomer")
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    for window in (page, labeler, again):
        window.context.close()


def test_a_batch_is_imported_changed_ranked_twice_and_exported_as_one_row_per_item(
    server: Server, browser: Browser, tmp_path: Path
) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for _, row in rank_rows(3)))
    page = server.page(browser, "office", "lead")
    page.goto("/lead/")
    panel = open_tab(page, "Import")
    panel.locator('input[type="file"]').first.set_input_files(path)
    panel.get_by_label("Name of the batch").fill("from the page")
    panel.get_by_role("button", name="Import", exact=True).click()
    expect(panel.get_by_text("Imported 3 items.")).to_be_visible()

    panel = open_tab(page, "Batches")
    panel.locator('[data-key="from the page"] button').click()
    expect(panel.get_by_label("Name", exact=True)).to_have_value("from the page")  # its own settings fill the fields
    panel.get_by_label("Labelers for each item").fill("2")
    panel.get_by_label("Priority (higher first)").fill("7")
    panel.get_by_label("Name", exact=True).fill("ranked by two")
    panel.get_by_role("button", name="Save", exact=True).click()
    expect(panel.locator('[data-key="ranked by two"]')).to_be_visible()
    page.screenshot(path=SCREENSHOTS / "lead-batches.png")
    with server.database.read() as session:
        batch = session.scalars(select(Batch).where(Batch.name == "ranked by two")).one()
        assert (batch.overlap, batch.priority, batch.open) == (2, 7, True)

    judgments = Judgments(Leases(server.database))
    for name, ranks in (("twice-ann", [1, 2, 3, 4]), ("twice-bob", [1, 3, 2, 4])):
        server.token(name)
        with server.database.read() as session:
            user = session.scalars(select(User.id).where(User.name == name)).one()
        for _ in range(3):
            do(judgments, user, "rank", {"ranks": ranks, **BLANK})

    panel = open_tab(page, "Export")
    choose(panel, "Batches (none: all)", "ranked by two")
    page.keyboard.press("Escape")
    panel.get_by_label("One row per item (aggregated)").check()
    panel.get_by_label("How probable each order is (aggregated rankings)").check()
    panel.get_by_role("button", name="Export", exact=True).click()
    link = panel.locator('a[href*="rankings-"][download]').first
    expect(link).to_be_visible()
    page.screenshot(path=SCREENSHOTS / "lead-export.png")
    with page.expect_download() as download:
        link.click()
    rows = [json.loads(line) for line in Path(download.value.path()).read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["Prompt 0", "Prompt 1", "Prompt 2"]
    # Both put the first before the middle two, which they order differently, and those before the last.
    assert [row["ranks"] for row in rows] == [[1, 2, 2, 3]] * 3
    assert all(len(row["preferences"]) == 4 and row["preferences"][0][3] > 0.5 for row in rows)
    page.context.close()
