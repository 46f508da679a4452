"""The lead's page on a phone of 390 pixels: every tab fits, is readable, and can be worked with by finger."""

from __future__ import annotations

import re
import secrets
from contextlib import suppress
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, TimeoutError, expect

from annotation_ui.judgments import Judgments
from annotation_ui.leases import Leases

from .conftest import SCREENSHOTS
from .running import Server, do
from .test_accessibility import LOW_CONTRAST
from .test_browser_lead import choose, open_tab
from .test_browser_lead_work import labeler

pytestmark = pytest.mark.timeout(300)
WIDTH = 390
TABS = ("Overview", "Labelers", "Items", "Disagreements", "Import", "Batches", "Rules and guidelines", "Model", "Users",
        "Export")  # fmt: skip
# What can be seen and stands out of the screen, but for what lies in a part that scrolls by itself.
OUTSIDE = """() => {
  const scrolls = (each) => /auto|scroll/.test(getComputedStyle(each).overflowX) && each.scrollWidth > each.clientWidth;
  const inside = (each) => each && each !== document.body && (scrolls(each) || inside(each.parentElement));
  const found = [...document.querySelectorAll('body *')].filter((each) => {
    const box = each.getBoundingClientRect();
    const seen = each.checkVisibility() && box.width && !each.closest('.visually-hidden');
    return seen && (box.right > innerWidth + 1 || box.left < -1) && !inside(each.parentElement);
  });
  return [document.documentElement.scrollWidth - innerWidth, found.map((each) => each.outerHTML.slice(0, 150))];
}"""
# WCAG 2.2, success criterion 2.5.8: what is tapped is at least 24 pixels wide and high. Gradio's fields have a box around.
SMALL = """() => [...document.querySelectorAll('button, input, select, textarea, [role="tab"]')]
  .filter((each) => each.checkVisibility() && !each.closest('.visually-hidden'))
  .map((each) => [each.closest('td, label') ?? (each.tagName === 'INPUT' ? each.closest('.block') : each), each])
  .filter(([box]) => box.getBoundingClientRect().width < 24 || box.getBoundingClientRect().height < 24)
  .map(([, each]) => each.outerHTML.slice(0, 150))"""
CODE = "```python\n" + "x = call(" + ", ".join(f"argument_{i}=value_{i}" for i in range(30)) + ")\n```"


def add_real_work(server: Server) -> str:
    """Answers as models write them, long names, and labelers who differ and skip; the name of the batch."""
    responses = [CODE, "1. eins\n2. zwei\n\n" + "x" * 120, "مرحبا! اسمي **سلمى**.", "你好" * 60]
    models = [f"runs/model-{k}/step-1000" for k in range(4)]
    row = {"prompt": "Write " + "a-long-word" * 9, "responses": responses, "model": models}
    rows = [("t", {**row, "id": f"an-item-with-a-long-name-{n}"}) for n in range(3)]
    batch = server.add_batch(rows, overlap=10, name=f"round-{secrets.token_hex(24)}")
    judgments = Judgments(Leases(server.database))
    others = [(f"cleopatra-{n}", [1, 2, 2, 3]) for n in range(8)]  # more than a legend has room for
    for name, ranks in (("ann" * 12, [1, 2, 3, 4]), ("bob", [4, 3, 2, 1]), *others):
        user = labeler(server, name)
        do(judgments, user, "rank", {"ranks": ranks, "ratings": [1, 7, 4, None], "flags": [["hallucination"], [], [], []]})
        waiting = judgments.leases.next(user, "rank")
        assert waiting is not None
        judgments.skip(user, waiting.id, secrets.token_hex(8), "I do not know enough to judge it", 3.0)
    return batch


def settled(panel: Locator) -> None:
    """Gradio draws a tab, asks for its tables, and draws again."""
    for table in panel.locator(".lead-table").all():
        expect(table.locator("table, .empty").first).to_be_visible()
    panel.page.wait_for_timeout(400)


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.full)])
def test_every_tab_fits_and_is_readable(server: Server, browser: Browser, scheme: Any) -> None:
    add_real_work(server)
    viewport = {"width": WIDTH, "height": 844}
    page = server.page(browser, "boss", "lead", viewport=viewport, color_scheme=scheme, has_touch=True, is_mobile=True)
    page.goto("/lead/")
    for name in TABS:
        panel = open_tab(page, name)
        settled(panel)
        row = panel.locator("[data-key] button").first
        if name in ("Labelers", "Items", "Disagreements", "Batches", "Users"):
            row.tap()
            settled(panel)
        with suppress(TimeoutError):  # a chart is drawn again when it learns its width: a busy machine takes a while
            page.wait_for_function(f"() => JSON.stringify(({OUTSIDE})()) === '[0,[]]'", timeout=20_000)
        assert page.evaluate(OUTSIDE) == [0, []], name
        assert page.evaluate(SMALL) == [], name
        assert page.evaluate(LOW_CONTRAST, "gradio-app") == [], name
        page.screenshot(path=SCREENSHOTS / f"lead-phone-{scheme}-{name.split()[0].lower()}.png", full_page=True)
    page.context.close()


def test_a_lead_works_by_finger(server: Server, browser: Browser) -> None:
    """Add a labeler, close a batch, look at an item in a wide table."""
    batch, name = add_real_work(server), f"cem-{secrets.token_hex(3)}"
    page = server.page(browser, "boss", "lead", viewport={"width": WIDTH, "height": 844}, has_touch=True, is_mobile=True)
    page.goto("/lead/")
    panel = open_tab(page, "Users")
    panel.get_by_label("Name", exact=True).fill(name)
    panel.get_by_role("button", name="Add", exact=True).tap()
    expect(panel.get_by_label("Result")).to_have_value(re.compile(f"^Password of {name}"))
    panel = open_tab(page, "Batches")
    panel.locator(f'[data-key="{batch}"] button').tap()
    expect(panel.get_by_label("Name", exact=True)).to_have_value(batch)
    panel.get_by_label("Open", exact=True).tap()
    panel.get_by_role("button", name="Save", exact=True).tap()
    expect(panel.get_by_text("Saved.")).to_be_visible()
    panel = open_tab(page, "Items")
    table = panel.locator(".scroll").first
    assert table.evaluate("(each) => each.scrollWidth > each.clientWidth")  # within itself, not the page
    choose(panel, "Batch", batch)
    expect(panel.locator("[data-key]")).to_have_count(3)
    panel.locator("[data-key] button").first.tap()
    expect(panel.locator(".one-item")).to_be_in_viewport()
    page.context.close()
