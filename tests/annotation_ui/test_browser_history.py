"""My work: a labeler finds a submitted answer and changes it, by mouse and by keyboard; every version is kept."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, Page, expect
from sqlalchemy import select

from annotation_ui.judgments import Judgments
from annotation_ui.leases import Leases
from annotation_ui.schema import Judgment, User

from .conftest import SCREENSHOTS
from .running import Server, do
from .test_browser_rank import exported

pytestmark = pytest.mark.timeout(120)
BLANK = {"ratings": [None] * 4, "flags": [[]] * 4}


def labeled(server: Server, name: str, count: int) -> str:
    """A batch of which the labeler has ranked all items but one; returns its name."""
    batch = server.add_batch(count + 1)
    server.token(name)
    with server.database.read() as session:
        user = session.scalar(select(User.id).where(User.name == name))
    assert user is not None
    for _ in range(count):
        do(Judgments(Leases(server.database)), user, "rank", {"ranks": [1, 2, 3, 4], **BLANK})
    return batch


def open_history(page: Page, how: str) -> None:
    page.goto("/?task=rank")
    page.wait_for_selector(".card")
    page.click('[data-action="history"]') if how == "mouse" else page.keyboard.press("w")
    page.wait_for_selector(".work-row")


def prompts(page: Page) -> list[str]:
    return page.locator(".work-prompt").all_inner_texts()


@pytest.mark.parametrize("how", ["mouse", "keyboard"])
def test_an_older_answer_is_found_and_changed(server: Server, browser: Browser, how: str) -> None:
    name = f"history-{how}"
    batch = labeled(server, name, 23)
    page = server.page(browser, name)
    open_history(page, how)
    assert prompts(page) == [f"Prompt {i}" for i in range(22, 2, -1)]
    page.screenshot(path=SCREENSHOTS / f"history-{how}.png")
    if how == "mouse":
        page.click('[data-action="older"]')
    else:
        page.keyboard.press("ArrowRight")
    expect(page.locator(".work-row")).to_have_count(3)
    assert prompts(page) == ["Prompt 2", "Prompt 1", "Prompt 0"]
    if how == "mouse":
        page.locator(".work-row").nth(1).click()
    else:
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
    expect(page.locator(".notice.changing")).to_be_visible()
    expect(page.locator(".conversation")).to_contain_text("Prompt 1")
    page.reload()  # the change is the server's to remember
    expect(page.locator(".notice.changing")).to_be_visible()
    assert [row["ranks"] for row in exported(server, batch)] == [[1, 2, 3, 4]] * 23  # it counts as it was
    last = page.locator(".rank-badge").all_inner_texts().index("4")  # responses are shown in a random order
    if how == "mouse":
        page.locator(f'[data-card="{last}"] [aria-label="Place 3"]').click()
        page.click('[data-action="submit"]')
    else:
        for _ in range(4 - last):  # from the first response to the left
            page.keyboard.press("ArrowLeft")
        page.keyboard.press("t")
        page.keyboard.press("Enter")
    page.wait_for_selector(".work-row")
    assert prompts(page)[0] == "Prompt 1"
    expect(page.locator(".work-row").first).to_contain_text("changed")
    with server.database.read() as session:
        newest = session.scalars(select(Judgment).order_by(Judgment.id.desc()).limit(1)).one()
        rows = session.scalars(
            select(Judgment).where(Judgment.assignment_id == newest.assignment_id).order_by(Judgment.id)
        ).all()
    assert [row.kind for row in rows] == ["submit", "edit"]
    assert [sorted(row.answer["ranks"]) for row in rows if row.answer] == [[1, 2, 3, 4], [1, 2, 3, 3]]
    now = {row["prompt"]: row["ranks"] for row in exported(server, batch)}
    assert [prompt for prompt, ranks in now.items() if ranks != [1, 2, 3, 4]] == ["Prompt 1"]
    page.context.close()


def test_an_answer_that_was_opened_is_kept_as_it_was(server: Server, browser: Browser) -> None:
    batch = labeled(server, "keeper", 2)
    page = server.page(browser, "keeper")
    open_history(page, "keyboard")
    page.keyboard.press("Enter")
    expect(page.locator(".notice.changing")).to_be_visible()
    page.keyboard.press("1")
    page.keyboard.press("s")
    page.wait_for_selector(".work-row")
    page.keyboard.press("Escape")
    expect(page.locator(".conversation")).to_contain_text("Prompt 2")  # back at the open item
    assert [row["ranks"] for row in exported(server, batch)] == [[1, 2, 3, 4]] * 2
    with server.database.read() as session:
        kinds = session.scalars(select(Judgment.kind).order_by(Judgment.id.desc()).limit(2)).all()
    assert kinds == ["submit", "submit"]
    page.context.close()
