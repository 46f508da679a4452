import threading
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import func, inspect, select, text
from sqlalchemy.exc import DatabaseError

from annotation_ui.reports.counts import labeler_counts
from annotation_ui.reports.export import Selection, rows_to_export
from annotation_ui.store.importing import NewBatch, import_rows
from annotation_ui.store.judgments import ConflictError, Judgments
from annotation_ui.store.leases import Leases
from annotation_ui.store.schema import Assignment, Base, Item, Judgment
from annotation_ui.tasks import BadInputError
from tests.annotation_ui import postgres
from tests.annotation_ui.running import add_batch, add_users, do, rank_rows, read, stored

ANSWER = {"ranks": [1, 2, 2, 3]}


def submit(judgments, user, assignment, request, answer=None):
    return judgments.submit(user, assignment.id, request, answer or ANSWER, 1.0)


def test_a_refresh_gives_the_same_item_in_the_same_order(database, leases):
    add_batch(database)
    (ann,) = add_users(database, "ann")
    first, again = leases.next(ann, "rank"), leases.next(ann, "rank")
    assert (first.id, first.shown_order) == (again.id, again.shown_order)
    assert sorted(first.shown_order) == [0, 1, 2, 3]


def test_an_expired_lease_goes_to_somebody_else_and_its_late_judgment_is_kept(database):
    leases = Leases(database, seconds=-1)
    judgments = Judgments(leases)
    add_batch(database, 1)
    ann, bob = add_users(database, "ann", "bob")
    mine = leases.next(ann, "rank")
    theirs = leases.next(bob, "rank")
    assert mine.item_id == theirs.item_id
    assert submit(judgments, bob, theirs, "b").kind == "submit"
    assert submit(judgments, ann, mine, "a").kind == "late"
    assert stored(database, select(Item.taken)) == [1]
    assert judgments.load(ann, mine.id).assignment.current_id is None


def test_an_expired_lease_is_resumed_with_its_draft_while_the_slot_is_free(database, leases):
    judgments = Judgments(leases)
    add_batch(database, 1)
    (ann,) = add_users(database, "ann")
    mine = leases.next(ann, "rank")
    judgments.save_draft(ann, mine.id, {"state": "half done"}, 1)
    with database.write() as session:
        session.get_one(Assignment, mine.id).expires_at = 0
    assert leases.collect_expired() == 1
    again = leases.next(ann, "rank")
    assert (again.id, again.draft) == (mine.id, {"state": "half done"})


def test_undo_reopens_the_last_judgment_as_it_was_and_all_rows_stay(database, leases, judgments):
    add_batch(database)
    (ann,) = add_users(database, "ann")
    first = leases.next(ann, "rank")
    submit(judgments, ann, first, "one")
    leases.next(ann, "rank")
    undone = judgments.undo(ann, "rank", "two")
    assert undone.id == first.id
    assert undone.draft["state"]["ranks"] == ANSWER["ranks"]
    reopened = leases.next(ann, "rank")
    assert reopened.id == first.id
    assert submit(judgments, ann, first, "three", {"ranks": [4, 3, 2, 1]}).kind == "edit"
    rows = stored(database, select(Judgment).order_by(Judgment.id))
    assert [(row.kind, row.answer and row.answer["ranks"]) for row in rows] == [
        ("submit", [1, 2, 2, 3]),
        ("undo", None),
        ("edit", [4, 3, 2, 1]),
    ]


def test_a_change_that_is_never_made_leaves_the_judgment_and_its_slot(database):
    leases = Leases(database)
    judgments = Judgments(leases)
    add_batch(database, 1)
    ann, bob = add_users(database, "ann", "bob")
    mine = leases.next(ann, "rank")
    with pytest.raises(ConflictError, match="no answer"):
        judgments.reopen(ann, mine.id)
    done = submit(judgments, ann, mine, "one")
    judgments.reopen(ann, mine.id)
    judgments.save_draft(ann, mine.id, {"state": "half done"}, 9)
    with pytest.raises(ConflictError, match="My work"):
        judgments.skip(ann, mine.id, "skip", "", 1)
    with database.write() as session:
        session.get_one(Assignment, mine.id).expires_at = 0
    assert leases.next(bob, "rank") is None  # its slot is taken
    now = judgments.load(ann, mine.id).assignment
    assert (now.state, now.current_id) == ("done", done.id)
    judgments.reopen(ann, mine.id)
    assert judgments.load(ann, mine.id).assignment.draft == {"state": "half done"}
    assert submit(judgments, ann, mine, "two", {"ranks": [4, 3, 2, 1]}).kind == "edit"
    assert [judgment.answer["ranks"] for judgment, *_ in judgments.history(ann)] == [[4, 3, 2, 1]]
    assert judgments.history(bob) == []


