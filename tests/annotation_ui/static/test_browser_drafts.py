import re

import pytest
from playwright.sync_api import expect
from sqlalchemy import delete, select

from annotation_ui.reports.export import Selection, rows_to_export
from annotation_ui.server.auth import Auth
from annotation_ui.store.schema import Assignment, Batch, Item, Judgment, SignIn
from tests.annotation_ui.pages import Held, exported, open_task
from tests.annotation_ui.running import do, stored

PASSWORD = "correct horse battery"


def end_session(server, name):
    number = server.user_id(name)
    with server.database.write() as session:
        session.execute(delete(SignIn).where(SignIn.user_id == number))


def stored_text(server, name):
    mine = select(Assignment.draft).where(Assignment.user_id == server.user_id(name), Assignment.state == "leased")
    (draft,) = stored(server.database, mine)
    return draft["state"]["completion"] if draft else ""


def test_a_text_outlives_the_end_of_the_session(server, browser):
    server.add_batch([("t", {"prompt": "Q"})], "demonstrate")
    server.token("writer")
    Auth(server.database).set_password("writer", PASSWORD)
    page = open_task(server, browser, "writer", "demonstrate")
    page.keyboard.type("one")
    expect(page.locator(".saved")).to_have_text("Saved")
    end_session(server, "writer")
    page.keyboard.type(" two")
    dialog = page.locator(".sign-in")
    expect(dialog).to_be_visible()
    page.keyboard.press("Escape")  # does not lose it
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


def test_a_page_whose_session_has_ended_can_be_left(server, browser):
    server.add_batch(1)
    page = open_task(server, browser, "leaving", "rank")
    end_session(server, "leaving")
    page.keyboard.press("1")
    page.get_by_role("link", name="Use another account").click()
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()


def test_a_reload_and_another_task_lose_no_active_time(server, browser):
    server.add_batch([("t", {"prompt": "Q", "responses": ["a", "b"]})], "compare")
    batch = server.add_batch([("t", {"prompt": "Q"})], "demonstrate")
    page = open_task(server, browser, "timed", "demonstrate")
    page.wait_for_function(
        "() => Object.values(sessionStorage).some((each) => Number(each) >= 3)"
    )  # reads, and changes nothing
    page.click('[data-task="compare"]')
    page.wait_for_selector(".choices")
    page.click('[data-task="demonstrate"]')
    page.wait_for_selector("textarea")
    page.reload()
    page.locator("textarea").press_sequentially("text")
    page.keyboard.press("Control+Enter")
    expect(page.locator(".count")).to_have_text("1 done")
    times = select(Judgment.seconds).join(Item, Item.id == Judgment.item_id).join(Batch).where(Batch.name == batch)
    assert stored(server.database, times)[0] >= 3


def test_a_second_window_says_what_is_saved(server, browser):
    server.add_batch([("t", {"prompt": "Q"})], "demonstrate")
    one, two = (open_task(server, browser, "twice", "demonstrate") for _ in range(2))
    one.keyboard.type("first")
    expect(one.locator(".saved")).to_have_text("Saved")
    two.keyboard.type("second")
    expect(two.locator(".saved")).to_have_text("Not saved")
    expect(two.locator(".notice.urgent")).to_contain_text("another window")
    two.keyboard.press("Control+Enter")  # submits neither of the two versions
    expect(two.locator(".toast")).to_contain_text("choose above")
    assert stored_text(server, "twice") == "first"
    two.click('[data-action="take-over"]')
    expect(two.locator(".saved")).to_have_text("Saved")
    expect(two.locator(".notice.urgent")).to_have_count(0)
    assert stored_text(server, "twice") == "second"
    one.keyboard.type(" more")
    expect(one.locator(".saved")).to_have_text("Not saved")
    one.click('[data-action="load"]')
    expect(one.locator("textarea")).to_have_value("second")


def test_a_window_that_goes_on_can_be_submitted_at_once_however_slow_the_server_is(server, browser):
    batch = server.add_batch([("t", {"prompt": "Q", "responses": ["a", "b"]})], "compare")
    one, two = (open_task(server, browser, "impatient", "compare") for _ in range(2))
    one.keyboard.press("1")
    expect(one.locator(".saved")).to_have_text("Saved")
    two.keyboard.press("t")
    expect(two.locator(".notice.urgent")).to_be_visible()
    held = Held(two, "**/draft")
    two.dblclick('[data-action="take-over"]')
    two.keyboard.press("Enter")
    held.go_on()
    expect(two.locator(".count")).to_have_text("1 done")
    assert [row["ranks"] for row in exported(server, batch)] == [[1, 1]]


