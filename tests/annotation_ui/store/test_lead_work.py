import dataclasses
import json
import secrets

import pytest
from sqlalchemy import select

from align.core.errors import UserError
from annotation_ui.reports import overview
from annotation_ui.reports.browsing import Filter, browse_items, browse_judgments, item_history
from annotation_ui.reports.export import Selection, rows_to_export
from annotation_ui.reports.labeler_report import items_behind_reliability, labeler_rows
from annotation_ui.server.api import next_decision
from annotation_ui.store import guidelines, rule_sets
from annotation_ui.store.batches import BatchSettings, change_batch, delete_batch, restore_batch, stored_settings
from annotation_ui.store.importing import NewBatch, import_rows
from annotation_ui.store.judgments import BatchDeletedError
from annotation_ui.store.schema import Assignment, Batch, BatchLabeler, Item, Judgment
from annotation_ui.tasks import TASKS, BadInputError
from tests.annotation_ui.running import add_batch, add_users, do, rank_rows, read, stored

BEST_FIRST = {"ranks": [1, 2, 3, 4]}
BEST_LAST = {"ranks": [4, 3, 2, 1]}


def change(database, batch_name, **settings):
    """Change some settings of a batch as it is now."""
    (batch,) = stored(database, select(Batch).where(Batch.name == batch_name))
    now = read(database, stored_settings, batch)
    change_batch(database, batch_name, dataclasses.replace(now, **settings), batch.version)


def purposes(database, judgments, user):
    """Answer everything that this labeler is given; the purpose of each item in that order."""
    seen = []
    while (assignment := judgments.leases.next(user, "rank")) is not None:
        seen += stored(database, select(Item.purpose).where(Item.id == assignment.item_id))
        do(judgments, user, "rank", BEST_FIRST)
    return seen


def test_training_comes_first_and_attention_items_in_between(database, judgments):
    rows = rank_rows(8)
    rows[5][1].update(gold={"ranks": [1, 2, 3, 4]}, training=True, explanation="The first is best.")
    rows[6][1].update(gold={"ranks": [4, 3, 2, 1]})
    rows[7][1].update(gold={"ranks": [1, 2, 3, 4]})
    import_rows(database, NewBatch("b", "rank", labelers_per_item=2, settings={"attention_every": 1}), rows)
    ann, bob = add_users(database, "ann", "bob")
    (late,) = add_users(database, "late")
    assert purposes(database, judgments, ann) == ["training", "attention", "attention"] + ["work"] * 5
    assert purposes(database, judgments, bob) == ["training", "attention", "attention"] + ["work"] * 5
    assert purposes(database, judgments, late) == ["training"]  # no work is left to mix attention items into
    rows_by_name = {row["labeler"]: row for row in read(database, labeler_rows, "rank")}
    a_day = {row["labeler"]: row["judgments"] for row in read(database, overview.per_day, "rank")}
    assert (rows_by_name["ann"]["training"], rows_by_name["ann"]["training items"]) == (1.0, 1)
    assert (rows_by_name["ann"]["attention"], rows_by_name["ann"]["attention items"]) == (0.5, 2)
    assert rows_by_name["late"]["judgments"] == 0  # training is not counted as work
    assert a_day == {"ann": 7, "bob": 7}
    assert len(rows_to_export(database, Selection("rankings"))) == 10
    with pytest.raises(BadInputError, match="known answer was shown"):
        judgments.undo(late, "rank", "undo-late")


def test_a_training_item_cannot_be_skipped_or_changed_and_needs_a_known_answer(database, judgments):
    rows = rank_rows(2)
    rows[0][1].update(gold={"ranks": [1, 2, 3, 4]}, training=True)
    import_rows(database, NewBatch("b", "rank"), rows)
    (ann,) = add_users(database, "ann")
    lesson = judgments.leases.next(ann, "rank")
    with pytest.raises(BadInputError, match="cannot be skipped"):
        judgments.skip(ann, lesson.id, "skip-ann", "", 1)
    do(judgments, ann, "rank", BEST_LAST)
    with pytest.raises(BadInputError, match="stays as it is"):
        judgments.reopen(ann, lesson.id)
    for row, says in (
        ({"training": True}, "needs the known answer"),
        ({"training": 1, "gold": {"ranks": [1, 2, 3, 4]}}, "must be true or false"),
        ({"gold": {"ranks": [1, 2, 3, 4]}}, "every row has"),
    ):
        with pytest.raises(UserError, match=says):
            import_rows(database, NewBatch("c", "rank"), [("f:1", {**rank_rows(1)[0][1], **row})])