def test_a_skipped_item_goes_to_somebody_else_and_can_be_taken_back(database, leases, judgments):
    add_batch(database, 1)
    ann, bob = add_users(database, "ann", "bob")
    mine = leases.next(ann, "rank")
    judgments.skip(ann, mine.id, "skip", "unclear", 1)
    assert leases.next(ann, "rank") is None
    back = judgments.undo(ann, "rank", "undo")
    assert back is not None
    judgments.skip(ann, mine.id, "skip again", "", 1)
    theirs = leases.next(bob, "rank")
    assert theirs.item_id == mine.item_id
    with pytest.raises(ConflictError, match="another labeler"):
        judgments.undo(ann, "rank", "undo again")


def test_a_request_id_stands_for_one_request(database, leases, judgments):
    add_batch(database, 3)
    ann, bob = add_users(database, "ann", "bob")
    first = leases.next(ann, "rank")
    done = submit(judgments, ann, first, "one")
    with pytest.raises(ConflictError, match="already submitted"):
        submit(judgments, ann, first, "another")
    theirs = leases.next(bob, "rank")
    with pytest.raises(BadInputError, match="request_id: taken"):
        submit(judgments, bob, theirs, "one")
    second = leases.next(ann, "rank")
    for other in (
        lambda: submit(judgments, ann, first, "one", {"ranks": [4, 3, 2, 1]}),
        lambda: submit(judgments, ann, second, "one"),
        lambda: judgments.skip(ann, second.id, "one", "", 1),
        lambda: judgments.undo(ann, "rank", "one"),
    ):
        with pytest.raises(BadInputError, match="request_id: used for something else"):
            other()
    assert submit(judgments, ann, first, "one").id == done.id
    skipped = judgments.skip(ann, second.id, "two", "unclear", 1)
    assert judgments.skip(ann, second.id, "two", "unclear", 1).id == skipped.id
    assert judgments.undo(ann, "rank", "three").id == second.id
    assert judgments.undo(ann, "rank", "three").id == second.id  # a repeat takes back nothing more
    assert stored(database, select(Judgment.kind).order_by(Judgment.id)) == ["submit", "skip", "undo"]


def test_requests_at_the_same_time_are_as_if_one_came_after_the_other(database, leases, judgments):
    """The same submit twice is one judgment, and two undos take back two answers."""
    add_batch(database, 24)
    (ann,) = add_users(database, "ann")

    def at_once(action, *arguments):
        barrier = threading.Barrier(2)

        def run(argument):
            barrier.wait()
            return action(argument)

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(run, arguments))

    for number in range(12):
        opened = leases.next(ann, "rank")
        one, two = at_once(lambda name, to=opened: submit(judgments, ann, to, name).id, f"s{number}", f"s{number}")
        assert one == two
    for number in range(6):
        one, two = at_once(lambda name: judgments.undo(ann, "rank", name).id, f"u{number}", f"v{number}")
        assert isinstance(one, int)
        assert isinstance(two, int)
        assert one != two
    assert judgments.undo(ann, "rank", "last") is None


