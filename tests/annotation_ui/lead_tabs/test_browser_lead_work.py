import itertools
import re

from playwright.sync_api import expect

from annotation_ui.store.batches import delete_batch
from tests.annotation_ui.pages import LOW_CONTRAST, TABS, UNNAMED, answers_awaited, choose, open_tab, soon_equal, type_order
from tests.annotation_ui.running import rank_rows

HOSTILE = "<img src=x onerror=alert(1)> =cmd()"


# The levels of the headings in the order of the page: none is left out on the way down.
HEADINGS = """() => [...document.querySelectorAll('h1, h2, h3, h4')].filter((each) => each.checkVisibility())
  .map((each) => Number(each.tagName[1]))"""


def check_looks(page, name):
    """Everything on the lead's page can be read, our own parts have names, and nothing sticks out of it."""
    levels = page.evaluate(HEADINGS)
    assert all(level <= before + 1 for before, level in itertools.pairwise(levels)), (name, levels)
    soon_equal(page, LOW_CONTRAST, [], name, ".gradio-container")
    own = ":is(#top, .lead-table, .first-steps, .one-item)"  # Gradio's calendar and files have parts without a name
    soon_equal(page, UNNAMED.replace(".workbench", own), [], name)
    soon_equal(page, "document.documentElement.scrollWidth <= innerWidth", True, name)


def delete_and_restore(page, name):
    """The only batch, which holds judgments, is deleted and brought back."""
    panel = open_tab(page, "Batches")
    panel.locator("[data-key] button").click()
    expect(panel.get_by_role("textbox", name="Name")).to_have_value(name)  # a batch that is opened closes the question
    panel.get_by_role("button", name="Delete", exact=True).click()
    expect(panel.get_by_text("you can restore it")).to_be_visible()
    panel.get_by_role("button", name="Yes, delete").click()
    expect(panel.locator(".empty")).to_be_visible()
    choose(panel, "Deleted batches with work", name)
    panel.get_by_role("button", name="Restore").click()
    expect(panel.locator("[data-key]")).to_have_count(1)


def decide_both(page, panel):
    """Two disagreements are decided one after the other, the second twice."""
    panel.get_by_role("button", name="Start deciding").click()
    expect(page.locator(".decision")).to_contain_text("2 disagreements")
    for left in (1, 0):
        type_order(page, [1, 2, 3, 4])
        page.keyboard.press("Enter")
        if left:
            expect(page.locator(".decision")).to_contain_text("1 disagreement ")
    expect(page.locator(".nothing")).to_contain_text("No disagreements")
    page.keyboard.press("u")  # the last decision is open again, and still a decision
    expect(page.locator(".decision")).to_contain_text("1 disagreement ")
    page.keyboard.press("Enter")
    expect(page.locator(".nothing")).to_contain_text("No disagreements")


def test_an_empty_app_says_what_to_do_first_and_what_is_empty(own_server, browser):
    for scheme in ("dark", "light"):
        page = own_server.lead_page(browser, "boss", color_scheme=scheme)
        expect(page.locator(".first-steps li.current")).to_contain_text("Add labelers")
        for tab in TABS:
            panel = open_tab(page, tab)
            for shown in panel.locator(".lead-table").all():  # no table is just a head, or a hole
                expect(shown.locator(".empty, tbody tr").first).to_be_visible()
            if tab in ("Overview", "Labelers", "Items", "Disagreements", "Batches", "Rules and guidelines"):
                expect(panel.locator(".empty").first).to_be_visible()
            check_looks(page, f"lead-empty-{scheme}-{tab}")
        if scheme == "light":
            open_tab(page, "Overview")
            page.get_by_role("button", name="Write guidelines").click()
            expect(page.get_by_label("Guidelines (Markdown)")).to_be_visible()
            page.get_by_role("link", name="Label", exact=True).click()
            expect(page.locator(".nothing")).to_be_visible()
            page.locator(".nothing a").click()
            expect(page.get_by_role("tab", name="Overview")).to_be_visible()
        page.context.close()


def test_skipped_and_stuck_items_are_seen_without_scrolling_on_a_laptop(own_server, browser):
    name = own_server.add_batch(1, name="everyday questions", labelers_per_item=3)
    page = own_server.lead_page(browser, "boss", viewport={"width": 1280, "height": 800})
    table = page.locator(".lead-table .scroll").filter(has_text="in progress").first
    expect(table.get_by_role("columnheader", name="stuck")).to_be_in_viewport(ratio=1)
    assert table.evaluate("(each) => each.scrollWidth <= each.clientWidth")
    delete_batch(own_server.database, name)