def test_a_batch_for_some_labelers_is_given_only_to_them(database, judgments):
    ann, bob = add_users(database, "ann", "bob")
    name = add_batch(database, 3, labelers=("ann",))
    assert judgments.leases.next(bob, "rank") is None
    change(database, name, labelers=())
    held = judgments.leases.next(bob, "rank")
    change(database, name, labelers=("ann",))
    assert judgments.leases.next(bob, "rank") is not None  # what is open stays open
    judgments.skip(bob, held.id, "skip-bob", "", 1)
    assert judgments.leases.next(bob, "rank") is None
    assert purposes(database, judgments, ann) == ["work"] * 3
    change(database, name, labelers=())
    add_batch(database, 1)
    assert judgments.leases.next(bob, "rank") is not None
    with pytest.raises(UserError, match="no user 'nobody'"):
        change(database, name, labelers=("nobody",))


def test_an_import_for_some_labelers_that_fails_leaves_nothing(database):
    add_users(database, "ann")
    with pytest.raises(UserError, match="no user 'nobody'"):
        add_batch(database, 1, name="for nobody", labelers=("nobody",))
    with pytest.raises(UserError, match="responses"):
        import_rows(database, NewBatch("broken", "rank", labelers=("ann",)), [("f:1", {"prompt": "p"})])
    assert stored(database, select(Batch.name)) == stored(database, select(BatchLabeler)) == []


def test_a_closed_batch_gives_out_nothing_and_its_answers_can_still_be_changed(database, judgments):
    name = add_batch(database, 3)
    (ann,) = add_users(database, "ann")
    do(judgments, ann, "rank", BEST_FIRST)
    change(database, name, open=False)
    assert judgments.leases.next(ann, "rank") is None
    ((first, *_),) = judgments.history(ann)
    opened = judgments.reopen(ann, first.assignment_id)
    judgments.submit(ann, opened.id, "change-ann", TASKS["rank"].shown(BEST_LAST, opened.shown_order), 1)
    assert [row["ranks"] for row in rows_to_export(database, Selection("rankings"))] == [[4, 3, 2, 1]]


def test_batches_are_renamed_deleted_and_restored_and_no_judgment_is_lost(database, judgments):
    judged, empty = add_batch(database, 2, name="judged"), add_batch(database, 2, name="empty", priority=-1)
    ann, bob = add_users(database, "ann", "bob")
    do(judgments, ann, "rank", BEST_FIRST)
    assert judgments.leases.next(bob, "rank") is not None
    for wrong in ("", " ", "empty", "x" * 129):
        with pytest.raises(UserError):
            change(database, judged, name=wrong)
    change(database, judged, name=" better name ")
    assert delete_batch(database, empty) is True
    assert delete_batch(database, "better name") is False
    assert judgments.leases.next(bob, "rank") is None  # the item that bob had open is taken back
    assert read(database, overview.progress) == []
    assert read(database, browse_items, Filter()) == ([], False)
    assert len(stored(database, select(Judgment.id))) == 1
    assert stored(database, select(Batch.name)) == ["better name"]
    assert rows_to_export(database, Selection("rankings")) == []
    with pytest.raises(UserError, match="deleted"):  # nobody sees it in a list of batches
        import_rows(database, NewBatch("better name", "rank"), rank_rows(1))
    restore_batch(database, "better name")
    assert len(rows_to_export(database, Selection("rankings"))) == 1
    (row,) = read(database, overview.progress)
    assert (row["batch"], row["open"], row["done"]) == ("better name", False, 1)


