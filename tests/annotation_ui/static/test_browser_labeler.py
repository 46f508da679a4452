import pytest
from playwright.sync_api import expect

from annotation_ui.reports.export import Selection, rows_to_export
from tests.annotation_ui.pages import Held, exported, open_task, press
from tests.annotation_ui.running import rank_rows

CODE = "```python\n" + "x = call(" + ", ".join(f"argument_{i}=value_{i}" for i in range(60)) + ")\n```"
WRITTEN = ["old pond\na frog leaps in\nwater's sound", "![a pond](http://x/pond.png)", "[1]: http://example.com",
           "5*6*7 = 210", "1) one\n3) three", "```name", "***", CODE, ""]  # fmt: skip
SEEN = """() => [...document.querySelectorAll('.card .markdown')].map((each) => each.innerText)"""
MARKS = """() => [...document.querySelectorAll('.card li')].map((each) => getComputedStyle(each, '::marker').content)"""
# Of each number of a list: its width with the space behind it, and the room before the text; nothing is seen beyond.
ROOM_FOR_NUMBERS = """() => [...document.querySelectorAll('.card li')].map((each) => {
  const paint = document.createElement('canvas').getContext('2d');
  paint.font = getComputedStyle(each).font;
  const { mark } = each.dataset;
  const room = each.getBoundingClientRect().left - each.closest('.markdown').getBoundingClientRect().left;
  return [mark, paint.measureText(mark + '\u00a0').width, room];
})"""
# The page is as wide as the screen; the board lies beside the cards; no card is squeezed.
LAYOUT = """() => {
  const box = (each) => each.getBoundingClientRect();
  const cards = [...document.querySelectorAll('.card')].map(box);
  const side = document.querySelector('.side') ? box(document.querySelector('.side')) : null;
  return { overflow: document.querySelector('.workbench').scrollWidth - innerWidth,
    widest: Math.max(...cards.map((each) => each.width)), narrowest: Math.min(...cards.map((each) => each.width)),
    covered: Boolean(side) &&
      cards.some((each) => each.right > side.left && each.bottom > side.top && each.top < side.bottom) };
}"""
# What of the focused element lies behind the bars at the top and the bottom.
HIDDEN = """() => {
  const at = document.activeElement, task = at.closest('.task');
  if (!task) return '';
  const { top, bottom } = at.getBoundingClientRect();
  const above = document.querySelector('.top').getBoundingClientRect().bottom;
  const below = document.querySelector('.actions').getBoundingClientRect().top;
  const fits = bottom - top < below - above && at.tagName !== 'TEXTAREA'; // of a text, the line that is written
  return (fits ? top < above - 1 || bottom > below + 1 : top > below - 40) ? at.outerHTML.slice(0, 120) : '';
}"""


def test_texts_and_layout(server, browser):
    server.add_batch([("t", {"prompt": "A\nB", "responses": WRITTEN})], labelers_per_item=2)
    server.add_batch([("t", {"prompt": CODE, "responses": [CODE, "short"]})], "compare", labelers_per_item=2)
    page = open_task(server, browser, "reader", "rank", color_scheme="light")
    seen = [text.strip() for text in page.evaluate(SEEN)]
    assert sorted(seen) == sorted(["old pond\na frog leaps in\nwater's sound", "![a pond](http://x/pond.png)",
                                   "[1]: http://example.com", "5*6*7 = 210", "one\nthree", "name", "***",
                                   CODE.replace("```python", "python").removesuffix("\n```"), "(empty answer)"])  # fmt: skip
    assert [mark.replace("\u00a0", "").strip('" ').replace('" "', "") for mark in page.evaluate(MARKS)] == ["1)", "3)"]
    press(page, "r")
    raw = sorted([*WRITTEN[:-1], "(empty answer)"])  # there are no characters to show
    assert sorted(page.evaluate(SEEN)) == raw
    page.reload()
    page.wait_for_selector(".card")
    assert sorted(page.evaluate(SEEN)) == raw
    expect(page.locator('[data-action="raw"]')).to_have_attribute("aria-pressed", "true")
    page.click('[data-action="raw"]')
    page.click('[data-card="0"] summary')
    page.check('[data-card="0"] [data-flag="sexual"]')
    box = page.locator('[data-card="0"] [data-flag="sexual"]')
    assert box.evaluate("(each) => getComputedStyle(each).appearance") == "auto"  # the browser's own tick
    phone = server.page(browser, "reader-on-a-phone", viewport={"width": 390, "height": 844})
    for each, width in ((page, 1280), (phone, 390)):
        for task in ("rank", "compare"):
            each.goto(f"/?task={task}")
            each.wait_for_selector(".card")
            layout = each.evaluate(LAYOUT)
            assert layout["overflow"] <= 0, (task, width)
            assert not layout["covered"], (task, width)
            assert layout["narrowest"] == pytest.approx(layout["widest"], abs=1), (task, width)
        each.context.close()


