"""A new kind of labeling is a Python file, a JavaScript file and a line in the registry; training items of every task."""

import json
import re
import secrets

import pytest
from playwright.sync_api import expect
from sqlalchemy import select

from annotation_ui.cli import main
from annotation_ui.reports import overview
from annotation_ui.reports.export import Selection, rows_to_export
from annotation_ui.reports.labeler_report import labeler_rows
from annotation_ui.store.schema import Assignment
from annotation_ui.tasks import TASKS
from tests.annotation_ui import stars
from tests.annotation_ui.pages import open_tab
from tests.annotation_ui.running import ROOT, Client, Server, read, stored
from tests.files import write_rows


def test_each_task_has_its_module():
    """And no module is without a task; what each exports is checked where the page opens it."""
    modules = (ROOT / "annotation_ui" / "static" / "tasks").glob("*.js")
    texts = {path.stem: path.read_text(encoding="utf-8") for path in modules}
    assert texts.keys() == TASKS.keys()
    for name, text in texts.items():
        exported = set(re.findall(r"^export (?:const|function) (\w+)", text, re.M))
        assert (
            {"help", "empty", "missing", "mount"} <= exported <= {"help", "empty", "missing", "mount", "answer", "summary"}
        ), name


def test_a_new_task_runs_from_the_import_to_the_export(tmp_path, monkeypatch, browser, capsys):
    monkeypatch.setitem(TASKS, "stars", stars.Stars())
    rows = [{"prompt": f"P{n}", "response": f"R{n}", "id": f"s{n}"} for n in range(2)]
    rows.append({"prompt": "T", "response": "R", "gold": {"stars": 4}, "training": True, "explanation": "It is good."})
    write_rows(tmp_path / "rows.jsonl", rows)
    server = Server(f"sqlite:///{tmp_path / 'annotations.db'}", tmp_path, setup=stars.register)
    words = ["import", str(tmp_path / "rows.jsonl"), "--task", "stars", "--most", "4", "--labelers-per-item", "2"]
    assert main(["--database", server.database_url, *words]) == 0
    assert capsys.readouterr().out == "3 items in batch rows\n"
    with server.started():
        page = server.page(browser, "ann")
        page.route("**/ui/tasks/stars.js", lambda route: route.fulfill(body=stars.MODULE, content_type="text/javascript"))
        page.goto("/")  # the only task with work
        expect(page.locator(".tabs [aria-current=page]")).to_have_text("Give stars")
        expect(page.get_by_role("radio")).to_have_count(4)
        page.keyboard.press("3")
        page.keyboard.press("Enter")
        expect(page.locator(".lesson")).to_contain_text("4 stars")
        page.keyboard.press("Enter")
        for done, given in enumerate(("2", "4"), start=2):
            expect(page.locator(".count")).to_have_text(f"{done - 1} done")
            page.keyboard.press(given)
            page.keyboard.press("Enter")
        expect(page.locator(".nothing")).to_be_visible()

        bob = Client(server, server.token("bob"))
        wrong = {"request_id": secrets.token_hex(8), "answer": {"stars": 5}, "seconds": 1}
        assert bob("POST", f"{bob.here('stars')}/submit", wrong)[0] == 422
        for given in (4, 2, 1):
            bob.submit({"stars": given}, "stars")

        page = server.lead_page(browser, "boss")
        panel = open_tab(page, "Import")
        panel.get_by_label("Task", exact=True).click()
        page.get_by_role("option", name="Give stars").click()
        expect(panel.get_by_label("Most stars")).to_be_visible()
        expect(panel.get_by_label("Minimum words (hint)")).to_be_hidden()

    exported = {(row["id"], row["stars"]) for row in rows_to_export(server.database, Selection("stars"))}
    assert exported == {("s0", 2), ("s0", 2), ("s1", 4), ("s1", 1)}
    together = rows_to_export(server.database, Selection("stars", aggregated=True))
    assert [(row["id"], row["stars"]) for row in together] == [("s0", 2), ("s1", 1)]
    (differs,) = read(server.database, overview.disagreements, "stars")
    measures = {row["measure"] for row in read(server.database, overview.coefficients, "stars")}
    labelers = {row["labeler"]: row for row in read(server.database, labeler_rows, "stars")}
    assert (differs["id"], differs["agreement"]) == ("s1", 0)
    assert measures == {"Krippendorff's alpha of stars (ordinal)", "Pairwise agreement (ties count)"}
    assert [(labelers[name]["training"], labelers[name]["judgments"]) for name in ("ann", "bob")] == [(0, 2), (1, 2)]


TWO = {"prompt": "p", "responses": ["a", "b"]}
JUDGED = {"prompt": "p", "response": "r", "rules": ["no-threats", "no-insults"]}

MARKED = {"prompt": "p", "response": "so it is"}
SPANS = [{"start": 0, "end": 2, "type": "incorrect"}]


def verdicts(verdict):
    return {"verdicts": {rule: {"verdict": verdict, "note": ""} for rule in JUDGED["rules"]}}


@pytest.mark.parametrize(
    ("task", "row", "right", "wrong"),
    [
        ("rank", {**TWO, "gold": {"ranks": [2, 1]}}, {"ranks": [2, 1]}, {"ranks": [1, 2]}),
        ("compare", {**TWO, "gold": {"choice": "B"}}, {"choice": "B"}, {"choice": "tie"}),
        ("spans", {**MARKED, "gold": {"spans": SPANS}}, {"spans": SPANS}, {"spans": []}),
        ("rules", {**JUDGED, "gold": {"verdicts": {"no-threats": "follows"}}}, verdicts("follows"), verdicts("unsure")),
    ],
)
def test_the_known_answer_follows_the_labelers(any_server, task, row, right, wrong):
    row = {**row, "training": True, "explanation": "It *is* so."}
    rule_set = "sparrow-dialogue" if TASKS[task].needs_rules else None
    any_server.add_batch(
        [("t:1", row), ("t:2", row), ("t:3", {**row, "gold": None, "training": False})], task, rule_set=rule_set
    )
    ann = Client(any_server, any_server.token(f"learner-{secrets.token_hex(4)}"))
    for given, agreement in ((right, 1), (wrong, 0)):
        number = ann.next(task)["assignment"]
        (order,) = stored(any_server.database, select(Assignment.shown_order).where(Assignment.id == number))
        body = {"request_id": secrets.token_hex(8), "answer": TASKS[task].shown(given, order), "seconds": 1}
        for _ in range(2):  # the page repeats it after a lost answer
            status, _, text = ann("POST", f"/api/assignments/{number}/submit", body)
            assert status == 200, text
            lesson = json.loads(text)["lesson"]
            assert (lesson["agreement"], lesson["explanation"]) == (agreement, "<p>It <em>is</em> so.</p>\n")
            if task != "rules":
                assert (lesson["known"] == lesson["own"]) == (agreement == 1)
            else:
                assert lesson["known"] == "no-threats: follows"
