import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from playwright.sync_api import expect

from annotation_ui.reports import overview
from annotation_ui.reports.export import Selection, rows_to_export
from annotation_ui.tasks import TASKS, BadInputError
from annotation_ui.tasks.spans import marked_characters
from tests.annotation_ui.conftest import in_pairs
from tests.annotation_ui.pages import handed_in, open_task, press
from tests.annotation_ui.running import do, read

TYPES = "Irrelevant, Wrong-Grounding, Redundant"
TEXT = "👍 Paris is old. It has 3 rivers. It has 3 rivers."
CONTENT = {"prompt": "p", "response": TEXT, "types": ["Irrelevant", "Wrong-Grounding", "Redundant"]}
# Rows in the layout of QA-Feedback (Wu et al. 2023): errors of the first answer, not in the order of the text.
QA_FEEDBACK = [
    {
        "question": "Where is Łódź?",
        "prediction 1": "Łódź is in Poland. It is a city 🏙️ in Spain. Poland is in Europe.",
        "feedback": {"errors": [
            {"error type": "Redundant", "explanation": "", "start": 45, "end": 65},
            {"error type": "Wrong-Grounding", "explanation": "It is in Poland.", "start": 19, "end": 44},
            {"error type": "Irrelevant", "explanation": "", "start": 25, "end": 31},
        ]},
    },
    {
        "question": "أين باريس؟",
        "prediction 1": "باريس في فرنسا. اسمها Paris منذ 1900.",
        "feedback": {"errors": [{"error type": "Wrong-Grounding", "explanation": "", "start": 28, "end": 36}]},
    },
    {"question": "When?", "prediction 1": "Today.", "feedback": {"errors": []}},
]  # fmt: skip


def row_of(feedback):
    """A row of QA-Feedback as a row to import."""
    spans = [
        {"start": error["start"], "end": error["end"], "type": error["error type"]}
        | ({"note": error["explanation"]} if error["explanation"] else {})
        for error in feedback["feedback"]["errors"]
    ]
    return {"prompt": feedback["question"], "response": feedback["prediction 1"], "spans": spans}


def exported(server, batch, record="spans"):
    return rows_to_export(server.database, Selection(record, batches=(batch,)))


def select_text(page, part, nth=0):
    """Select a part of the response by dragging over it with the mouse."""
    box = page.evaluate(
        """([part, nth]) => {
          const text = document.querySelector('.marked-text');
          const find = (offset) => {
            const walker = document.createTreeWalker(text, NodeFilter.SHOW_TEXT);
            for (let node = walker.nextNode(); node; node = walker.nextNode()) {
              if (offset <= node.length) return [node, offset];
              offset -= node.length;
            }
          };
          let start = -1;
          for (let count = 0; count <= nth; count += 1) start = text.textContent.indexOf(part, start + 1);
          const range = document.createRange();
          range.setStart(...find(start));
          range.setEnd(...find(start + part.length));
          const boxes = [...range.getClientRects()];
          return [boxes[0].left, boxes[0].top, boxes.at(-1).right, boxes.at(-1).bottom];
        }""",
        [part, nth],
    )
    page.mouse.move(box[0] + 0.5, (box[1] + box[3]) / 2)
    page.mouse.down()
    page.mouse.move(box[2] - 0.5, (box[1] + box[3]) / 2, steps=4)
    page.mouse.up()