def test_a_long_status_makes_no_second_line(server, browser):
    server.add_batch(1)
    page = open_task(server, browser, "a-name-of-some-length", "rank", viewport={"width": 1366, "height": 768})
    height = page.locator(".top").bounding_box()["height"]
    page.evaluate("document.querySelector('.saved').textContent = 'Server unavailable. Retrying…'.repeat(3)")
    assert page.locator(".top").bounding_box()["height"] == height
    expect(page.locator(".menu summary")).to_be_in_viewport(ratio=1)
    assert page.evaluate("document.querySelector('.workbench').scrollWidth") <= 1366


def test_the_open_task_and_the_choice_are_in_sight_beside_many_tasks_and_long_texts(server, browser):
    row = {"prompt": "Q", "response": "a"}
    for task in ("edit", "spans", "demonstrate"):
        server.add_batch([("t", row)], task)
    for task, of_rule in (("rules", row), ("probe", {"rule": "no-threats"})):
        server.add_batch([("t", of_rule)], task, rule_set="sparrow-dialogue")
    server.add_batch(1)
    server.add_batch(
        [("t", {"prompt": "Q", "responses": ["[a](http://example.com). " + "long text " * 900, "b"]})], "compare"
    )
    page = open_task(server, browser, "judge-of-all", "compare", viewport={"width": 1280, "height": 800})
    expect(page.locator(".left")).to_have_text("1 of 1 left")  # which takes room from the tabs
    expect(page.locator('[aria-current="page"]')).to_be_in_viewport(ratio=0.99)
    press(page, "t")
    expect(page.locator(".problem")).to_have_text("Tie")
    assert (
        page.locator(".card a").evaluate("(each) => getComputedStyle(each).paddingLeft") == "0px"
    )  # it is a part of the text


def test_nine_places_stand_in_one_line_of_a_phone_and_the_menu_on_the_screen(server, browser):
    texts = ["مرحبا\n\n> اقتباس", *map(str, range(8))]
    server.add_batch([("t", {"prompt": "Q", "responses": texts})])
    page = open_task(server, browser, "nine", "rank", viewport={"width": 375, "height": 720})
    places = page.locator('[data-card="0"] .places button').evaluate_all("(all) => all.map((each) => each.offsetTop)")
    assert len(places) == 9
    assert len(set(places)) == 1
    sides = "(each) => [getComputedStyle(each).borderLeftWidth, getComputedStyle(each).borderRightWidth]"
    assert page.locator("blockquote").evaluate(sides) == ["0px", "3px"]
    page.click(".menu summary")
    expect(page.locator(".menu-list")).to_be_in_viewport(ratio=1)


def test_every_digit_of_a_lists_numbers_is_seen(server, browser):
    lists = ["9. a\n10. b\n11. c", "100. a", "2024. a", "123456789) a"]
    server.add_batch([("t", {"prompt": "Q", "responses": lists})])
    page = open_task(server, browser, "counter", "rank")
    widths = page.evaluate(ROOM_FOR_NUMBERS)
    assert len(widths) == 6
    for mark, needed, room in widths:
        assert needed <= room, mark


