"""Two leads at once, in two browsers: nothing is overwritten or lost, and both are told; a batch for one labeler."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, Locator, Page, expect
from sqlalchemy import select

from annotation_ui.schema import Batch

from .running import Server
from .test_browser_labeler import press
from .test_browser_lead import answers_awaited, choose, open_tab
from .test_browser_rank import open_rank

pytestmark = pytest.mark.timeout(180)


def open_lead(server: Server, browser: Browser, name: str) -> Page:
    page = server.page(browser, name, "lead")
    page.goto("/lead/")
    return page


def open_batch(page: Page, batch: str) -> Locator:
    panel = open_tab(page, "Batches")
    panel.locator(f'[data-key="{batch}"] button').click()
    expect(panel.get_by_label("Name", exact=True)).to_have_value(batch)
    return panel


def save_batch(panel: Locator, label: str, value: str) -> None:
    panel.get_by_label(label).fill(value)
    panel.get_by_role("button", name="Save", exact=True).click()


def test_settings_that_another_lead_has_changed_are_told_and_shown(server: Server, browser: Browser) -> None:
    batch = server.add_batch(2)
    one, two = open_lead(server, browser, "lead-one"), open_lead(server, browser, "lead-two")
    first, second = open_batch(one, batch), open_batch(two, batch)
    save_batch(first, "Priority (higher first)", "5")
    expect(first.get_by_text("Saved.")).to_be_visible()
    save_batch(second, "Labelers for each item", "2")
    expect(two.locator(".toast-body").last).to_contain_text("another lead has changed")
    second.locator(f'[data-key="{batch}"] button').click()
    expect(second.get_by_label("Priority (higher first)")).to_have_value("5")
    save_batch(second, "Labelers for each item", "2")
    expect(second.get_by_text("Saved.")).to_be_visible()
    with server.database.read() as session:
        stored = session.scalars(select(Batch).where(Batch.name == batch)).one()
        assert (stored.overlap, stored.priority) == (2, 5)
    for page in (one, two):
        page.context.close()


def test_guidelines_of_another_lead_are_told_and_an_unsaved_text_stays(server: Server, browser: Browser) -> None:
    one, two = open_lead(server, browser, "lead-one"), open_lead(server, browser, "lead-two")
    panels = [open_tab(page, "Rules and guidelines") for page in (one, two)]
    for panel in panels:
        choose(panel, "Task", "Probe a model")
        expect(panel.locator(".empty").first).to_be_visible()
    editors = [panel.get_by_label("Guidelines (Markdown)") for panel in panels]
    saves = [panel.get_by_role("button", name="Save guidelines") for panel in panels]
    editors[0].fill("Of the first.")
    saves[0].click()
    expect(panels[0].locator('[data-key="1"]')).to_be_visible()

    editors[1].fill("Of the second.")
    open_tab(two, "Overview")
    open_tab(two, "Rules and guidelines")
    expect(panels[1].locator('[data-key="1"]')).to_contain_text("lead-one")  # the list is read again
    expect(editors[1]).to_have_value("Of the second.")
    saves[1].click()
    expect(two.locator(".toast-body").last).to_contain_text("another lead has saved new guidelines")
    panels[1].locator('[data-key="1"] button').click()
    expect(editors[1]).to_have_value("Of the first.")
    editors[1].fill("Of both.")
    saves[1].click()
    expect(panels[1].locator('[data-key="2"]')).to_contain_text("lead-two")
    for page in (one, two):
        page.context.close()


def test_a_batch_for_one_labeler_shows_what_is_skipped_and_stuck(server: Server, browser: Browser) -> None:
    batch = server.add_batch(2, overlap=2)
    server.token("cleo")
    lead = open_lead(server, browser, "lead-one")
    panel = open_batch(lead, batch)
    choose(panel, "Give it to (nobody named: everybody)", "cleo")
    lead.keyboard.press("Escape")
    panel.get_by_role("button", name="Save", exact=True).click()
    expect(panel.get_by_text("Saved.")).to_be_visible()

    dora = server.page(browser, "dora")
    dora.goto("/?task=rank")
    expect(dora.locator(".nothing")).to_be_visible()
    cleo = open_rank(server, browser, "cleo")
    prompt = cleo.locator(".conversation").inner_text()
    press(cleo, "s")
    cleo.wait_for_selector("dialog[open] .skip")
    press(cleo, "2")
    expect(cleo.locator(".stage")).not_to_contain_text(prompt.split("\n")[-1])

    open_tab(lead, "Overview")
    panel = open_tab(lead, "Batches")
    row, head = panel.locator(f'[data-key="{batch}"] td'), panel.locator("thead th").all_inner_texts()
    expect(row.nth(head.index("skipped"))).to_have_text("1")
    expect(row.nth(head.index("stuck"))).to_have_text("1")  # nobody else may have it
    panel = open_tab(lead, "Items")
    choose(panel, "Batch", batch)
    for state in ("skipped by somebody", "stuck: nobody is left who may take it", "somebody has it open"):
        choose(panel, "State", state)
        expect(panel.locator("[data-key]")).to_have_count(1)
    with answers_awaited(lead) as wait_for_first:
        choose(panel, "State", "any")
        wait_for_first()
        panel.get_by_text("Judgments", exact=True).click()
    expect(panel.locator("[data-key]", has_text="I do not know enough to judge it")).to_be_visible()
    expect(panel.locator("[data-key]")).to_have_count(1)
    for page in (lead, dora, cleo):
        page.context.close()
