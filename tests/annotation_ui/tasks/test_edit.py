import random
import re
from html import unescape

import pytest
from hypothesis import given
from hypothesis import strategies as st
from playwright.sync_api import expect

from annotation_ui.lead_tabs.items import difference_html
from annotation_ui.reports.export import Selection, rows_to_export
from annotation_ui.tasks import TASKS, BadInputError
from tests.annotation_ui.conftest import in_pairs
from tests.annotation_ui.pages import (
    LOW_CONTRAST,
    choose,
    drag_order,
    handed_in,
    open_tab,
    open_task,
    press,
    shown_texts,
    submit,
    type_order,
)
from tests.annotation_ui.running import Client

BOTH = in_pairs(("sqlite", "mouse"), ("postgresql", "keyboard"))
ORIGINAL = "Paris is the capital of Spain.\n\nIt is **old**."
CORRECTED = "Madrid is the capital of Spain.\n\nIt is **old**."
CONTENT = {"prompt": "Which city?", "response": ORIGINAL}


def export(server, record, batch):
    rows = rows_to_export(server.database, Selection(record, batches=(batch,)))
    return [{field: value for field, value in row.items() if field not in ("labeler", "id")} for row in rows]


@BOTH
def test_a_correction_is_a_demonstration_and_a_pair(any_server, browser, how):
    row = {"prompt": "Which city?", "responses": [ORIGINAL, "I do not know."], "model": ["a", "b"], "id": "city"}
    batch = any_server.add_batch([("t:1", row)], "edit")
    page = open_task(any_server, browser, f"edit-{how}", "edit")
    expect(page.locator("textarea")).to_have_value(ORIGINAL)
    expect(page.locator(".problem")).to_have_text(re.compile("accept it"))
    if how == "mouse":
        page.locator("textarea").fill(CORRECTED)
    else:
        press(page, "e", "Control+Home", "Delete", "Delete", "Delete", "Delete", "Delete")
        page.keyboard.type("Madrid")
    expect(page.locator(".difference del")).to_have_text("Paris")
    expect(page.locator(".difference ins")).to_have_text("Madrid")
    expect(page.locator(".saved")).to_have_text("Saved")
    page.reload()
    expect(page.locator("textarea")).to_have_value(CORRECTED)
    if how == "mouse":
        page.click('[data-action="original"]')
        expect(page.locator("textarea")).to_have_value(ORIGINAL)
        page.click('[data-action="undo"]')
        expect(page.locator(".difference ins")).to_have_text("Madrid")
        handed_in(page, how)
        page.click('[data-action="accept"]')
        page.click('[data-action="submit"]')
    else:
        press(page, "o", "u")
        handed_in(page, how)
        expect(page.locator("textarea")).to_have_value("I do not know.")
        press(page, "a", "Enter")
    expect(page.locator(".count")).to_have_text("2 done")
    assert export(any_server, "demonstrations", batch) == [
        {"prompt": "Which city?", "completion": CORRECTED},
        {"prompt": "Which city?", "completion": "I do not know."},
    ]
    assert export(any_server, "pairs", batch) == [{"prompt": "Which city?", "chosen": CORRECTED, "rejected": ORIGINAL}]


@BOTH
def test_none_is_good_so_a_better_one_is_written_while_ranking(any_server, browser, how):
    batch = any_server.add_batch(1)
    page = open_task(any_server, browser, f"better-{how}", "rank")
    texts = shown_texts(page)
    order = [2, 3, 1, 2]
    if how == "mouse":
        drag_order(page, order)
        page.click('[data-card="2"] h3')
        page.click('[data-action="better"]')
        page.locator(".better textarea").fill(f"{texts[2]}, better")
    else:
        type_order(page, order)
        press(page, "ArrowLeft", "e")
        expect(page.locator(".better textarea")).to_have_value(texts[2])
        expect(page.locator(".problem")).to_contain_text("response C")
        press(page, "Control+End")
        page.keyboard.type(", better")
    expect(page.locator(".difference ins")).to_have_text(", better")
    press(page, "Escape")
    if how == "mouse":
        page.click('[data-action="remove-better"]')
        expect(page.locator(".better")).to_be_hidden()
        press(page, "u")
    submit(page, 1)
    better = f"{texts[2]}, better"
    assert export(any_server, "demonstrations", batch) == [{"prompt": "Prompt 0", "completion": better}]
    pairs = export(any_server, "pairs", batch)
    assert [pair["rejected"] for pair in pairs if pair["chosen"] == better] == [f"Response 0.{n}" for n in range(4)]
    assert len(pairs) == 5 + 4
    (ranking,) = export(any_server, "rankings", batch)
    assert "better" not in ranking
    press(page, "u")  # opened again with the text
    expect(page.locator(".better textarea")).to_have_value(better)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"completion": " ", "outcome": "corrected"}, "completion: is empty"),
        ({"completion": ORIGINAL, "outcome": "corrected"}, "outcome: must be accepted for this completion"),
        ({"completion": CORRECTED, "outcome": "accepted"}, "outcome: must be corrected for this completion"),
        ({"completion": CORRECTED}, "outcome: must be corrected for this completion"),
    ],
)
def test_an_answer_that_does_not_fit_is_refused(answer, says):
    with pytest.raises(BadInputError, match=says):
        TASKS["edit"].check(answer, CONTENT, [])