@pytest.mark.parametrize("task", ["demonstrate", "probe"])
def test_a_batch_that_is_deleted_while_somebody_writes_keeps_the_draft_and_refuses_the_answer(database, judgments, task):
    rules = {"rule_set": "sparrow-dialogue"} if task == "probe" else {}
    with database.write() as session:
        rule_sets.store_shipped(session)
    row = {"rule": "no-threats"} if task == "probe" else {"prompt": "Write a poem."}
    name = add_batch(database, [("t:1", row)], task, **rules)
    (ann,) = add_users(database, "ann")
    opened = judgments.leases.next(ann, task)
    said = None
    if task == "probe":
        said = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello!", "model": "m"}]
        judgments.save_transcript(ann, opened.id, said)
    else:
        judgments.save_draft(ann, opened.id, {"state": {"completion": "A poem"}}, 1)
    assert delete_batch(database, name) is False
    answer = {"verdict": "follows", "note": ""} if task == "probe" else {"completion": "A poem, finished"}
    for action in (
        lambda: judgments.submit(ann, opened.id, "late", answer, 1),
        lambda: judgments.skip(ann, opened.id, "skip", "", 1),
    ):
        with pytest.raises(BatchDeletedError, match="deleted this batch"):
            action()
    restore_batch(database, name)
    kept = judgments.load(ann, opened.id).assignment
    assert (kept.draft or kept.transcript) in ({"state": {"completion": "A poem"}}, said)
    assert judgments.submit(ann, opened.id, "late", answer, 1).kind == "submit"
    assert read(database, overview.progress)[0]["done"] == 1


def test_answers_of_a_deleted_batch_are_neither_changed_nor_undone(database, judgments):
    kept, deleted = add_batch(database, 1, priority=1), add_batch(database, 2)
    (ann,) = add_users(database, "ann")
    for _ in range(3):
        do(judgments, ann, "rank", BEST_FIRST)
    last, reopened = stored(database, select(Judgment).order_by(Judgment.id.desc()))[:2]
    judgments.reopen(ann, reopened.assignment_id)
    delete_batch(database, deleted)
    assert judgments.leases.next(ann, "rank") is None  # the change that was begun is closed
    answer = {"ranks": [4, 3, 2, 1]}
    for action in (
        lambda: judgments.submit(ann, reopened.assignment_id, "change", answer, 1),
        lambda: judgments.reopen(ann, last.assignment_id),
        lambda: judgments.undo(ann, "rank", "undo-named", last.assignment_id),
    ):
        with pytest.raises(BatchDeletedError):
            action()
    again = judgments.submit(ann, last.assignment_id, last.request_id, last.answer, 1)  # sent twice: it was stored
    assert again.id == last.id
    undone = judgments.undo(ann, "rank", "undo-last")  # that of the batch that is left
    assert judgments.load(ann, undone.id).batch.name == kept
    restore_batch(database, deleted)
    assert len(rows_to_export(database, Selection("rankings", batches=(deleted,)))) == 2


def test_items_and_judgments_are_found_by_labeler_batch_state_flag_and_text(database, judgments):
    rows = rank_rows(4)
    rows[2][1]["prompt"] = 'Größe 100% "quoted" response_text'
    first, _ = add_batch(database, rows, labelers_per_item=2, priority=1), add_batch(database, 1, name="second")
    ann, bob = add_users(database, "ann", "bob")
    do(judgments, ann, "rank", {**BEST_FIRST, "flags": [["hallucination"], [], [], []]})  # item 1
    skipped = judgments.leases.next(ann, "rank")
    judgments.skip(ann, skipped.id, "skip-ann", "too hard", 1)  # item 2
    do(judgments, bob, "rank", BEST_LAST)  # item 1
    assert judgments.leases.next(bob, "rank") is not None  # item 2

    def items(**wanted):
        return [row["item"] for row in read(database, browse_items, Filter(**wanted))[0]]

    def kinds(**wanted):
        return [(row["labeler"], row["kind"]) for row in read(database, browse_judgments, Filter(**wanted))[0]]

    assert items(batch=first) == [1, 2, 3, 4]
    assert items(batch="second") == [5]
    assert items(labeler="bob") == [1, 2]
    assert (items(state="done"), items(state="skipped"), items(state="leased")) == ([1], [2], [2])
    assert items(state="open") == [2, 3, 4, 5]
    assert (items(flag="hallucination"), items(flag="violent")) == ([1], [])
    for text in ("größe", "GRÖSSE 100%".replace("SS", "ß"), '"quoted"', "response_text", "ITEM-2"):
        assert items(text=text) == [3], text
    assert items(text="responses") == []  # a field's name is not text
    assert items(text="100_") == []
    assert kinds() == [("bob", "submit"), ("ann", "skip"), ("ann", "submit")]
    assert kinds(labeler="ann", flag="hallucination") == [("ann", "submit")]
    assert kinds(text="too hard") == [("ann", "skip")]
    rows, more = read(database, browse_items, Filter(), after=1, limit=2)
    assert ([row["item"] for row in rows], more) == ([2, 3], True)
    assert (rows[0]["skipped"], rows[0]["open now"], rows[0]["judged"]) == (1, 1, 0)
    assert read(database, item_history, 99) is None
    assert [(row["labeler"], row["answer"], row["marks"]) for row in read(database, item_history, 1)[2]] == [
        ("ann", "A > B > C > D", "hallucination"),
        ("bob", "D > C > B > A", ""),
    ]


