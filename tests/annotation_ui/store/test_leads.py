"""What leads may do to each other and to the labelers: no slot taken, no silent overwriting, no lead shut out for good."""

import hashlib
import json
import secrets
import time

import pytest
from sqlalchemy import select, update

from align.core.errors import UserError
from annotation_ui.server.auth import Auth
from annotation_ui.server.headers import COOKIE
from annotation_ui.store import guidelines
from annotation_ui.store.batches import BatchSettings, change_batch
from annotation_ui.store.schema import Assignment, Batch, Item, Judgment, SignIn, User
from tests.annotation_ui.running import add_batch, add_users, do, stored

RANKS = {"ranks": [1, 2, 3, 4]}


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
    request = {"request_id": secrets.token_hex(8), "answer": RANKS, "seconds": 1}
    assert boss("POST", f"/api/assignments/{opened['assignment']}/submit", request)[0] == 200
    assert boss.next() is None
    assert json.loads(boss("POST", f"/api/assignments/{opened['assignment']}/reopen", {})[2]) == {"deciding": True}
    assert json.loads(boss("POST", "/api/decide/rank/next", {})[2])["item"]["assignment"] == opened["assignment"]
    assert ann.next() is not None  # the second item is still there for a labeler


def test_two_leads_do_not_overwrite_each_others_settings(database):
    name = add_batch(database, 3)
    assert change_batch(database, name, BatchSettings(name, 2, 5), version=1) == 2
    with pytest.raises(UserError, match="another lead has changed"):
        change_batch(database, name, BatchSettings(name, 1, 0, False), version=1)
    with database.read() as session:
        batch = session.scalars(select(Batch)).one()
        assert (batch.labelers_per_item, batch.priority, batch.open) == (2, 5, True)
        assert {item.needed for item in session.scalars(select(Item))} == {2}
    with pytest.raises(UserError, match="priority 99999999999"):
        change_batch(database, name, BatchSettings(name, 1, 99_999_999_999), version=2)

    (boss,) = add_users(database, "boss", role="lead")
    first = guidelines.save(database, "rank", "Be fair.", boss, edited=0)
    with pytest.raises(UserError, match="another lead has saved new guidelines"):
        guidelines.save(database, "rank", "Be quick.", boss, edited=0)
    assert guidelines.save(database, "rank", "Be fair and quick.", boss, edited=first) > first
    for text in ("\0", "\ud800", "x" * (guidelines.MAX_LENGTH + 1)):
        with pytest.raises(UserError, match="must be text of at most"):
            guidelines.save(database, "compare", text, boss, edited=0)


def test_a_lead_is_always_left(database):
    auth = Auth(database)
    auth.create_user("ann", "labeler")  # a labeler may be added before the first start
    password = auth.first_lead()
    assert password is not None
    assert auth.sign_in("lead", password, "here")
    assert auth.first_lead() is None
    for shut_out in (lambda: auth.set_active("lead", False), lambda: auth.set_role("lead", "labeler")):
        with pytest.raises(UserError, match="lead is the only lead who can sign in"):
            shut_out()
    auth.set_role("ann", "lead")
    auth.set_active("lead", False)
    with pytest.raises(UserError, match="ann is the only lead who can sign in"):
        auth.set_active("ann", False)
    with database.write() as session:  # as an older version allowed it
        session.execute(update(User).values(active=False))
    with pytest.raises(UserError, match="align annotate activate-user NAME --role lead"):
        auth.first_lead()


def test_the_cookie_lives_as_long_as_the_session(ann):
    assert "set-cookie" not in ann("GET", "/api/tasks")[1]
    with ann.server.database.write() as session:  # in the second half of its twelve hours
        mine = hashlib.sha256((ann.token or "").encode()).hexdigest()
        session.execute(update(SignIn).where(SignIn.token_hash == mine).values(expires_at=time.time() + 60))
    cookie = ann("GET", "/api/tasks")[1]["set-cookie"]
    assert cookie == f"{COOKIE}={ann.token}; HttpOnly; Max-Age=43200; Path=/; SameSite=lax"
    assert "set-cookie" not in ann("GET", "/api/tasks")[1]
    assert "Max-Age=0" in ann("POST", "/logout")[1]["set-cookie"]
    assert ann("GET", "/api/tasks")[0] == 401


def _id(client):
    signed_in = Auth(client.server.database).signed_in(client.token)
    return signed_in.user.id


def test_a_new_version_of_guidelines_is_unread_until_it_is_opened(database, judgments):
    ann, boss = add_users(database, "ann", "boss")

    def unread():
        with database.read() as session:
            newest = guidelines.unread(session, "rank", ann)
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
    do(judgments, ann, "rank", {**RANKS})
    with database.read() as session:
        assert session.scalars(select(Judgment)).one().guideline_id == second
    with pytest.raises(UserError, match="nothing has changed"):
        guidelines.save(database, "rank", "Be kind and brief.", boss, edited=second)
    with database.read() as session:
        listed = [(number, each.text, *more) for number, each, *more in guidelines.versions(session, "rank")]
    assert listed == [(2, "Be kind and brief.", "boss", 0), (1, "Be kind.", "boss", 1)]