def test_enter_submits_after_every_click(server, browser):
    rank, compare = server.add_batch(2), server.add_batch([("t", {"prompt": "Q", "responses": ["a", "b"]})], "compare")
    rules = server.add_batch(
        [("t", {"prompt": "Q", "response": "a", "rules": ["no-threats"]})], "rules", rule_set="sparrow-dialogue"
    )
    page = open_task(server, browser, "enter", "rank")
    for number, last in enumerate(('[aria-label="Quality 6 of 7"]', '[data-flag="violent"]'), 1):
        for index in range(4):
            page.click(f'[data-card="{index}"] [aria-label="Rank {index + 1}"]')
        if number == 2:
            page.click('[data-card="3"] summary')
        page.click(f'[data-card="3"] {last}')
        press(page, "Enter")
        expect(page.locator(".count")).to_have_text(f"{number} done")
    rows = exported(server, rank)
    assert sorted(rows[0]["some_rated"], key=str) == [6, None, None, None]
    assert sorted(rows[1]["flags"]) == [[], [], [], ["violent"]]
    page.click('[data-task="compare"]')
    page.click('[data-choice="tie"]')
    press(page, "Enter")
    expect(page.locator(".count")).to_have_text("1 done")
    page.click('[data-task="rules"]')
    page.click('[data-verdict="violates"]')
    page.click(".rule .note")
    page.keyboard.type("it does")
    press(page, "Enter")
    expect(page.locator(".count")).to_have_text("1 done")
    (row,) = rows_to_export(server.database, Selection("rule_judgments", batches=(rules,)))
    assert (row["verdict"], row["note"]) == ("violates", "it does")
    (row,) = rows_to_export(server.database, Selection("rankings", batches=(compare,)))
    assert row["ranks"] == [1, 1]


@pytest.mark.parametrize(("width", "height"), [pytest.param(1000, 620, marks=pytest.mark.slow), (390, 640)])
def test_focus_is_never_hidden_behind_the_bars(server, browser, width, height):
    long = [f"{k} " + "long text " * 150 for k in range(4)]
    server.add_batch([("t", {"prompt": "Q", "responses": long})], labelers_per_item=2)
    server.add_batch([("t", {"prompt": "Q", "responses": long[:2]})], "compare", labelers_per_item=2)
    server.add_batch([("t", {"prompt": long[0]})], "demonstrate", labelers_per_item=2)
    server.add_batch(
        [("t", {"prompt": "Q", "response": long[0]})], "rules", rule_set="sparrow-dialogue", labelers_per_item=2
    )
    page = server.page(browser, f"tabber-{width}", viewport={"width": width, "height": height})
    for task, least in (("rank", 15), ("compare", 2), ("demonstrate", 0), ("rules", 15)):
        page.goto(f"/?task={task}")
        page.wait_for_selector(".task *")
        for key in ("Tab", "Shift+Tab"):
            if key == "Shift+Tab":
                page.focus('[data-action="undo"]')
            press(page, key)
            stops = 0
            while page.evaluate("document.activeElement.closest('.task') !== null") and stops < 150:
                assert page.evaluate(HIDDEN) == "", (task, key)
                press(page, key)
                stops += 1
            assert least <= stops < 150, (task, key)


def test_radio_groups_have_arrow_keys(server, browser):
    server.add_batch([("t", {"prompt": "Q", "response": "a"})], "rules", rule_set="sparrow-dialogue")
    page = server.page(browser, "arrows", "/?task=rules")
    page.locator('[data-rule="no-threats"] [data-verdict="violates"]').focus()
    press(page, "ArrowRight")
    chosen = page.locator('[data-rule="no-threats"] [data-verdict="unsure"]')
    expect(chosen).to_be_focused()
    expect(chosen).to_have_attribute("aria-checked", "true")
    press(page, "ArrowLeft", "ArrowLeft")
    expect(page.locator('[data-rule="no-threats"] [data-verdict="follows"]')).to_have_attribute("aria-checked", "true")
    assert page.locator('[data-rule="no-threats"] [tabindex="0"][role="radio"]').count() == 1


