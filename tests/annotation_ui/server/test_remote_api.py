import asyncio
import json
import re
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from anyio import to_thread
from fastapi import FastAPI
from playwright.sync_api import expect
from sqlalchemy import select

from align.core.errors import UserError
from annotation_ui.reports.export import Selection, export
from annotation_ui.server import remote_api
from annotation_ui.server.auth import Auth
from annotation_ui.server.guard import RateLimit
from annotation_ui.server.services import Settings, make_services
from annotation_ui.store import audit
from annotation_ui.store.database import sqlite_url
from annotation_ui.store.importing import NewBatch, import_rows
from annotation_ui.store.schema import ApiToken
from annotation_ui.store.tokens import SCOPES, Tokens
from tests.annotation_ui.pages import open_tab
from tests.annotation_ui.running import Client, add_users, rank_rows, read, stored

ROUTES = (
    ("GET", "/api/v1/batches", None, "read"),
    ("POST", "/api/v1/batches?name=n&task=rank", "", "import"),
    ("POST", "/api/v1/exports", {"record": "rankings"}, "export"),
    ("GET", "/api/v1/exports/rankings-20260101-000000-00000000.jsonl", None, "export"),
    ("GET", "/api/v1/judgments", None, "export"),
)


def new_token(server, *scopes, user_id=None):
    """(name, header of Authorization) of a new token."""
    name = f"t-{secrets.token_hex(4)}"
    token = Tokens(server.database).create(name, scopes or tuple(SCOPES), user_id)
    return name, {"Authorization": f"Bearer {token}"}


def test_each_route_needs_its_scope(any_server):
    nobody = Client(any_server)
    for scope in SCOPES:
        name, header = new_token(any_server, scope)
        for method, path, body, needed in ROUTES:
            status, _, text = nobody(method, path, body, header)
            if needed == scope:
                assert status in (200, 404, 422), (path, status, text)
            else:
                assert status == 403, (path, status)
                assert json.loads(text)["error"].startswith(f"token '{name}' does not have the scope '{needed}'")


def test_without_a_valid_token_there_is_nothing(server, boss):
    name, header = new_token(server)
    nobody = Client(server)
    for method, path, body, _ in ROUTES:
        for headers in (
            {},
            {"Authorization": "Bearer"},
            {"Authorization": "Bearer align_" + "x" * 43},
            {"Authorization": header["Authorization"].replace("Bearer", "Basic")},
            {"Authorization": header["Authorization"][:-1]},
            {"Authorization": "Bearer \xff"},
        ):
            assert nobody(method, path, body, headers)[0] == 401, (path, headers)
        assert boss(method, path, body)[0] == 401, path  # a lead's cookie opens nothing here: no other site can use it
    assert nobody("GET", "/api/v1/batches", None, header)[0] == 200
    assert nobody("GET", "/api/v1/nothing", None, header)[0] == 404
    Tokens(server.database).revoke(name)
    assert nobody("GET", "/api/v1/batches", None, header)[0] == 401


def test_a_token_opens_no_page_and_no_route_of_people(server):
    _, header = new_token(server)
    nobody = Client(server)
    for method, path in (("GET", "/api/tasks"), ("POST", "/api/tasks/rank/next"), ("GET", "/lead/"), ("GET", "/"),
                         ("GET", "/lead/api"), ("GET", "/lead/api/openapi.json"), ("GET", "/api/v1")):  # fmt: skip
        assert nobody(method, path, {} if method == "POST" else None, header)[0] == 401, path
    for path in ("/api/v1/../tasks", "/api/v1//batches"):
        assert nobody("GET", path, None, header)[0] == 400, path


def test_a_token_ends_with_the_access_of_the_lead_who_made_it(any_server):
    any_server.user_id("token-keeper", "lead")
    maker = any_server.user_id("token-maker", "lead")
    auth, nobody = Auth(any_server.database), Client(any_server)
    name, header = new_token(any_server, "read", user_id=maker)

    def works():
        return nobody("GET", "/api/v1/batches", None, header)[0] == 200

    assert works()
    assert read(any_server.database, audit.records)[0]["by"] == "token-maker"
    assert [row["made by"] for row in Tokens(any_server.database).rows() if row["token"] == name] == ["token-maker"]
    auth.set_active("token-maker", False)
    assert not works()
    auth.set_active("token-maker", True)
    auth.set_role("token-maker", "labeler")
    assert not works()
    auth.set_role("token-maker", "lead")
    assert works()