def test_an_item_is_stuck_when_all_who_may_take_it_have_had_it(database, judgments):
    name = add_batch(database, 2, labelers_per_item=2)
    (ann,) = add_users(database, "ann")
    add_users(database, "boss", role="lead")

    def stuck():
        found = [each["item"] for each in read(database, browse_items, Filter(state="stuck"))[0]]
        assert sum(row["stuck"] for row in read(database, overview.progress)) == len(found)
        return found

    assert stuck() == []
    do(judgments, ann, "rank", BEST_FIRST)
    assert stuck() == [1]  # it needs a second labeler, and there is none
    add_users(database, "bob")
    assert stuck() == []
    change(database, name, labelers=("ann",))
    assert stuck() == [1]
    change(database, name, labelers=("ann", "boss"))
    assert stuck() == [1]  # a lead gets no labelers' items
    change(database, name, labelers=("boss",))
    assert stuck() == [1, 2]
    change(database, name, labelers=("ann", "bob"))
    assert stuck() == []
    add_batch(database, 2, labelers=("ann",), priority=-1)  # another batch's labelers do not matter
    assert stuck() == []
    change(database, name, labelers=())
    assert stuck() == []


def test_a_lead_goes_from_disagreement_to_disagreement_and_takes_no_slot(database, judgments):
    add_batch(database, 3, labelers_per_item=2)
    ann, bob, boss = *add_users(database, "ann", "bob"), *add_users(database, "boss", role="lead")
    for user, orders in ((ann, [(1, 2, 3, 4)] * 3), (bob, [(1, 2, 3, 4), (2, 1, 3, 4), (4, 3, 2, 1)])):
        for order in orders:
            do(judgments, user, "rank", {"ranks": list(order)})
    add_batch(database, 1, name="new work")
    leases = judgments.leases

    def decide(item=None):
        assignment, _, left = next_decision(leases, boss, "rank", item)
        return assignment and (assignment.item_id, left)

    assert decide() == decide() == (3, 2)  # the worst, and the same after a refresh
    assert decide(2) == (2, 2)
    second = leases.adjudicate(boss, 2)
    judgments.submit(boss, second.id, "decide-2", TASKS["rank"].shown(BEST_FIRST, second.shown_order), 1)
    assert decide() == (3, 1)
    decided = {row["id"]: row["ranks"] for row in rows_to_export(database, Selection("rankings", aggregated=True))}
    assert decided["item-1"] == [1, 2, 3, 4]  # the decision counts, not the two that differ
    third = leases.adjudicate(boss, 3)
    judgments.skip(boss, third.id, "skip-3", "", 1)
    assert decide() is None  # skipped items do not come back by themselves
    assert decide(3) == (3, 0)
    assert stored(database, select(Item.taken).where(Item.batch_id == 2)) == [0]
    assert stored(database, select(Assignment.id).where(Assignment.user_id == boss, ~Assignment.adjudication)) == []
    own = leases.next(boss, "rank")  # work that the lead asks for is not the decision
    assert not own.adjudication