def test_the_database_refuses_to_change_a_judgment(database, leases, judgments):
    add_batch(database)
    (ann,) = add_users(database, "ann")
    first = submit(judgments, ann, leases.next(ann, "rank"), "one")
    row = "VALUES ({}, '{}', 1, 1, 1, 'submit', '{{}}', '[]', 0, 0)"
    columns = "(id, request_id, assignment_id, item_id, user_id, kind, answer, shown_order, seconds, created_at) "
    update = "ON CONFLICT (id) DO UPDATE SET answer = excluded.answer"
    statements = [f"INSERT INTO judgments {columns}{row.format(first.id, 'two')} {update}"]
    statements += ["UPDATE judgments SET seconds = 0", "DELETE FROM judgments"]
    if database.is_sqlite:  # its REPLACE deletes a row without the triggers of DELETE
        replace = f"INSERT OR REPLACE INTO judgments {columns}"
        statements += [replace + row.format(first.id, "two"), replace + row.format(first.id + 1, "one")]
    for statement in statements:
        with pytest.raises(DatabaseError, match="append-only"), database.write() as session:
            session.connection().exec_driver_sql(statement)
    assert [answer["ranks"] for answer in stored(database, select(Judgment.answer))] == [ANSWER["ranks"]]


def test_priority_goes_first_and_gold_goes_to_everyone(database, leases, judgments):
    add_batch(database, 1, name="later")
    rows = rank_rows(2)
    rows[0][1]["gold"] = {"ranks": [1, 2, 3, 4]}
    import_rows(database, NewBatch("first", "rank", labelers_per_item=3, priority=5, settings={"attention_every": 1}), rows)
    for user in add_users(database, "ann", "bob", "cy"):
        gold = leases.next(user, "rank")
        assert judgments.load(user, gold.id).item.gold == {"ranks": [1, 2, 3, 4]}
        submit(judgments, user, gold, f"gold-{user}")


