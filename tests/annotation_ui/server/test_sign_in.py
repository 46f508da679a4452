import hashlib
import re
import time
from urllib.parse import quote

import pytest
from sqlalchemy import select, update

from align.core.errors import UserError
from annotation_ui import cli
from annotation_ui.reports.browsing import Filter, browse_items, browse_judgments
from annotation_ui.reports.labeler_report import items_behind_reliability
from annotation_ui.server.auth import Auth
from annotation_ui.server.headers import COOKIE
from annotation_ui.store.forget import forget
from annotation_ui.store.schema import FailedSignIn, SignIn, User
from tests.annotation_ui.running import Client, Server, add_batch, add_users, do, form, read, stored


def test_without_a_session_there_is_nothing(server):
    nobody = Client(server)
    for method, path in (("GET", "/"), ("GET", "/config"), ("GET", "/api/tasks"), ("POST", "/api/tasks/rank/next"),
                         ("GET", "/lead/"), ("GET", "/lead/config"), ("POST", "/lead/gradio_api/queue/join"),
                         ("POST", "/lead/gradio_api/upload"), ("GET", "/password"),
                         ("POST", "/api/preview")):  # fmt: skip
        assert nobody(method, path, {})[0] == 401, path
    status, headers, _ = nobody("GET", "/?task=rank", headers={"Accept": "text/html"})
    assert (status, headers["location"]) == (303, "/login?next=/%3Ftask%3Drank")
    for token in ("", "x", "a" * 5000, "' OR 1=1 --"):
        assert Client(server, token)("GET", "/api/tasks")[0] == 401


@pytest.mark.parametrize(
    "foreign",
    ['prefs={"a":"b"}', "prefs=a, b", 'prefs=a"b', "prefs[a]=b", "a/b=c", "word", "grüß=gott", "a=\x80", "a=(b)", "=", ";;"],
)
def test_a_cookie_of_another_program_shuts_nobody_out(ann, foreign):
    """Any program on this host, or on a host above it, can set one, in front of the session's or behind it."""
    session = f"{COOKIE}={ann.token}"
    for cookies in (f"{foreign}; {session}", f"{session}; {foreign}"):
        assert Client(ann.server)("GET", "/api/tasks", headers={"Cookie": cookies})[0] == 200, cookies


@pytest.mark.parametrize("name", ["labeler-0123abcd", "Labeler-0123ABCD"])
def test_a_pseudonym_is_no_name(database, name):
    with pytest.raises(UserError, match=f"user name '{name}'"):
        Auth(database).create_user(name, "labeler")
    Auth(database).create_user("labeler-7", "labeler")


def test_names_are_of_any_alphabet_and_of_one_look(database):
    auth = Auth(database)
    for name in ("Zoë", "Łukasz", "Дмитрий", "محمد", "李小龙", "さくら", "ann", "ann@example.org",
                 "मीना", "வதமிழ்", "วันดี", "মীনা"):  # fmt: skip
        password = auth.create_user(name, "labeler")
        assert auth.sign_in(name, password, "here") is not None
    assert auth.sign_in("Zoe\u0308", auth.set_password("Zoe\u0308"), "here") is not None  # as another keyboard types it
    assert auth.named_by_proxy("Łukasz".encode().decode("latin-1")).user.name == "Łukasz"  # as headers are read
    for name, line in (
        ("Ann", "user 'ann'"),
        ("ａｎｎ", "user 'ann'"),  # full width
        ("Zoe\u0308", "user 'Zoë'"),
        ("Аnn", "letters of one alphabet"),  # the first letter is Cyrillic
        ("a b", "letters of one alphabet"),
        ("a\u202eb", "letters of one alphabet"),  # turns the direction of writing
        ("", "letters of one alphabet"),
        ("x" * 65, "letters of one alphabet"),
        *((f"ann{mark}", "letters of one alphabet") for mark in "\u034f\u180b\ufe0e\ufe0f\U000e0100"),  # without a shape
    ):
        with pytest.raises(UserError, match=line):
            auth.create_user(name, "labeler")
    auth.create_user("axo", "labeler")
    with pytest.raises(UserError, match="user 'axo'"):
        auth.create_user("ахо", "labeler")  # Cyrillic only


def test_the_cookie_is_out_of_reach_and_next_stays_here(server):
    Auth(server.database).create_user("sec-cookie", "labeler", "right-password")
    nobody = Client(server)
    for target, lands in (("/?task=rank", "/?task=rank"), ("https://evil.example", "/"), ("//evil.example", "/"),
                          ("/\\evil.example", "/")):  # fmt: skip
        body, headers = form(name="sec-cookie", password="right-password")
        status, answer, _ = nobody("POST", f"/login?next={quote(target)}", body, headers)
        assert (status, answer["location"]) == (303, lands)
        assert "httponly" in answer["set-cookie"].lower()
        assert "samesite=lax" in answer["set-cookie"].lower()


