"""Undo, against a model: each item has a stack of answers, of which the last one counts."""

import secrets
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import func, select

from annotation_ui.reports.events import new_judgments
from annotation_ui.reports.export import Selection, rows_to_export
from annotation_ui.store.judgments import ConflictError
from annotation_ui.store.schema import Assignment, Batch, Judgment, User
from annotation_ui.tasks.compare import CHOICES
from tests.annotation_ui.running import add_batch, add_users, stored

ITEMS = 3
STEPS = st.lists(
    st.tuples(st.sampled_from(["answer", "skip", "undo", "keep", "undo", "answer"]), st.integers(0, ITEMS - 1)),
    max_size=14,
)


class Model:
    """What a labeler's items should be: open, done or skipped, with the answers that were not undone."""

    def __init__(self):
        self.state, self.answers = ["open"] * ITEMS, [[] for _ in range(ITEMS)]
        self.touched, self.count = [0] * ITEMS, 0  # when the last judgment of each item was stored

    def store(self, item, state):
        self.count += 1
        self.touched[item], self.state[item] = self.count, state

    def undo(self):
        """The item that an undo opens; None if there is nothing to undo."""
        closed = [item for item in range(ITEMS) if self.state[item] != "open" and self.touched[item]]
        if not closed:
            return None
        item = max(closed, key=self.touched.__getitem__)
        if self.state[item] == "done":
            self.answers[item].pop()
        self.store(item, "open")
        return item

    def counting(self):
        return {item: answers[-1] for item, answers in enumerate(self.answers) if answers}


def claim_all(database, leases, user):
    """The labeler's assignments of all items, open at once."""
    claimed = []
    for state in ["done"] * ITEMS:
        claimed.append(leases.next(user, "compare"))
        with database.write() as session:
            session.get_one(Assignment, claimed[-1].id).state = state
    with database.write() as session:
        for each in claimed:
            session.get_one(Assignment, each.id).state = "leased"
    return sorted(claimed, key=lambda each: each.position)


def refused(action, *arguments):
    with pytest.raises(ConflictError):
        action(*arguments)


@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_undo_makes_the_earlier_answer_count_again(database, leases, judgments, steps):
    if not stored(database, select(Batch.id)):
        rows = [("t", {"prompt": "p", "responses": ["a", "b"], "id": str(number)}) for number in range(ITEMS)]
        add_batch(database, rows, "compare", labelers_per_item=1000)
    name = secrets.token_hex(8)
    (user,) = add_users(database, name)
    mine, model = claim_all(database, leases, user), Model()
    (before,) = stored(database, select(func.max(Judgment.id)))
    for number, (action, item) in enumerate(steps):
        assignment, request, state = mine[item].id, secrets.token_hex(8), model.state[item]
        choice = CHOICES[number % len(CHOICES)]
        if action == "undo":
            opened, expected = judgments.undo(user, "compare", request), model.undo()
            assert (opened and opened.id) == (None if expected is None else mine[expected].id)
        elif action == "keep":
            if not model.answers[item]:
                refused(judgments.keep, user, assignment)
                continue
            if state == "done":
                judgments.reopen(user, assignment)
            judgments.keep(user, assignment)
            model.state[item] = "done"
        elif action == "skip":
            if state != "open" or model.answers[item]:
                refused(judgments.skip, user, assignment, request, "", 1)
                continue
            judgments.skip(user, assignment, request, "", 1)
            model.store(item, "skipped")
        elif state == "skipped":
            refused(judgments.submit, user, assignment, request, {"choice": choice}, 1)
        else:
            if state == "done":
                judgments.reopen(user, assignment)
            judgments.submit(user, assignment, request, {"choice": choice}, 1)
            model.answers[item].append(choice)
            model.store(item, "done")
        shown = {judgment.assignment_id: judgment.answer["choice"] for judgment, *_ in judgments.history(user)}
        assert shown == {mine[at].id: answer for at, answer in model.counting().items()}

    pseudonym = stored(database, select(User.pseudonym).where(User.id == user))[0]
    exported = {
        row["id"]: row["choice"] for row in rows_to_export(database, Selection("rankings")) if row["labeler"] == pseudonym
    }
    followed = {}
    for event in new_judgments(database, before or 0, limit=1000):
        followed.pop(event["id"], None)
        if event["rows"]:
            (row,) = event["rows"]
            followed[event["id"]] = row["choice"]
    assert followed == exported
    assert len(exported) == len(model.counting())


def test_an_answer_that_counts_again_is_exported_again(database, leases, judgments):
    add_batch(database, [("t", {"prompt": "p", "responses": ["a", "b"]})], "compare")
    (ann,) = add_users(database, "ann")
    mine = leases.next(ann, "compare")
    for choice in ("tie", "both_bad"):
        judgments.submit(ann, mine.id, choice, {"choice": choice}, 1)
        judgments.reopen(ann, mine.id)
    judgments.keep(ann, mine.id)
    since = time.time()
    assert rows_to_export(database, Selection("rankings", since=since)) == []
    judgments.undo(ann, "compare", "undo")
    (row,) = rows_to_export(database, Selection("rankings", since=since))
    assert row["choice"] == "tie"
    assert judgments.load(ann, mine.id).assignment.draft["state"] == {"choice": "both_bad"}  # to go on from