def test_reliability_stands_beside_agreement_with_the_items_that_decide_it(database, judgments):
    add_batch(database, 12, labelers_per_item=3)
    ann, bob, cy = add_users(database, "ann", "bob", "cy")
    for number in range(12):
        for user in (ann, bob):
            do(judgments, user, "rank", BEST_FIRST)
        do(judgments, cy, "rank", BEST_LAST if number in (4, 7) else BEST_FIRST)
    rows = {row["labeler"]: row for row in read(database, labeler_rows, "rank")}
    items = read(database, items_behind_reliability, "rank", "cy")
    assert rows["cy"]["reliability"] == pytest.approx(10 / 12, abs=0.01)
    assert rows["ann"]["reliability"] > 0.99
    assert rows["cy"]["agreement with others"] == pytest.approx(10 / 12, abs=0.001)
    assert [row["item"] for row in items[:2]] == [5, 8]
    assert items[0]["probability correct"] < 0.05 < 0.95 < items[2]["probability correct"]
    assert (items[0]["this labeler"], items[0]["others"]) == ("D > C > B > A", "A > B > C > D; A > B > C > D")


def test_a_lead_takes_no_labelers_slot_not_even_after_a_decision(ann, boss):
    ann.server.add_batch(2)
    assert boss("GET", "/")[0] == 200
    assert boss.next() is None
    first = ann.next()["assignment"]
    ann.submit()
    assert json.loads(boss("POST", "/api/tasks/rank/next", {})[2])["item"] is None
    (item_id,) = stored(ann.server.database, select(Assignment.item_id).where(Assignment.id == first))
    assert boss.next() is None  # a decision is no work
    opened = json.loads(boss("POST", "/api/decide/rank/next", {"item": item_id})[2])["item"]
    assert opened["others"]
    request = {"request_id": secrets.token_hex(8), "answer": BEST_FIRST, "seconds": 1}
    assert boss("POST", f"/api/assignments/{opened['assignment']}/submit", request)[0] == 200
    assert boss.next() is None
    assert json.loads(boss("POST", f"/api/assignments/{opened['assignment']}/reopen", {})[2]) == {"deciding": True}
    assert json.loads(boss("POST", "/api/decide/rank/next", {})[2])["item"]["assignment"] == opened["assignment"]
    assert ann.next() is not None  # the second item is still there for a labeler


def test_two_leads_do_not_overwrite_each_others_settings(database):
    name = add_batch(database, 3)
    assert change_batch(database, name, BatchSettings(name, 2, 5), version=1) == 2
    with pytest.raises(UserError, match="another lead"):
        change_batch(database, name, BatchSettings(name, 1, 0, False), version=1)
    (batch,) = stored(database, select(Batch))
    assert (batch.labelers_per_item, batch.priority, batch.open) == (2, 5, True)
    assert stored(database, select(Item.needed)) == [2] * 3
    with pytest.raises(UserError, match="priority 99999999999"):
        change_batch(database, name, BatchSettings(name, 1, 99_999_999_999), version=2)

    (boss,) = add_users(database, "boss", role="lead")
    first = guidelines.save(database, "rank", "Be fair.", boss, edited=0)
    with pytest.raises(UserError, match="another lead"):
        guidelines.save(database, "rank", "Be quick.", boss, edited=0)
    assert guidelines.save(database, "rank", "Be fair and quick.", boss, edited=first) > first
    for text in ("\0", "\ud800", "x" * (guidelines.MAX_LENGTH + 1)):
        with pytest.raises(UserError, match="must be text of at most"):
            guidelines.save(database, "compare", text, boss, edited=0)


def test_a_new_version_of_guidelines_is_unread_until_it_is_opened(database, judgments):
    ann, boss = add_users(database, "ann", "boss")

    def unread():
        newest = read(database, guidelines.unread, "rank", ann)
        return newest.id if newest else None

    assert unread() is None
    first = guidelines.save(database, "rank", "Be kind.", boss, edited=0)
    assert unread() == first
    for _ in range(2):
        guidelines.mark_read(database, first, ann)
    guidelines.mark_read(database, 999, ann)
    assert unread() is None
    guidelines.save(database, "rules", "Other task.", boss, edited=0)
    assert unread() is None
    second = guidelines.save(database, "rank", "Be kind and brief.", boss, edited=first)
    assert unread() == second
    add_batch(database, 1)
    do(judgments, ann, "rank", BEST_FIRST)
    assert stored(database, select(Judgment.guideline_id)) == [second]
    with pytest.raises(UserError, match="no changes"):
        guidelines.save(database, "rank", "Be kind and brief.", boss, edited=second)
    listed = [(number, each.text, *more) for number, each, *more in read(database, guidelines.versions, "rank")]
    assert listed == [(2, "Be kind and brief.", "boss", 0), (1, "Be kind.", "boss", 1)]