@in_pairs(("sqlite", "mouse"), ("postgresql", "keyboard"))
def test_errors_are_marked_and_exported_with_offsets_in_code_points(any_server, browser, how):
    row = {"prompt": "Which city?", "response": TEXT, "model": "m", "id": "city"}
    batch = any_server.add_batch([("t:1", row)], "spans", settings={"error_types": TYPES})
    page = open_task(any_server, browser, f"spans-{how}", "spans")
    expect(page.locator(".problem")).to_have_text(re.compile("Mark the errors"))
    if how == "mouse":
        select_text(page, "Paris")
        page.click('[data-type="Wrong-Grounding"]')
        select_text(page, "It has 3 rivers.", nth=1)
        page.click('[data-type="Redundant"]')
        select_text(page, "Paris is old.")  # overlaps the first
        page.click('[data-type="Irrelevant"]')
        page.locator(".marked-text .piece", has_text="Paris").click()  # the shorter of the two
        page.locator(".side .note").fill("No city is meant.")
    else:
        press(page, "Control+Home", "ArrowRight", "ArrowRight", *["Shift+ArrowRight"] * 5, "2")
        press(page, "Control+End", *["Shift+ArrowLeft"] * 16, "3")
        press(page, "Control+Home", "ArrowRight", "ArrowRight", *["Shift+ArrowRight"] * 13, "1")
        press(page, "k")  # the one before: the shorter
        press(page, "n")
        page.keyboard.type("No city is meant.")
        press(page, "Escape")
    expect(page.locator(".marks .mark")).to_have_count(3)
    expect(page.locator(".saved")).to_have_text("Saved")
    page.reload()
    expect(page.locator(".marks .mark")).to_have_count(3)
    expect(page.locator(".marked-text")).to_have_text(TEXT)
    press(page, "k", "Backspace", "u")  # the last in the text is removed, and back again
    expect(page.locator(".problem")).to_have_text("3 marked")
    handed_in(page, how)
    (found,) = exported(any_server, batch)
    assert (found["model"], found["types"]) == ("m", CONTENT["types"])
    assert found["spans"] == [
        {"start": 2, "end": 7, "type": "Wrong-Grounding", "note": "No city is meant."},
        {"start": 33, "end": 49, "type": "Redundant"},
        {"start": 2, "end": 15, "type": "Irrelevant"},
    ]
    assert [TEXT[span["start"] : span["end"]] for span in found["spans"]] == ["Paris", "It has 3 rivers.", "Paris is old."]
    sentences = exported(any_server, batch, "attributes")
    assert [(each["response"], *each["attributes"].values()) for each in sentences] == [
        ("👍 Paris is old.", 1, 1, 0), (TEXT[:32], 0, 0, 0), (TEXT, 0, 0, 1),
    ]  # fmt: skip


def test_the_text_cannot_be_changed_and_no_errors_is_an_answer(server, browser):
    batch = server.add_batch([("t:1", {"prompt": "p", "response": TEXT})], "spans")
    page = open_task(server, browser, "spans-none", "spans")
    press(page, "Control+Home", "x", "Delete", "Shift+Enter", "1")
    page.keyboard.insert_text("typed")
    expect(page.locator(".marked-text")).to_have_text(TEXT)
    expect(page.locator(".toast")).to_contain_text("Select a part of the response first")
    press(page, "0", "Enter")
    expect(page.locator(".count")).to_have_text("1 done")
    assert [row["spans"] for row in exported(server, batch)] == [[]]


def test_a_text_from_right_to_left_is_marked_where_it_was_selected(server, browser):
    text = "باريس في فرنسا. اسمها Paris منذ 1900."
    batch = server.add_batch([("t:1", {"prompt": "p", "response": text})], "spans")
    page = open_task(server, browser, "spans-rtl", "spans")
    assert page.evaluate("getComputedStyle(document.querySelector('.marked-text')).direction") == "rtl"
    press(page, "Control+Home", *["Shift+ArrowLeft"] * 5, "1")
    expect(page.locator(".marks q")).to_have_text("باريس")
    page.locator(".marked-text").dblclick(position={"x": 5, "y": 5}, force=True)
    select_text(page, "Paris")
    page.click('[data-type="unverifiable"]')
    expect(page.locator(".marked-text")).to_have_text(text)
    handed_in(page, "mouse")
    (found,) = exported(server, batch)
    assert [(text[each["start"] : each["end"]], each["type"]) for each in found["spans"]] == [
        ("باريس", "incorrect"), ("Paris", "unverifiable"),
    ]  # fmt: skip