def test_keys_counts_comment_skip_and_keys_typed_ahead(server, browser):
    batch = server.add_batch(rank_rows(4, ids="busy"))
    page = open_task(server, browser, "busy", "rank")
    expect(page.locator(".left")).to_have_text("4 of 4 left")
    press(page, *"1234", "q", "5", "f", "b", "c", "f", "ArrowRight", "q", "2", "q", "0", "c")
    page.keyboard.type("close call")
    press(page, "Escape")
    held = Held(page, "**/next")
    press(page, "Enter", "r", *"4321", "Enter")
    held.go_on()
    expect(page.locator(".left")).to_have_text("3 of 4 left")
    expect(page.locator(".today")).to_have_text("1 today")
    badges = page.locator(".rank-badge").all_inner_texts()
    assert badges == ["4", "3", "2", "1"]  # typed ahead; an Enter typed ahead decides nothing
    expect(page.locator(".problem")).to_have_text("D > C > B > A")
    expect(page.locator('[data-action="raw"]')).to_have_attribute("aria-pressed", "true")  # typed ahead, too
    (row,) = exported(server, batch)
    assert (sorted(row["some_rated"], key=str), row["comment"]) == ([5, None, None, None], "close call")
    assert sorted(row["flags"]) == [[], [], [], ["hallucination", "unfit_for_assistant"]]
    for keys, reason in (("s2", "I don't know enough about the topic"), ("ss", ""), ("sx", "mine")):
        prompt = page.locator(".conversation").inner_text()
        press(page, keys[0])
        page.wait_for_selector("dialog[open] .skip")
        if keys == "sx":
            page.locator(".skip input").fill("mine")
            press(page, "Enter")
        else:
            press(page, keys[1])
        expect(page.locator(".stage")).not_to_contain_text(prompt.split("\n")[-1])
        skips = rows_to_export(server.database, Selection("skips", batches=(batch,)))
        assert skips[-1]["reason"] == reason
    assert [(row["task"], row["id"]) for row in skips] == [("rank", f"busy-{number}") for number in (1, 2, 3)]
    expect(page.locator(".left")).to_have_text("0 of 1 left")
    press(page, "u")  # a skip that is taken back is no skip
    page.wait_for_selector(".card")
    assert len(rows_to_export(server.database, Selection("skips", batches=(batch,)))) == 2


def test_keys_typed_ahead_are_the_first_letters_of_the_next_text(server, browser):
    server.add_batch([("t", {"prompt": f"Q{n}"}) for n in range(2)], "demonstrate")
    page = open_task(server, browser, "hasty", "demonstrate")
    page.keyboard.type("One.")
    held = Held(page, "**/next")
    press(page, "Control+Enter", *"Was it us?")
    held.go_on()
    expect(page.locator(".conversation")).to_contain_text("Q1")
    expect(page.locator("textarea")).to_have_value("Was it us?")


def test_the_back_button_stays_in_the_app(server, browser):
    server.add_batch(1)
    server.add_batch([("t", {"prompt": "Q", "responses": ["a", "b"]})], "compare")
    page = open_task(server, browser, "walker", "rank")
    page.click('[data-task="compare"]')
    page.wait_for_selector(".choices")
    press(page, "w")
    page.wait_for_selector(".my-work")
    page.go_back()
    page.wait_for_selector(".choices")
    page.go_back()
    page.wait_for_selector(".places")
    page.go_forward()
    page.wait_for_selector(".choices")
    assert page.url.endswith("/?task=compare")