def test_sessions_expire_and_end_with_sign_out_a_new_password_or_a_shut_door(server):
    auth = Auth(server.database)
    auth.create_user("sec-session", "labeler", "first-password")
    (user_id,) = [auth.signed_in(auth.sign_in("sec-session", "first-password", "test")).user.id]

    def works(token):
        return Client(server, token)("GET", "/api/tasks")[0] == 200

    token = auth.start_session(user_id)
    assert works(token)
    with server.database.write() as session:
        session.execute(update(SignIn).where(SignIn.user_id == user_id).values(expires_at=time.time() - 1))
    assert not works(token)
    token = auth.start_session(user_id)
    status, _, page = Client(server, token)("GET", "/logout")  # who types the address is asked, and told the truth
    assert (status, '<form method="post">' in page) == (200, True)
    assert works(token)
    assert Client(server, token)("POST", "/logout")[0] == 303
    assert not works(token)
    token = auth.start_session(user_id)
    auth.set_password("sec-session", "second-password")
    assert not works(token)
    token = auth.start_session(user_id)
    auth.set_active("sec-session", False)
    assert not works(token)
    assert auth.sign_in("sec-session", "second-password", "test") is None


def test_the_first_start_makes_one_password_and_prints_it_once(tmp_path, capsys):
    server = Server(f"sqlite:///{tmp_path / 'new.db'}", tmp_path)
    add_users(server.database, "ann")  # as the quick start does, before there is a lead
    with server.started("--https"):
        printed = re.search(r"sign in as  lead  with the password  (\S+)", (tmp_path / "log").read_text())
        assert printed
        nobody = Client(server)
        assert nobody("POST", "/login", *form(name="lead", password="lead"))[0] == 401
        status, headers, _ = nobody("POST", "/login", *form(name="lead", password=printed[1]))
        assert status == 303
        assert "secure" in headers["set-cookie"].lower()
        Auth(server.database).create_user("ben", "labeler")
        body, kind = form(name="ben", password="wrong")  # behind a proxy, the address is the one that it says
        for address, says in (("10.0.0.1", [401] * 5 + [429]), ("10.0.0.2", [401])):
            assert [nobody("POST", "/login", body, {**kind, "X-Forwarded-For": address})[0] for _ in says] == says
    assert cli.main(["--database", server.database_url, "create-user", "lead"]) == 2
    assert "user 'lead'" in capsys.readouterr().err
    (hashed,) = stored(server.database, select(User.password_hash).where(User.role == "lead"))
    assert hashed.startswith("$argon2id$")
    server.database.close()


TYPED = "Jose\u0301"  # in two characters, as some keyboards and file systems write it


def test_every_lookup_finds_the_name_as_another_keyboard_types_it(database, judgments):
    Auth(database).create_user(TYPED, "lead")
    (ann,) = add_users(database, "ann", role="lead")
    add_batch(database, 2, labelers_per_item=2, labelers=(TYPED, "ann"))
    (jose,) = stored(database, select(User.id).where(User.name == "José"))
    answer = {"ranks": [1, 2, 3, 4]}
    for user in (jose, ann):
        do(judgments, user, "rank", answer)
    assert [row["labeler"] for row in read(database, browse_judgments, Filter(labeler=TYPED))[0]] == ["José"]
    assert len(read(database, browse_items, Filter(labeler=TYPED))[0]) == 1
    assert [row["this labeler"] for row in read(database, items_behind_reliability, "rank", TYPED)] == ["A > B > C > D"]
    with database.write() as session:
        session.add(FailedSignIn(name="José", address="here"))
    forget(database, TYPED)
    assert stored(database, select(FailedSignIn)) == stored(database, select(User).where(User.name == "José")) == []


def test_a_lead_is_always_left(database):
    auth = Auth(database)
    auth.create_user("ann", "labeler")  # a labeler may be added before the first start
    password = auth.first_lead()
    assert password is not None
    assert auth.sign_in("lead", password, "here")
    assert auth.first_lead() is None
    for shut_out in (lambda: auth.set_active("lead", False), lambda: auth.set_role("lead", "labeler")):
        with pytest.raises(UserError, match="lead is the only"):
            shut_out()
    auth.set_role("ann", "lead")
    auth.set_active("lead", False)
    with pytest.raises(UserError, match="ann is the only"):
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