def test_a_token_is_stored_as_a_hash_and_every_use_that_moves_data_is_recorded(any_server):
    name, header = new_token(any_server)
    secret = header["Authorization"].removeprefix("Bearer ")
    nobody = Client(any_server)
    batch = f"remote-{secrets.token_hex(4)}"
    row = json.dumps({"prompt": "p", "responses": ["a", "b"]}) + "\n"
    status, _, text = nobody("POST", f"/api/v1/batches?name={batch}&task=rank", row, header)
    assert (status, json.loads(text)) == (200, {"batch": batch, "items": 1})
    manifest = json.loads(nobody("POST", "/api/v1/exports", {"record": "rankings", "batches": [batch]}, header)[2])
    (token,) = stored(any_server.database, select(ApiToken).where(ApiToken.name == name))
    assert secret not in str({column.name: getattr(token, column.name) for column in ApiToken.__table__.columns})
    assert time.time() - token.last_used_at < 60
    trail = read(any_server.database, audit.records)
    mine = [row for row in trail if row["by"] == f"token {name}" or name in row["detail"]]
    assert [(row["action"], row["by"]) for row in mine] == [
        ("export", f"token {name}"),
        ("import", f"token {name}"),
        ("create token", "shell"),
    ]
    assert manifest["file"]["name"] in mine[0]["detail"]
    (listed,) = [row for row in Tokens(any_server.database).rows() if row["token"] == name]
    assert (listed["scopes"], listed["made by"], listed["valid"]) == ("import, read, export", "shell", True)


@pytest.mark.parametrize(
    ("query", "body", "line"),
    [
        ("name=n&task=nothing", "", "task: Value error, no such task"),
        ("task=rank", "", "name: Field required"),
        ("name=n%00&task=rank", "", "name: Value error, not printable"),
        ("name=n&task=rank&labeler=%00", "", "labeler.0: Value error, not printable"),
        ("name=n&task=rank&labelers_per_item=0", "", "labelers_per_item 0: must be 1 to 1000"),
        ("name=n&task=rank", "", "the file has no rows"),
        ("name=n&task=rank", "{}\n{", "line:1: responses: must be a list of texts"),
        ("name=n&task=rank&labeler=nobody-at-all", '{"prompt": "p", "responses": ["a", "b"]}', "no user 'nobody-at-all'"),
        ("name=n&task=rank&settings=%5B", "", "settings: not JSON"),
        ("name=n&task=demonstrate&settings=%7B%22min_words%22%3A%22x%22%7D", "",
         "settings: unknown name or wrong type for 'min_words'"),
    ],
)  # fmt: skip
def test_a_mistake_in_an_import_is_one_line_and_leaves_nothing(server, query, body, line):
    _, header = new_token(server, "import")
    before = set((server.folder / "uploads").iterdir())
    status, _, text = Client(server)("POST", f"/api/v1/batches?{query}", body, header)
    assert status == 422, text
    assert json.loads(text)["error"].startswith(line)
    assert set((server.folder / "uploads").iterdir()) == before


def test_exports_that_take_long_leave_threads_to_labelers(tmp_path, monkeypatch):
    begun, end = [], threading.Event()

    def slow(*_):
        begun.append(1)
        end.wait(60)
        return {}

    monkeypatch.setattr(remote_api, "export", slow)
    app = FastAPI()
    remote_api.add_remote_api(app, make_services(Settings(sqlite_url(tmp_path), tmp_path)))

    async def with_token(scope, receive, send):  # the guard's part
        scope.setdefault("state", {})["token"] = ApiToken(id=1, name="t", scopes="export")
        await app(scope, receive, send)

    async def many():
        transport = httpx.ASGITransport(with_token)
        async with httpx.AsyncClient(transport=transport, base_url="http://app", timeout=60) as client:
            exports = [asyncio.ensure_future(client.post("/api/v1/exports", json={"record": "rankings"})) for _ in range(45)]
            try:
                while not begun:
                    await asyncio.sleep(0.01)
                await asyncio.wait_for(to_thread.run_sync(lambda: None, abandon_on_cancel=True), 10)
            finally:
                end.set()
            return [(await each).status_code for each in exports]

    with ThreadPoolExecutor(1) as pool:  # playwright's tests leave an event loop running in this thread
        assert pool.submit(asyncio.run, many()).result() == [200] * 45