def test_a_text_written_after_another_window_submitted_is_kept_and_can_be_used(server, browser):
    batch = server.add_batch([("t", {"prompt": f"Q{n}"}) for n in range(2)], "demonstrate")
    one, two = (open_task(server, browser, "both", "demonstrate") for _ in range(2))
    two.keyboard.type("short")
    two.keyboard.press("Control+Enter")
    expect(two.locator(".conversation")).to_contain_text("Q1")
    one.keyboard.type("a much longer text")
    notice = one.locator(".notice.urgent")
    expect(notice).to_have_attribute("data-kind", "submitted")
    expect(one.locator("textarea")).to_have_value("a much longer text")
    one.keyboard.press("Control+Enter")
    expect(one.locator(".toast")).to_contain_text("choose above")
    one.click('[data-action="change"]')
    expect(one.locator(".notice.changing")).to_be_visible()
    expect(one.locator("textarea")).to_have_value("a much longer text")
    expect(one.locator(".saved")).to_have_text("Saved")
    one.locator("textarea").press("Control+Enter")
    one.wait_for_selector(".work-row")
    rows = rows_to_export(server.database, Selection("demonstrations", batches=(batch,)))
    assert [row["completion"] for row in rows] == ["a much longer text"]


def test_a_submit_that_comes_second_loses_nothing_either(server, browser):
    server.add_batch([("t", {"prompt": f"Q{n}"}) for n in range(2)], "demonstrate")
    one, two = (open_task(server, browser, "race", "demonstrate") for _ in range(2))
    one.route("**/draft", lambda route: None)  # the connection hangs
    one.keyboard.type("slow")
    two.keyboard.type("quick")
    two.keyboard.press("Control+Enter")
    expect(two.locator(".conversation")).to_contain_text("Q1")
    one.unroute("**/draft")
    one.reload()  # an untouched window goes to the next item by itself
    expect(one.locator(".conversation")).to_contain_text("Q1")
    expect(one.locator(".notice.urgent")).to_have_count(0)


def test_a_lease_that_is_over_is_said_aloud(server, browser):
    server.add_batch([("t", {"prompt": "Q"})], "demonstrate")
    page = open_task(server, browser, "slow", "demonstrate")
    judgments, slow, other = server.judgments, server.user_id("slow"), server.user_id("other")
    with server.database.write() as session:
        session.scalars(select(Assignment).where(Assignment.user_id == slow)).one().expires_at = 0
    taken = judgments.leases.next(other, "demonstrate")
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # as after a look at another program
    notice = page.locator(".notice.urgent")
    expect(notice).to_have_attribute("data-kind", "lost")
    page.keyboard.type("in vain")
    expect(page.locator(".saved")).to_have_text("Saved")
    expect(notice).to_be_visible()
    judgments.skip(other, taken.id, "skip-of-other", "", 1.0)
    page.keyboard.type(".")
    expect(notice).to_have_count(0)


def test_a_text_is_saved_while_it_is_written(server, browser):
    """Somebody who never pauses is saved, too: typing goes on until the server has something."""
    server.add_batch([("t", {"prompt": "Q"})], "demonstrate")
    page = open_task(server, browser, "restless", "demonstrate")
    page.evaluate("""() => {
      const text = document.querySelector('textarea');
      window.typing = setInterval(() => { text.value += 'x'; text.dispatchEvent(new Event('input')); }, 50);
    }""")
    for _ in range(600):
        if stored_text(server, "restless"):
            return
        page.wait_for_timeout(100)
    pytest.fail("nothing is stored")


def test_many_long_notes_are_saved(server, browser):
    """A draft carries as many undo steps as the server takes; the page keeps all of them."""
    row = {"prompt": "Q", "response": "A"}
    server.add_batch([("t", row)], "rules", rule_set="sparrow-dialogue")
    page = server.page(browser, "noter", "/?task=rules")
    notes = page.locator(".rule .note")
    expect(notes).to_have_count(23)
    page.evaluate("""() => document.querySelectorAll('.rule .note').forEach((note) => {
      note.value = '好'.repeat(900);
      note.dispatchEvent(new Event('input'));
    })""")
    page.locator(".rule").first.focus()
    for _ in range(23):
        page.keyboard.press("3")
    expect(page.locator(".saved")).to_have_text("Saved")
    expect(page.locator(".toast")).to_be_hidden()
    (draft,) = stored(server.database, select(Assignment.draft).where(Assignment.user_id == server.user_id("noter")))
    assert len(draft["state"]["verdicts"]) == 23
    assert 3 < len(draft["past"]) < 23
    for _ in range(23):
        page.keyboard.press("u")
    expect(page.locator(".problem")).to_have_text("23 of 23 rules to judge")