def test_many_threads_take_each_slot_once(database, leases, judgments):
    add_batch(database, 20, labelers_per_item=2)
    users = add_users(database, *(f"user{i}" for i in range(8)))

    def work(user):
        while (assignment := leases.next(user, "rank")) is not None:
            submit(judgments, user, assignment, f"{user}-{assignment.id}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, users))
    with database.read() as session:
        labelers = func.count(Judgment.user_id.distinct())
        counts = session.execute(select(func.count(), labelers).group_by(Judgment.item_id)).all()
    assert counts == [(2, 2)] * 20  # and nobody gets an item twice


@pytest.mark.parametrize(
    ("database_kind", "count"),
    [
        pytest.param("sqlite", 20_000, marks=pytest.mark.part),
        *(pytest.param(kind, 100_000, marks=pytest.mark.slow) for kind in ("sqlite", "postgresql")),
    ],
    indirect=["database_kind"],
)
def test_the_next_of_many_items_comes_in_under_50_ms(count, database, leases, judgments):
    """Also for the labeler who has done half of them while every one still has a free slot."""
    add_batch(database, count, labelers_per_item=2)
    ann, bob = add_users(database, "ann", "bob")
    with database.write() as session:
        session.execute(text("UPDATE items SET taken = 1 WHERE position < :half"), {"half": count // 2})
        session.execute(
            text(
                "INSERT INTO assignments (item_id, user_id, batch_id, position, task, adjudication, state, shown_order,"
                " draft_seq, opened_at, leased_at, expires_at) SELECT id, :user, batch_id, position, 'rank', false,"
                " 'done', '[]', 0, 0, 0, 0 FROM items WHERE position < :half"
            ),
            {"user": ann, "half": count // 2},
        )
    for user in (ann, bob):
        medians = []
        for part in range(8):
            times = []
            for turn in range(5):
                start = time.perf_counter()
                assignment = leases.next(user, "rank")
                times.append(time.perf_counter() - start)
                assert assignment is not None
                submit(judgments, user, assignment, f"{user}-{part}-{turn}")
            medians.append(median(times))
        assert min(medians) < 0.05, medians  # what else runs makes some parts slow; a slow queue all of them
        if not database.is_sqlite:
            assert postgres.rows_read(database, lambda user=user: leases.next(user, "rank")) < 100


FULL_ANSWER = {"ranks": [2, 1, 3, 3], "ratings": [None] * 4, "flags": [[], ["hallucination"], [], []]}


def counted(database, user, midnight=0):
    counts = read(database, labeler_counts, user, "rank", midnight)
    return counts["done"], counts["done_of_open"], counts["left"], counts["today"]


def test_comments_are_exported_and_aggregated(database, judgments):
    ann, bob, eve = add_users(database, "ann", "bob", "eve")
    add_batch(database, 1, labelers_per_item=3)
    for user, comment in ((ann, "close"), (bob, "  too long \n"), (eve, " ")):
        do(judgments, user, "rank", {**FULL_ANSWER, "comment": comment})
    rows = rows_to_export(database, Selection("rankings"))
    assert [row.get("comment") for row in rows] == ["close", "too long", None]
    assert [row["ranks"] for row in rows] == [FULL_ANSWER["ranks"]] * 3
    (row,) = rows_to_export(database, Selection("rankings", aggregated=True))
    assert (row["ranks"], row["comment"]) == (FULL_ANSWER["ranks"], "close; too long")
    add_batch(database, [("t", {"prompt": "Q", "responses": ["a", "b"]})], "compare")
    do(judgments, ann, "compare", {"choice": "B", "comment": "shorter"})
    assert rows_to_export(database, Selection("rankings"))[-1]["comment"] == "shorter"


def test_counts_follow_what_a_labeler_does(database, judgments):
    ann, bob = add_users(database, "ann", "bob")
    add_batch(database, 5, labelers_per_item=1)
    work = {"prompt": "G", "responses": ["a", "b"]}
    add_batch(database, [("g", {**work, "gold": {"ranks": [1, 2]}}), ("w", work)])  # the attention item counts like work
    now = time.time()
    assert counted(database, ann) == (0, 0, 7, 0)
    do(judgments, ann, "rank", FULL_ANSWER)
    assert counted(database, ann, now) == (1, 1, 6, 1)
    assert counted(database, ann, now + 1000) == (1, 1, 6, 0)  # tomorrow
    opened = judgments.leases.next(bob, "rank")
    assert counted(database, bob) == (0, 0, 6, 0)  # the open one is left, ann's is not
    assert counted(database, ann) == (1, 1, 5, 1)
    judgments.skip(bob, opened.id, "skip-of-bob", "unclear", 1.0)
    assert counted(database, bob) == (0, 0, 5, 0)
    assert counted(database, ann) == (1, 1, 6, 1)
    assert [row["reason"] for row in rows_to_export(database, Selection("skips"))] == ["unclear"]
    judgments.undo(bob, "rank", "undo-of-bob")
    assert rows_to_export(database, Selection("skips")) == []
    add_batch(database, 1200)
    counts = read(database, labeler_counts, ann, "rank", 0)
    assert (counts["left"], counts["more_left"]) == (1000, True)


def test_a_window_does_not_overwrite_what_it_has_not_seen(database, judgments):
    (ann,) = add_users(database, "ann")
    add_batch(database, 1)
    opened = judgments.leases.next(ann, "rank")

    def save(window, sequence, seen):
        saved = judgments.save_draft(ann, opened.id, {"state": {}, "window": window}, sequence, seen)
        assert saved["held"]
        return saved["stored"], saved["sequence"]

    assert save("one", 1, 0) == (True, 1)
    assert save("one", 2, 0) == (True, 2)  # its own draft, even if the answer to the first was lost
    assert save("two", 1, 0) == (False, 2)
    assert save("two", 3, 0) == (False, 2)
    assert save("two", 3, 2) == (True, 3)  # after the labeler chose this window
    assert save("one", 4, 0) == (False, 3)
    assert save("one", 0, 0) == (False, 3)  # only renews the lease
    assert save("two", 2, 3) == (False, 3)  # an older one of its own that comes late
    assert judgments.load(ann, opened.id).assignment.draft["window"] == "two"


def test_a_new_database_has_the_newest_schema(database):
    with database.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
    assert database.revisions()[0] == database.revisions()[1]
    add_batch(database, 1)
    with database.write() as session:  # a database of the version before
        session.execute(text("CREATE TABLE webhook_events (id INTEGER PRIMARY KEY)"))
        session.execute(text("UPDATE alembic_version SET version_num = '0007_labelers_per_item'"))
    database.upgrade()
    assert not inspect(database.engine).has_table("webhook_events")
    database.upgrade()  # of a database that is up to date
    assert stored(database, select(Item.position)) == [0]
