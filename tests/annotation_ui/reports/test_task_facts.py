import secrets
from functools import partial

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sqlalchemy import select

from annotation_ui.reports import overview, task_facts
from annotation_ui.reports.labeler_report import items_behind_reliability, labeler_rows
from annotation_ui.reports.ratings import ratings_by_model
from annotation_ui.store.batches import delete_batch, restore_batch, set_open
from annotation_ui.store.schema import Assignment
from annotation_ui.tasks import TASKS
from tests.annotation_ui.running import add_batch, add_users, rank_rows, read, stored

NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)  # each example fills a database
RANKED = st.sampled_from([[1, 2, 3], [2, 1, 3], [1, 1, 2], [3, 2, 1]])
STEPS = st.tuples(
    st.sampled_from(["submit", "submit", "change", "undo", "skip", "decide", "delete"]), st.integers(0, 2), RANKED
)


def tables(database, labeler):
    """The lead's tables of Rank."""
    reports = [
        *(partial(report, task="rank") for report in (overview.coefficients, overview.disagreements, labeler_rows)),
        *(ratings_by_model, partial(items_behind_reliability, task="rank", labeler=labeler)),
    ]
    return [read(database, report) for report in reports]


def answer(judgments, user, assignment, ranks):
    given = {"ranks": ranks, "ratings": [ranks[0], None, 7], "flags": [[], [], []]}
    shown = TASKS["rank"].shown(given, assignment.shown_order)
    judgments.submit(user, assignment.id, secrets.token_hex(8), shown, 3.0)


@settings(max_examples=8, deadline=None, phases=NO_SHRINKING, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(STEPS, min_size=4, max_size=14))
def test_tables_that_are_updated_equal_tables_from_all_judgments(database, judgments, steps):
    names = [secrets.token_hex(8) for _ in range(4)]
    labelers, (lead,) = add_users(database, *names[:3]), add_users(database, names[3], role="lead")
    rows = rank_rows(5, 3, names[0])
    rows[0][1]["gold"] = {"ranks": [1, 2, 3]}
    batch = add_batch(database, rows, labelers_per_item=3, labelers=tuple(names[:3]), settings={"attention_every": 2})
    for step, number, ranks in steps:
        user = labelers[number]
        mine = stored(database, select(Assignment).where(Assignment.user_id == user, Assignment.state == "done"))
        if step in ("submit", "skip"):
            opened = judgments.leases.next(user, "rank")
            if opened is not None and step == "submit":
                answer(judgments, user, opened, ranks)
            elif opened is not None and opened.current_id is None:
                judgments.skip(user, opened.id, secrets.token_hex(8), "", 1.0)
        elif step == "undo":
            judgments.undo(user, "rank", secrets.token_hex(8))
        elif mine and step == "delete":
            delete_batch(database, batch)
            tables(database, names[0])
            restore_batch(database, batch)
            set_open(database, batch, True)
        elif mine and step == "change":
            answer(judgments, user, judgments.reopen(user, mine[-1].id), ranks)
        elif mine and step == "decide":
            answer(judgments, lead, judgments.leases.adjudicate(lead, mine[-1].item_id), ranks)
        updated = tables(database, names[0])
        task_facts._FACTS.clear()
        assert updated == tables(database, names[0])


def test_a_judgment_that_becomes_visible_late_is_counted(database, judgments):
    """PostgreSQL gives out ids before transactions end."""
    add_batch(database, rank_rows(3, 3))
    ann, bob = add_users(database, "ann", "bob")
    answer(judgments, ann, judgments.leases.next(ann, "rank"), [1, 2, 3])
    read(database, labeler_rows, "rank")
    with database.read() as session, task_facts.task_facts(session, "rank") as facts:
        facts._newest += 5  # as if a higher id had been seen
    answer(judgments, bob, judgments.leases.next(bob, "rank"), [1, 2, 3])
    assert {row["labeler"]: row["judgments"] for row in read(database, labeler_rows, "rank")} == {"ann": 1, "bob": 1}