def test_marks_of_qa_feedback_are_imported_shown_and_exported_unchanged(any_server, browser):
    rows = [row_of(each) for each in QA_FEEDBACK]
    batch = any_server.add_batch([(f"t:{n}", row) for n, row in enumerate(rows)], "spans", settings={"error_types": TYPES})
    page = open_task(any_server, browser, "spans-qa", "spans")
    for done, row in enumerate(rows, start=1):
        expect(page.locator(".marked-text")).to_have_text(row["response"])
        parts = [
            row["response"][span["start"] : span["end"]] for span in sorted(row["spans"], key=lambda each: each["start"])
        ]
        expect(page.locator(".marks q")).to_have_text(parts)
        press(page, *([] if row["spans"] else ["0"]), "Enter")
        expect(page.locator(".count")).to_have_text(f"{done} done")
    found = [{field: row[field] for field in ("prompt", "response", "spans")} for row in exported(any_server, batch)]
    assert found == rows


def test_two_labelers_are_compared_by_what_they_marked(database, leases, judgments):
    task = TASKS["spans"]
    one = {"spans": [{"start": 0, "end": 10, "type": "Irrelevant", "note": "why"}]}
    two = {"spans": [{"start": 5, "end": 15, "type": "Irrelevant"}]}
    assert task.similarity(one, two) == 0.5
    assert task.similarity(one, {"spans": []}) == 0
    assert task.similarity({"spans": []}, {"spans": []}) == 1
    other = {"spans": [{"start": 0, "end": 10, "type": "Redundant"}]}
    assert task.similarity(one, other) == 0
    assert task.combine([one, two, other])["spans"] == [{"start": 5, "end": 10, "type": "Irrelevant"}]
    assert task.gold_agreement(one, two) == 0.5


@pytest.mark.parametrize(
    ("spans", "says"),
    [
        (None, "spans: must be a list"),
        ([{"start": 0, "end": 99, "type": "Irrelevant"}], r"spans\[0\]: .*49"),
        ([{"start": 3, "end": 3, "type": "Irrelevant"}], r"spans\[0\]: .*49"),
        ([{"start": True, "end": 3, "type": "Irrelevant"}], r"spans\[0\]: start and end"),
        ([{"start": 0, "end": 3, "type": "Typo"}], r"spans\[0\]\.type: must be one of Irrelevant, Wrong-Grounding"),
        ([{"start": 0, "end": 3, "type": "Irrelevant"}] * 2, "spans: "),
        ([7], r"spans\[0\]: must be an object"),
    ],
)
def test_spans_that_do_not_fit_are_refused(spans, says):
    with pytest.raises(BadInputError, match=says):
        TASKS["spans"].check({"spans": spans}, CONTENT, [])


@pytest.mark.parametrize("types", ["a, a", "a b", ", a", "1a", ",".join("abcdefghij")])
def test_names_of_types_that_do_not_fit_are_refused(types):
    with pytest.raises(BadInputError, match="error_types"):
        TASKS["spans"].contents({"prompt": "p", "response": "r"}, {"error_types": types}, [])


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9), st.sampled_from("ab")), max_size=6))
def test_one_labelers_marks_aggregate_to_the_same_characters(marks):
    answer = {"spans": [{"start": start, "end": start + size, "type": name} for start, size, name in marks]}
    assert TASKS["spans"].similarity(TASKS["spans"].combine([answer]), answer) == 1
    every = {(span["type"], place) for span in answer["spans"] for place in range(span["start"], span["end"])}
    assert marked_characters(answer) == every


def test_many_long_spans_that_overlap_are_compared_soon():
    spans = [{"start": n, "end": 100_000 - n, "type": "ab"[n % 2]} for n in range(500)]
    start = time.thread_time()
    assert TASKS["spans"].similarity({"spans": spans}, {"spans": spans}) == 1
    assert time.thread_time() - start < 3


def test_disagreements_list_what_labelers_marked_differently(server):
    server.add_batch([("t:1", {"prompt": "p", "response": TEXT})], "spans", labelers_per_item=2)
    for name, spans in (("marks-ann", []), ("marks-bob", [{"start": 0, "end": 4, "type": "incorrect"}])):
        do(server.judgments, server.user_id(name), "spans", {"spans": spans})
    (row,) = read(server.database, overview.disagreements, "spans")
    assert row["agreement"] == 0
    measures = {each["measure"] for each in read(server.database, overview.coefficients, "spans")}
    assert "Krippendorff's alpha (nominal): any error" in measures
