import re
from pathlib import Path

from playwright.sync_api import expect
from sqlalchemy import select

from annotation_ui.store.batches import BatchSettings, stored_settings
from annotation_ui.store.schema import Batch
from tests.annotation_ui.pages import choose, open_tab, sign_in
from tests.annotation_ui.running import rank_rows, read, stored
from tests.files import read_rows, write_rows


def test_a_labeler_is_added_shut_out_after_a_question_let_in_and_made_a_lead(server, browser):
    page = server.lead_page(browser, "office")
    panel = open_tab(page, "Users")
    panel.get_by_label("Name", exact=True).fill("newcomer")
    panel.get_by_role("button", name="Add", exact=True).click()
    result = panel.get_by_label("Result")
    expect(result).to_have_value(re.compile("^Password of newcomer"))
    password = result.input_value().rsplit(": ", 1)[1]
    panel.locator('[data-key="newcomer"] button').click()
    expect(panel.get_by_label("Selected user")).to_have_value("newcomer")
    newcomer = sign_in(server, browser, "newcomer", password)
    work = re.compile(re.escape(server.url) + r"/(\?task=\w+)?$")
    newcomer.wait_for_url(work)
    panel.get_by_role("button", name="Deactivate", exact=True).click()
    expect(panel.get_by_text("Deactivate newcomer?")).to_be_visible()
    panel.get_by_role("button", name="Cancel", exact=True).click()
    expect(panel.get_by_text("Deactivate newcomer?")).to_be_hidden()
    newcomer.reload()
    expect(newcomer).to_have_url(work)  # nothing has happened yet
    panel.get_by_role("button", name="Deactivate", exact=True).click()
    panel.get_by_role("button", name="Yes, deactivate").click()
    expect(result).to_have_value("newcomer is signed out and cannot sign in.")
    newcomer.reload()
    expect(newcomer).to_have_url(re.compile("/login"))
    panel.get_by_role("button", name="Reactivate", exact=True).click()
    expect(result).to_have_value("newcomer can sign in.")
    for role in ("lead", "labeler"):
        panel.get_by_role("button", name="Change role").click()
        expect(result).to_have_value(re.compile(rf"newcomer is .*{role}"))
    again = sign_in(server, browser, "newcomer", password)
    again.wait_for_url(work)
    panel.get_by_role("button", name="Add", exact=True).click()
    expect(page.locator(".toast-body").last).to_contain_text("newcomer")
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()


def test_a_batch_is_imported_changed_ranked_twice_and_exported_as_one_row_per_item(server, browser, tmp_path):
    path, _ = tmp_path / "from the page.jsonl", [server.user_id(name) for name in ("twice-ann", "twice-bob")]
    write_rows(path, (row for _, row in rank_rows(3)))
    page = server.lead_page(browser, "office")
    panel = open_tab(page, "Import")
    panel.locator('input[type="file"]').first.set_input_files(path)
    panel.get_by_role("button", name="Import", exact=True).click()  # under the name of the file
    expect(panel.get_by_text("Imported 3 items.")).to_be_visible()

    panel = open_tab(page, "Batches")
    panel.locator('[data-key="from the page"] button').click()
    expect(panel.get_by_label("Name", exact=True)).to_have_value("from the page")  # its own settings fill the fields
    panel.get_by_label("Labelers per item").fill("2")
    panel.get_by_label("Priority (higher first)").fill("7")
    panel.get_by_label("Name", exact=True).fill("ranked by two")
    for name in ("twice-ann", "twice-bob"):
        choose(panel, "Assigned labelers (empty: all)", name)
    page.keyboard.press("Escape")
    panel.get_by_role("button", name="Save", exact=True).click()
    expect(panel.locator('[data-key="ranked by two"]')).to_be_visible()
    (batch,) = stored(server.database, select(Batch).where(Batch.name == "ranked by two"))
    saved = read(server.database, stored_settings, batch)
    assert saved == BatchSettings("ranked by two", 2, 7, True, ("twice-ann", "twice-bob"))

    for name, ranks in (("twice-ann", [1, 2, 3, 4]), ("twice-bob", [1, 3, 2, 4])):
        server.rank(name, ranks, ranks, ranks)

    panel = open_tab(page, "Export")
    choose(panel, "Batches (empty: all)", "ranked by two")
    page.keyboard.press("Escape")
    panel.get_by_label("One row per item (aggregated)").check()
    panel.get_by_label("Add preference probabilities").check()
    since = panel.get_by_label("Judged since (UTC)")
    box = since.bounding_box()
    assert box["x"] + box["width"] <= 1280  # all of it is seen
    since.fill("yesterday")
    panel.get_by_role("button", name="Export", exact=True).click()
    expect(page.locator(".toast-body")).to_contain_text("yesterday")
    since.fill("2026-01-31")
    panel.get_by_role("button", name="Export", exact=True).click()
    link = panel.locator('a[href*="rankings-"][download]').first
    expect(link).to_be_visible()
    with page.expect_download() as download:
        link.click()
    rows = read_rows(Path(download.value.path()))
    assert [row["prompt"] for row in rows] == ["Prompt 0", "Prompt 1", "Prompt 2"]
    # Both put the first before the middle two, which they order differently, and those before the last.
    assert [row["ranks"] for row in rows] == [[1, 2, 2, 3]] * 3
    assert all(len(row["preferences"]) == 4 and row["preferences"][0][3] > 0.5 for row in rows)