def test_a_lead_browses_decides_and_sees_who_is_reliable(own_server, browser):
    rows = rank_rows(4)
    rows[1][1]["prompt"] = HOSTILE
    own_server.add_batch(rows, labelers_per_item=3, name=HOSTILE)
    own_server.rank("ann", *[[1, 2, 3, 4]] * 4)
    own_server.rank("bob", *[[1, 2, 3, 4]] * 4)
    own_server.rank("cy", [4, 3, 2, 1], [1, 3, 2, 4], *[[1, 2, 3, 4]] * 2, flags=[["hallucination"], [], [], []])
    page = own_server.page(browser, "boss", role="lead")
    dialogs = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    page.goto("/lead/")
    panel = open_tab(page, "Labelers")
    panel.locator('[data-key="cy"] button').click()
    expect(panel.locator(".lead-table").nth(1).locator("tbody tr").first).to_contain_text("D > C > B > A")
    check_looks(page, "lead-labelers")

    panel = open_tab(page, "Items")
    expect(panel.locator("[data-key]")).to_have_count(4)
    with answers_awaited(page) as wait_for_first:
        for row in (0, 3):
            panel.locator("[data-key] button").nth(row).click()
            wait_for_first()
    last = panel.locator("[data-key]").nth(3).get_attribute("data-key")
    expect(page.locator("#one-item h2").first).to_contain_text(f"Item {last} ·")
    panel.get_by_label("Text", exact=True).fill("onerror")
    panel.get_by_label("Text", exact=True).press("Enter")
    expect(panel.locator("[data-key]")).to_have_count(1)
    expect(panel.locator("[data-key]")).to_contain_text(HOSTILE)
    panel.locator("[data-key] button").click()
    expect(page.locator("#one-item")).to_contain_text("A > C > B > D")
    expect(page.locator("#one-item")).to_contain_text("model-0")
    texts = page.locator("#one-item .markdown")
    assert {each.get_attribute("dir") for each in texts.all()} == {"auto"}  # lists of Arabic begin at the right
    check_looks(page, "lead-items")
    panel.get_by_label("Text", exact=True).fill("")
    panel.get_by_text("Judgments", exact=True).click()
    choose(panel, "Flag or answer", "Hallucination")
    choose(panel, "Labeler", "cy")
    expect(panel.locator("[data-key]")).to_have_count(4)
    choose(panel, "Labeler", "ann")
    expect(panel.locator(".empty")).to_be_visible()

    panel = open_tab(page, "Disagreements")
    expect(panel.locator("[data-key]")).to_have_count(2)
    check_looks(page, "lead-disagreements")
    decide_both(page, panel)
    page.locator(".nothing a").click()
    panel = open_tab(page, "Disagreements")
    expect(panel.locator(".empty")).to_be_visible()

    delete_and_restore(page, HOSTILE)
    assert dialogs == []


def test_a_labeler_reads_new_guidelines_and_learns_from_a_training_item(own_server, browser):
    row = {
        "prompt": "2 + 2?",
        "responses": ["4", "5"],
        "gold": {"choice": "A"},
        "training": True,
        "explanation": "It is **4**.",
    }
    work = {"prompt": "3 + 3?", "responses": ["6", "7"]}
    own_server.add_batch([("t", row), ("t", work)], "compare")
    boss = own_server.lead_page(browser, "boss")
    panel = open_tab(boss, "Rules and guidelines")
    choose(panel, "Task", "Compare two")
    expect(panel.locator(".empty").first).to_be_visible()
    expect(panel.get_by_label("Guidelines (Markdown)")).to_have_value(re.compile("^# Comparing two"))  # else it comes later
    panel.get_by_label("Guidelines (Markdown)").fill("Before a look at the list that chooses nothing.")
    for each in ("Task", "Guidelines (Markdown)"):
        panel.get_by_label(each, exact=True).focus()
    boss.wait_for_timeout(300)
    expect(panel.get_by_label("Guidelines (Markdown)")).to_have_value(re.compile("^Before a look"))
    panel.get_by_label("Guidelines (Markdown)").fill("Second.")
    panel.get_by_role("button", name="Save guidelines").click()
    expect(panel.get_by_text("Saved as a new version.")).to_be_visible()
    boss.context.close()

    page = own_server.page(browser, "dot", "/?task=compare")
    page.locator("[data-action=read-guidelines]").click()
    expect(page.get_by_role("dialog")).to_contain_text("Second.")
    page.get_by_role("button", name="Close").click()
    expect(page.locator(".guidelines-notice")).to_have_count(0)
    page.reload()
    expect(page.locator(".choices")).to_be_visible()
    expect(page.locator(".guidelines-notice")).to_have_count(0)
    expect(page.locator(".stage")).to_contain_text("2 + 2?")
    page.locator('[data-action="skip"]').click()
    page.keyboard.press("s")
    expect(page.locator(".toast")).to_contain_text("cannot be skipped")
    wrong = page.locator(".card", has_text="5").locator("h3").inner_text()
    page.locator(".choices button", has_text=re.compile(rf"\b{wrong[-1]}\b")).click()
    page.locator('[data-action="submit"]').click()
    expect(page.get_by_role("dialog")).to_contain_text("Not quite")
    expect(page.get_by_role("dialog")).to_contain_text("It is 4.")
    page.get_by_role("button", name="Close").click()
    expect(page.locator(".stage")).to_contain_text("3 + 3?")
