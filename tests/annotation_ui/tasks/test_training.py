"""A training item of every task that can have one, from the import to what the labeler learns."""

import json
import secrets

import pytest

from annotation_ui.store.schema import Assignment
from annotation_ui.tasks import TASKS
from tests.annotation_ui.running import Client

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
        with any_server.database.read() as session:
            order = session.get_one(Assignment, number).shown_order
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


def test_the_other_tasks_refuse_a_known_answer():
    """So that there is none without a test above."""
    assert {name for name, task in TASKS.items() if task.comparable} == {"rank", "rules", "compare", "spans"}