def open_batch(page, batch):
    panel = open_tab(page, "Batches")
    panel.locator(f'[data-key="{batch}"] button').click()
    expect(panel.get_by_label("Name", exact=True)).to_have_value(batch)
    return panel


def save_batch(panel, label, value):
    panel.get_by_label(label).fill(value)
    panel.get_by_role("button", name="Save", exact=True).click()


def test_settings_that_another_lead_has_changed_are_told_and_shown(server, browser):
    batch = server.add_batch(2)
    one, two = server.lead_page(browser, "lead-one"), server.lead_page(browser, "lead-two")
    first, second = open_batch(one, batch), open_batch(two, batch)
    save_batch(first, "Priority (higher first)", "5")
    expect(first.get_by_text("Saved.")).to_be_visible()
    save_batch(second, "Labelers per item", "2")
    expect(two.locator(".toast-body").last).to_contain_text("another lead")
    second.locator(f'[data-key="{batch}"] button').click()
    expect(second.get_by_label("Priority (higher first)")).to_have_value("5")
    save_batch(second, "Labelers per item", "2")
    expect(second.get_by_text("Saved.")).to_be_visible()
    (now,) = stored(server.database, select(Batch).where(Batch.name == batch))
    assert (now.labelers_per_item, now.priority) == (2, 5)


def test_guidelines_of_another_lead_are_told_and_an_unsaved_text_stays(server, browser):
    one, two = server.lead_page(browser, "lead-one"), server.lead_page(browser, "lead-two")
    panels = [open_tab(page, "Rules and guidelines") for page in (one, two)]
    for panel in panels:
        choose(panel, "Task", "Probe a model")
        expect(panel.get_by_label("Guidelines (Markdown)")).to_have_value(re.compile("^# Probing"))  # the draft of this task
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
    expect(two.locator(".toast-body").last).to_contain_text("another lead")
    panels[1].locator('[data-key="1"] button').click()
    expect(editors[1]).to_have_value("Of the first.")
    editors[1].fill("Of both.")
    saves[1].click()
    expect(panels[1].locator('[data-key="2"]')).to_contain_text("lead-two")


def test_a_click_acts_on_the_row_and_only_the_fields_of_the_records_are_shown(server, browser):
    batch = server.add_batch(1, labelers_per_item=2)
    server.rank("row-ann", [1, 2, 3, 4])
    server.rank("row-bob", [4, 3, 2, 1])
    page = server.lead_page(browser, "lead-rows")
    panel = open_tab(page, "Users")
    expect(panel.get_by_role("button", name="Deactivate", exact=True)).to_be_hidden()  # nobody is chosen
    panel.locator('[data-key="row-ann"] button').click()
    expect(panel.get_by_role("button", name="Deactivate", exact=True)).to_be_visible()
    panel = open_tab(page, "Batches")
    expect(panel.get_by_role("button", name="Save", exact=True)).to_be_hidden()
    panel.locator(f'[data-key="{batch}"] button').click()
    expect(panel.get_by_label("Selected batch")).to_have_value(batch)
    panel = open_tab(page, "Labelers")
    cells = panel.locator('[data-key="row-ann"] td')
    expect(cells.first).to_be_visible()
    head = panel.locator("#labelers thead th").all_inner_texts()
    expect(cells.nth(head.index("95 % interval"))).to_have_text(re.compile(r"^0\.\d\d–[01]\.\d\d$"))

    panel = open_tab(page, "Export")
    labels = {
        "rankings": ["One row per item (aggregated)", "Include items with known answers"],
        "demonstrations": ["One row per item (aggregated)", "Include items with known answers"],
        "skips": [],
    }
    for record, wanted in labels.items():
        if record != "rankings":
            choose(panel, "Records", record)
        for label in labels["rankings"]:
            field = panel.get_by_label(re.compile(re.escape(label)))
            expect(field).to_be_visible() if label in wanted else expect(field).to_be_hidden()
    choose(panel, "Records", "rankings")
    expect(panel.get_by_label("Add preference probabilities")).to_be_hidden()
    panel.get_by_label("One row per item (aggregated)").check()
    expect(panel.get_by_label("Add preference probabilities")).to_be_visible()

    panel = open_tab(page, "Disagreements")
    row = panel.locator("[data-key]", has_text="Prompt 0").last
    number = row.get_attribute("data-key")
    row.locator("button").click()
    page.wait_for_url(re.compile("decide"))
    expect(page.locator(".decision")).to_contain_text(f"item {number}")
    expect(page.locator(".others")).to_contain_text("A")
