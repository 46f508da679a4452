"""Sign-in by a company's proxy, and each way to pretend to be it. The proxy is 127.0.0.2, any other client 127.0.0.1."""

import http.client
import json
import secrets

import pytest
from starlette.datastructures import Headers

from annotation_ui.server.auth import Auth
from annotation_ui.server.headers import COOKIE
from annotation_ui.server.proxy import ProxySignIn, proxy_sign_in
from annotation_ui.store.tokens import Tokens
from tests.annotation_ui.conftest import new_database
from tests.annotation_ui.running import Server

PROXY, OTHER = "127.0.0.2", "127.0.0.1"
NAME = "ann@example.org"


@pytest.fixture(scope="module", params=["sqlite", "postgresql --https"])
def behind(request, tmp_path_factory):
    """An app behind the proxy, with the users ann (a labeler), boss (a lead) and gone (deactivated)."""
    kind, *more = request.param.split()
    folder = tmp_path_factory.mktemp("proxy")
    server = Server(new_database(request, kind, folder), folder)
    auth = Auth(server.database)
    auth.create_user("boss", "lead", "password-of-boss")
    for name in (NAME, "gone"):
        auth.create_user(name, "labeler", "password-of-labeler")
    auth.set_active("gone", False)
    with server.started("--proxy_user_header", "X-Remote-User", "--proxy_address", PROXY, *more):
        yield server


def ask(server, source, *headers, method="GET", path="/api/tasks", body=None):
    """(status, text) of a request from an address with these (name, value) headers, which may repeat a name."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30, source_address=(source, 0))
    connection.putrequest(method, path)
    for name, value in headers:
        connection.putheader(name, value)
    if body is not None:
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(len(body)))
    connection.endheaders(body)
    response = connection.getresponse()
    text = response.read().decode(errors="replace")
    connection.close()
    return response.status, text


def test_the_proxy_signs_users_in_with_their_own_role(behind):
    status, text = ask(behind, PROXY, ("X-Remote-User", NAME))
    assert (status, json.loads(text)["user"], json.loads(text)["lead"]) == (200, NAME, False)
    assert ask(behind, PROXY, ("x-remote-user", NAME), path="/lead/")[0] == 403
    assert ask(behind, PROXY, ("X-Remote-User", "boss"), path="/lead/")[0] == 200
    assert ask(behind, PROXY, ("X-Remote-User", NAME), path="/")[0] == 200  # the labelers' page, without a password
    assert ask(behind, PROXY, ("X-Remote-User", NAME), method="POST", path="/api/tasks/rank/next", body=b"{}")[0] == 200


def test_the_header_of_another_address_counts_for_nothing(behind):
    boss = ("X-Remote-User", "boss")
    for more in (
        (),
        (("X-Forwarded-For", PROXY),),
        (("X-Forwarded-For", f"{PROXY}, {PROXY}"), ("X-Forwarded-Proto", "https")),
        (("X-Real-IP", PROXY), ("Forwarded", f"for={PROXY}"), ("Client-IP", PROXY)),
    ):
        assert ask(behind, OTHER, boss, *more)[0] == 401, more
        assert ask(behind, OTHER, boss, *more, path="/lead/config")[0] == 401, more


def test_a_user_of_the_proxy_cannot_take_another_name(behind):
    two = (("X-Remote-User", "boss"), ("X-Remote-User", NAME))  # one from the browser, one that the proxy added
    assert ask(behind, PROXY, *two)[0] == ask(behind, PROXY, *two[::-1])[0] == 400
    for smuggled in (("X_Remote_User", "boss"), ("X-Remote-User-", "boss"), ("Remote-User", "boss")):
        status, text = ask(behind, PROXY, ("X-Remote-User", NAME), smuggled)
        assert (status, json.loads(text)["user"]) == (200, NAME)
    with_session = ("Cookie", f"{COOKIE}={behind.token('boss')}")
    assert json.loads(ask(behind, PROXY, ("X-Remote-User", NAME), with_session)[1])["user"] == NAME


def test_an_unknown_or_deactivated_user_gets_a_line_and_no_account(behind):
    for name in ("stranger", "gone", "", "ann", "Ann@example.org", f"{NAME}, boss", f"boss,{NAME}", "a\tb", "x" * 65, "%00"):
        status, text = ask(behind, PROXY, ("X-Remote-User", name))
        assert (status, json.loads(text)["error"]) == (
            403,
            "the proxy names a user that is unknown or deactivated here: ask a lead",
        ), name
    page = ask(behind, PROXY, ("X-Remote-User", "stranger"), ("Accept", "text/html"), path="/")
    assert page[0] == 403
    assert "The proxy names a user that is unknown" in page[1]
    assert "password" not in page[1]


def test_other_ways_to_sign_in_stay(behind):
    session = ("Cookie", f"{COOKIE}={behind.token('boss')}")
    for source in (PROXY, OTHER):
        assert json.loads(ask(behind, source, session)[1])["user"] == "boss"
    assert ask(behind, PROXY)[0] == 401  # a request of the proxy without a user is nobody's
    token = Tokens(behind.database).create(secrets.token_hex(4), ("read",))
    assert ask(behind, PROXY, ("X-Remote-User", "boss"), path="/api/v1/batches")[0] == 401
    assert ask(behind, OTHER, ("Authorization", f"Bearer {token}"), path="/api/v1/batches")[0] == 200


def test_a_request_from_another_site_is_refused_behind_the_proxy_too(behind):
    headers = (("X-Remote-User", NAME), ("Origin", "https://evil.example"))
    assert ask(behind, PROXY, *headers, method="POST", path="/api/tasks/rank/next", body=b"{}")[0] == 403


def test_it_is_off_by_default(server):
    for source in (PROXY, OTHER):
        assert ask(server, source, ("X-Remote-User", "lead"), ("X-Forwarded-User", "lead"))[0] == 401


def test_addresses_are_compared_as_addresses():
    sign_in = proxy_sign_in("X-User", "10.0.0.1")
    headers = Headers({"X-User": "ann"})
    for peer, named in (("10.0.0.1", ["ann"]), ("::ffff:10.0.0.1", ["ann"]), ("10.0.0.10", []), (None, []), ("", [])):
        assert sign_in.names({"align.peer": peer}, headers) == named, peer
    assert sign_in.names({"client": ("10.0.0.1", 1)}, headers) == []  # what a header may have replaced
    assert proxy_sign_in("", "") is None
    assert isinstance(sign_in, ProxySignIn)