def test_the_rate_of_a_token_is_limited_and_that_of_another_is_not(server):
    now = [0.0]
    limit = RateLimit(requests=3, seconds=30, clock=lambda: now[0])
    assert [limit.wait(1) for _ in range(5)] == [0, 0, 0, 10, 10]
    assert limit.wait(2) == 0
    now[0] = 10.0
    assert [limit.wait(1), limit.wait(1)] == [0, 10]
    now[0] = 1000.0
    assert [limit.wait(1) for _ in range(4)] == [0, 0, 0, 10]  # never more than the limit at once
    (_, busy), (_, calm) = new_token(server, "read"), new_token(server, "read")
    nobody = Client(server)
    statuses = [nobody("GET", "/api/v1/batches", None, busy) for _ in range(400)]
    refused = next(answer for answer in statuses if answer[0] == 429)
    assert json.loads(refused[2])["error"].startswith("too many requests: wait ")
    assert nobody("GET", "/api/v1/batches", None, calm)[0] == 200


def test_the_page_of_the_api_is_for_leads_and_loads_nothing_from_elsewhere(server, browser, ann):
    assert ann("GET", "/lead/api")[0] == ann("GET", "/lead/api/openapi.json")[0] == 403
    page = server.page(browser, "api-reader", role="lead")
    elsewhere = []
    page.on("request", lambda request: elsewhere.append(request.url) if not request.url.startswith(server.url) else None)
    page.goto("/lead/api")
    expect(page.get_by_text("/api/v1/judgments")).to_be_visible()
    expect(page.locator(".opblock")).to_have_count(len(ROUTES))
    expect(page.get_by_role("button", name="Authorize")).to_be_visible()
    assert [url for url in elsewhere if not url.startswith(("data:", "blob:"))] == []


def test_a_token_has_a_name_and_scopes(database):
    tokens = Tokens(database)
    for name, scopes, line in (
        ("a b", ("read",), "token name 'a b'"),
        ("ok", ("write",), "scope 'write': must be one or more of import, read, export"),
        ("ok", (), "scope '': must be one or more of"),
    ):
        with pytest.raises(UserError, match=line):
            tokens.create(name, scopes)
    tokens.create("ok", ("read",))
    with pytest.raises(UserError, match="'ok'"):
        tokens.create("ok", ("read",))
    tokens.revoke("ok")
    for name, line in (("ok", "token 'ok'"), ("none", "no token 'none'")):
        with pytest.raises(UserError, match=line):
            tokens.revoke(name)


def test_imports_and_exports_of_every_way_are_in_the_trail(database, tmp_path):
    lead, batch = add_users(database, "trail-lead", role="lead")[0], f"b-{secrets.token_hex(3)}"
    import_rows(database, NewBatch(batch, "rank"), rank_rows(2), audit.Actor(lead))
    export(database, Selection("rankings"), tmp_path / "shell.jsonl")
    trail = [(row["action"], row["by"], row["detail"]) for row in read(database, audit.records)]
    assert trail == [
        ("export", "shell", "file shell.jsonl, record rankings, rows 0"),
        ("import", "trail-lead", f"batch {batch}, items 2"),
    ]


def test_a_lead_adds_and_revokes_a_token_on_the_page(any_server, browser):
    page = any_server.lead_page(browser, "token-office")
    panel, name = open_tab(page, "Users"), f"page-{secrets.token_hex(3)}"
    expect(panel.get_by_role("button", name="Revoke")).to_be_hidden()
    panel.get_by_label("Token name").fill(name)
    panel.get_by_label(f"export: {SCOPES['export']}").check()
    panel.get_by_role("button", name="Add token").click()
    result = panel.get_by_label("Token status")
    expect(result).to_have_value(re.compile(rf"^Token {name} \(shown only once\): align_"))
    header = {"Authorization": f"Bearer {result.input_value().rsplit(' ', 1)[1]}"}
    nobody = Client(any_server)
    assert nobody("GET", "/api/v1/judgments", None, header)[0] == 200
    assert nobody("POST", "/api/v1/batches?name=n&task=rank", "", header)[0] == 403
    expect(panel.locator(f'[data-key="{name}"]')).to_contain_text("token-office")
    panel.get_by_role("button", name="Revoke").click()
    expect(result).to_have_value(re.compile(f"evoked.*{name}"))
    assert nobody("GET", "/api/v1/judgments", None, header)[0] == 401
    expect(panel.get_by_text("revoke token").first).to_be_visible()
    panel.get_by_role("button", name="Add token").click()
    expect(page.locator(".toast-body").last).to_contain_text(name)