def test_two_labelers_better_answers_are_both_exported_with_the_aggregated_order():
    rank = TASKS["rank"]
    content = {"prompt": "p", "responses": ["a", "b"]}
    answers = [rank.check({"ranks": [1, 2], "better": better}, content, []) for better in ("c", "d", "c", "")]
    (row,) = rank.rows(content, rank.combine(answers))
    assert [each["completion"] for each in rank.records["demonstrations"]([row])] == ["c", "d"]
    assert [(each["chosen"], each["rejected"]) for each in rank.records["pairs"]([row])] == [
        ("a", "b"), ("c", "a"), ("c", "b"), ("d", "a"), ("d", "b"),
    ]  # fmt: skip
    with pytest.raises(BadInputError, match="better: "):
        rank.check({"ranks": [1, 2], "better": "b"}, content, [])


def test_line_ends_alone_make_no_correction():
    edit, rank = TASKS["edit"], TASKS["rank"]
    (content,) = edit.contents({"prompt": "p", "response": "one\r\ntwo\rthree"}, {}, [])
    assert content["response"] == "one\ntwo\nthree"
    old = {"prompt": "p", "response": "one\r\ntwo"}  # as stored before
    for completion in ("one\ntwo", "one\r\ntwo"):
        answer = edit.check({"completion": completion, "outcome": "accepted"}, old, [])
        assert not list(edit.records["pairs"](edit.rows(old, answer)))
    with pytest.raises(BadInputError, match="better: "):
        rank.check({"ranks": [1, 2], "better": "a\nb"}, {"prompt": "p", "responses": ["a\r\nb", "c"]}, [])


def test_the_changes_on_the_page_hold_both_texts(server, browser):
    page = server.page(browser, "differ", "/")
    rng = random.Random(2)
    words = ["Paris", "is", "باريس", "it's", " ", "\n", "👍", ".", "old"]
    pairs = [["", "a"], ["a b", "a b"], ["a " * 3000, "b " * 3000]]
    pairs += [["".join(rng.choices(words, k=rng.randrange(12))) for _ in range(2)] for _ in range(200)]
    script = """async (pairs) => {
      const { difference } = await import("/ui/diff.js");
      return pairs.map(([before, after]) => difference(before, after));
    }"""
    for (before, after), parts in zip(pairs, page.evaluate(script, pairs), strict=True):
        assert "".join(text for kind, text in parts if kind != "added") == before
        assert "".join(text for kind, text in parts if kind != "removed") == after
    assert page.evaluate(script, [["It is old.", "It was old."]]) == [
        [["same", "It "], ["removed", "is"], ["added", "was"], ["same", " old."]]
    ]


def test_a_lead_sees_what_was_changed(server, browser):
    hostile = "<img src=x onerror=window.pwned=1>"
    batch = server.add_batch([("t:1", {**CONTENT, "id": "seen"})], "edit")
    ann = Client(server, server.token("edit-ann"))
    ann.submit({"completion": CORRECTED + hostile, "outcome": "corrected"}, "edit")
    page = server.lead_page(browser, "edit-lead")
    panel = open_tab(page, "Items")
    choose(panel, "Batch", batch)
    expect(panel.locator("[data-key]")).to_have_count(1)
    panel.locator("[data-key] button").click()
    changes = page.locator("#one-item .changes")
    expect(changes.locator("del")).to_have_text("Paris")
    expect(changes.locator("ins")).to_have_text(["Madrid", hostile])
    assert page.evaluate(LOW_CONTRAST, "#one-item") == []
    assert page.evaluate("window.pwned") is None


@given(st.text(alphabet="ab <&\n", max_size=30), st.text(alphabet="ab <&\n", max_size=30))
def test_a_difference_holds_both_texts(before, after):
    html = difference_html(before, after)
    assert unescape(re.sub("<ins>[^<]*</ins>|</?del>", "", html)) == before
    assert unescape(re.sub("<del>[^<]*</del>|</?ins>", "", html)) == after


def test_the_difference_of_long_texts_is_not_searched():
    assert difference_html("a " * 3000, "b") == f"<del>{'a ' * 3000}</del><ins>b</ins>"
