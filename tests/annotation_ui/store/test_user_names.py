"""A user name is found in every Unicode form in which it is typed."""

from sqlalchemy import select

from annotation_ui.reports.browsing import Filter, browse_items, browse_judgments
from annotation_ui.reports.labeler_report import items_behind_reliability
from annotation_ui.server.auth import Auth
from annotation_ui.store.forget import forget
from annotation_ui.store.schema import FailedSignIn, User
from annotation_ui.store.users import normal_name, stored_name
from tests.annotation_ui.running import add_batch, add_users, do

TYPED = "Jose\u0301"  # in two characters, as some keyboards and file systems write it


def test_a_name_with_a_mark_that_cannot_be_seen_is_refused():
    for mark in "\u034f\u180b\ufe0e\ufe0f\U000e0100":
        assert normal_name(f"ann{mark}") == ""
    assert stored_name("a name from elsewhere") == "a name from elsewhere"


def test_every_lookup_finds_the_name_as_another_keyboard_types_it(database, judgments):
    Auth(database).create_user(TYPED, "lead")
    (ann,) = add_users(database, "ann", role="lead")
    add_batch(database, 2, labelers_per_item=2, labelers=(TYPED, "ann"))
    with database.read() as session:
        jose = next(user for user in session.scalars(select(User.id).where(User.name == "José")))
    answer = {"ranks": [1, 2, 3, 4]}
    for user in (jose, ann):
        do(judgments, user, "rank", answer)
    with database.read() as session:
        assert [row["labeler"] for row in browse_judgments(session, Filter(labeler=TYPED))[0]] == ["José"]
        assert len(browse_items(session, Filter(labeler=TYPED))[0]) == 1
        assert [row["this labeler"] for row in items_behind_reliability(session, "rank", TYPED)] == ["A > B > C > D"]
    with database.write() as session:
        session.add(FailedSignIn(name="José", address="here"))
    forget(database, TYPED)
    with database.read() as session:
        assert session.scalars(select(FailedSignIn)).all() == []
        assert session.scalars(select(User.id).where(User.name == "José")).all() == []
