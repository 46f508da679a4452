import json

import pytest
from sqlalchemy import select, text, update
from sqlalchemy.exc import DatabaseError

from align.core.errors import UserError
from annotation_ui.reports.export import Selection, records, rows_to_export
from annotation_ui.server.auth import Auth
from annotation_ui.store import audit, rule_sets
from annotation_ui.store.forget import forget, without_remarks
from annotation_ui.store.schema import Assignment, Judgment, User
from annotation_ui.store.tokens import Tokens
from tests.annotation_ui.running import add_batch, add_users, do, read, stored

SECRET = "My-sister-Grete-told-me-so"
JUDGMENTS = select(Judgment.answer)


@pytest.fixture
def worked(database, judgments):
    """A database in which ann and ben have judged items of several tasks with remarks; (database, ann, ben)."""
    ann, ben = add_users(database, "ann-smith", "ben")
    with database.write() as session:
        rule_sets.store_shipped(session)
    rows = [("t", {"prompt": "p", "responses": ["a", "b"], "id": f"i{n}"}) for n in range(2)]
    for task in ("rank", "compare", "demonstrate"):
        add_batch(database, rows, task, labelers_per_item=2)
    rule = [("t", {"prompt": "p", "response": "r", "id": "rule-item"})]
    add_batch(database, rule, "rules", labelers_per_item=2, rule_set="sparrow-dialogue")
    wrong = [("t", {"prompt": "p", "response": "all wrong", "id": "span-item"})]
    add_batch(database, wrong, "spans", labelers_per_item=2, settings={"error_types": "Wrong"})
    names = [each["id"] for each in read(database, rule_sets.newest, "sparrow-dialogue").content["rules"]]
    verdicts = {name: {"verdict": "follows", "note": f"{SECRET} {name}"} for name in names}
    for user in (ann, ben):
        ranked = {"ranks": [1, 2], "comment": SECRET}
        do(judgments, user, "rank", ranked)
        do(judgments, user, "compare", {"choice": "A", "comment": SECRET})
        do(judgments, user, "demonstrate", {"completion": f"answer of {user}"})
        do(judgments, user, "rules", {"verdicts": verdicts})
        do(judgments, user, "spans", {"spans": [{"start": 4, "end": 9, "type": "Wrong", "note": SECRET}]})
        skipped = judgments.leases.next(user, "rank")
        judgments.skip(user, skipped.id, f"skip-request-{user}", SECRET, 1.0)
        judgments.save_draft(user, judgments.leases.next(user, "compare").id, {"state": SECRET}, 1)
    return database, ann, ben


def everything(database):
    return {kind: rows_to_export(database, Selection(kind)) for kind in records()}


def test_the_name_and_the_remarks_go_and_the_judgments_stay(worked):
    database, ann, _ = worked
    before = everything(database)
    (pseudonym,), count = stored(database, select(User.pseudonym).where(User.id == ann)), len(stored(database, JUDGMENTS))
    assert forget(database, "ann-smith") == (pseudonym, 5)  # rank, compare, rules, spans and the skip
    after = everything(database)
    for kind, rows in before.items():
        for row in rows:
            if row["labeler"] == pseudonym:
                row.pop("comment", None)
                row.pop("note", None)
                row.update({"reason": ""} if "reason" in row else {})
                for span in row.get("spans", ()):
                    span["note"] = ""
        assert after[kind] == rows, kind
    assert len(stored(database, JUDGMENTS)) == count
    assert SECRET not in json.dumps(stored(database, JUDGMENTS.where(Judgment.user_id == ann)))
    assert stored(database, select(Assignment.draft).where(Assignment.user_id == ann)) == [None] * 7
    (user,) = stored(database, select(User).where(User.id == ann))
    assert (user.name, user.active) == (pseudonym, False)
    trail = read(database, audit.records)
    assert (trail[0]["action"], trail[0]["by"]) == ("forget user", "shell")
    assert "ann-smith" not in str(trail)
    assert pseudonym in trail[0]["detail"]
    with pytest.raises(UserError, match="no user 'ann-smith'"):
        forget(database, "ann-smith")


def test_the_database_still_refuses_changes_afterwards(worked):
    database, ann, _ = worked
    forget(database, "ann-smith")
    for change in (
        update(Judgment).values(seconds=1.0),
        update(Judgment).where(Judgment.user_id == ann).values(answer={}),
        text("DELETE FROM judgments"),
    ):
        with pytest.raises(DatabaseError, match="append-only"), database.write() as session:
            session.execute(change)


def test_a_failure_in_the_middle_changes_nothing(worked, monkeypatch):
    database, ann, _ = worked
    monkeypatch.setattr(audit, "record", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        forget(database, "ann-smith")
    monkeypatch.undo()
    assert stored(database, select(User.name).where(User.id == ann)) == ["ann-smith"]
    assert SECRET in json.dumps(stored(database, JUDGMENTS.where(Judgment.user_id == ann)))
    with pytest.raises(DatabaseError, match="append-only"), database.write() as session:
        session.execute(update(Judgment).values(seconds=1.0))


@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)  # PostgreSQL overwrites old rows when it vacuums
def test_nothing_of_it_is_left_in_the_files_of_sqlite(worked, tmp_path):
    database, _, _ = worked
    forget(database, "ben")
    forget(database, "ann-smith")
    for path in tmp_path.glob("annotations.db*"):
        content = path.read_bytes()
        assert SECRET.encode() not in content, path
        assert b"ann-smith" not in content, path


@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
def test_a_reader_that_keeps_the_log_is_reported_and_the_command_can_run_again(worked, tmp_path, monkeypatch):
    database, ann, _ = worked
    monkeypatch.setattr("annotation_ui.store.forget.LOG_WAIT_S", 0.2)
    with database.read() as reader:  # as a long export
        pseudonym = reader.get_one(User, ann).pseudonym
        with pytest.raises(UserError, match=f"still holds the old text: run `align annotate forget {pseudonym}` when no"):
            forget(database, "ann-smith")
    assert b"ann-smith" in (tmp_path / "annotations.db-wal").read_bytes()
    assert forget(database, pseudonym) == (pseudonym, 0)
    for path in tmp_path.glob("annotations.db*"):
        assert b"ann-smith" not in path.read_bytes(), path


def test_access_ends_and_a_lead_is_left(database):
    auth = Auth(database)
    password = auth.create_user("boss", "lead")
    with pytest.raises(UserError, match="boss is the only"):
        forget(database, "boss")
    auth.create_user("other", "lead")
    session = auth.sign_in("boss", password, "here")
    (boss,) = stored(database, select(User.id).where(User.name == "boss"))
    token = Tokens(database).create("t", ("read",), boss)
    pseudonym, blanked = forget(database, "boss")
    assert blanked == 0
    assert auth.signed_in(session) is None
    assert auth.sign_in(pseudonym, password, "here") is None
    assert Tokens(database).check(token) is None


def test_remarks_at_any_depth_but_not_in_what_was_judged():
    answer = {
        "comment": "c",
        "verdicts": {"note": {"verdict": "follows", "note": "n"}},
        "messages": [{"role": "user", "content": "x", "note": "stays"}],
        "completion": "stays",
        "ranks": [1, 2],
    }
    blank = without_remarks(answer)
    assert blank == {**answer, "comment": "", "verdicts": {"note": {"verdict": "follows", "note": ""}}}