def test_an_answer_that_is_late_does_not_disturb_the_next_task(server, browser):
    server.add_batch([("t", {"prompt": "Q", "responses": ["a", "b"]})] * 2, "compare")
    server.add_batch([("t", {"prompt": "Q"})], "demonstrate")
    page = open_task(server, browser, "quick", "compare")
    held = Held(page, "**/submit")
    page.keyboard.press("t")
    page.keyboard.press("Enter")
    held.wait()
    page.click('[data-task="demonstrate"]')
    page.wait_for_selector("textarea")
    page.keyboard.type("on")
    with page.expect_response("**/submit"):
        held.go_on()
    page.keyboard.type("ward")
    expect(page.locator("textarea")).to_have_value("onward")
    expect(page.locator(".saved")).to_have_text("Saved")
    assert stored_text(server, "quick") == "onward"


def test_an_answer_that_is_refused_stays_as_it_was(server, browser):
    server.add_batch(2)
    page = open_task(server, browser, "refused", "rank")
    held = Held(page, "**/submit")
    page.keyboard.type("1234")
    page.keyboard.press("Enter")
    held.wait()
    page.keyboard.type("4321")  # for the next item, as the labeler thinks
    held.wait().fulfill(status=422, json={"error": "not like this"})
    expect(page.get_by_text("not like this")).to_be_visible()
    expect(page.locator(".problem")).to_have_text("A > B > C > D")
    page.unroute("**/submit")
    page.keyboard.press("Enter")
    expect(page.locator(".count")).to_have_text("1 done")
    expect(page.locator(".problem")).to_have_text(re.compile("A, B, C, D"))  # those keys were meant for no item


def test_a_key_that_is_held_decides_one_item(server, browser):
    batch = server.add_batch(5)
    page = open_task(server, browser, "holder", "rank")

    def hold(key):
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
    expect(page.locator(".problem")).to_have_text(re.compile("A, B, C, D"))
    expect(page.locator(".count")).to_have_text("2 done")
    page.keyboard.press("u")
    expect(page.locator(".count")).to_have_text("1 done")
    hold("s")  # asks, and skips nothing
    expect(page.locator("dialog[open] .skip")).to_be_visible()
    assert rows_to_export(server.database, Selection("skips", batches=(batch,))) == []
    page.keyboard.press("s")
    expect(page.locator("dialog[open]")).to_have_count(0)


def labeled(server, name, count):
    """A batch of which the labeler has ranked all items but one; returns its name."""
    batch = server.add_batch(count + 1)
    for _ in range(count):
        do(server.judgments, server.user_id(name), "rank", {"ranks": [1, 2, 3, 4]})
    return batch


def open_history(page, how):
    page.goto("/?task=rank")
    page.wait_for_selector(".card")
    page.click('[data-action="history"]') if how == "mouse" else page.keyboard.press("w")
    page.wait_for_selector(".work-row")


def prompts(page):
    return page.locator(".work-prompt").all_inner_texts()


@pytest.mark.parametrize("how", ["mouse", "keyboard"])
def test_an_older_answer_is_found_and_changed(server, browser, how):
    name = f"history-{how}"
    batch = labeled(server, name, 23)
    page = server.page(browser, name)
    open_history(page, how)
    assert prompts(page) == [f"Prompt {i}" for i in range(22, 2, -1)]
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
        page.locator(f'[data-card="{last}"] [aria-label="Rank 3"]').click()
        page.click('[data-action="submit"]')
    else:
        for _ in range(4 - last):  # from the first response to the left
            page.keyboard.press("ArrowLeft")
        page.keyboard.press("t")
        page.keyboard.press("Enter")
    page.wait_for_selector(".work-row")
    assert prompts(page)[0] == "Prompt 1"
    expect(page.locator(".work-row").first).to_contain_text("edited")
    now = {row["prompt"]: row["ranks"] for row in exported(server, batch)}
    assert {prompt: sorted(ranks) for prompt, ranks in now.items() if ranks != [1, 2, 3, 4]} == {"Prompt 1": [1, 2, 3, 3]}


def test_an_answer_that_was_opened_is_kept_as_it_was(server, browser):
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
    kinds = stored(server.database, select(Judgment.kind).order_by(Judgment.id.desc()).limit(2))
    assert kinds == ["submit", "submit"]
