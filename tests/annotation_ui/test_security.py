"""Each attack as a test, through HTTP against the running app or in a real browser."""

from __future__ import annotations

import http.client
import json
import re
import secrets
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from playwright.sync_api import Browser, expect
from sqlalchemy import update

from annotation_ui.auth import FAILURES, Auth
from annotation_ui.database import Database
from annotation_ui.guard import COOKIE, MAX_BODY
from annotation_ui.markdown import to_html
from annotation_ui.schema import SignIn

from .running import ROOT, Server

pytestmark = pytest.mark.timeout(120)

HOSTILE = """<script>window.pwned=1</script><img src=x onerror="window.pwned=2">
[click](javascript:window.pwned=3) ![](http://127.0.0.1:9/leak.png) <svg onload=window.pwned=4>
<iframe srcdoc="<script>parent.pwned=5</script>"></iframe> ${window.pwned=6} {{window.pwned=7}}
<style>*{display:none}</style>"""


@dataclass
class Client:
    """Raw requests of one user: nothing tidies the path or adds a header."""

    server: Server
    token: str | None = None

    def __call__(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=30)
        sent = {"Content-Type": "application/json", **(headers or {})}
        if self.token:
            sent["Cookie"] = f"{COOKIE}={self.token}"
        content = body if isinstance(body, str | bytes | None) else json.dumps(body)
        connection.request(method, path, content, sent)
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace")
        connection.close()
        return answer.status, {key.lower(): value for key, value in answer.getheaders()}, text

    def next(self, task: str = "rank") -> dict[str, Any]:
        status, _, text = self("POST", f"/api/tasks/{task}/next", {})
        assert status == 200, text
        return json.loads(text)["item"]


def form(**fields: str) -> tuple[str, dict[str, str]]:
    return urlencode(fields), {"Content-Type": "application/x-www-form-urlencoded"}


@pytest.fixture
def ann(server: Server) -> Client:
    return Client(server, server.token("sec-ann"))


@pytest.fixture
def bob(server: Server) -> Client:
    return Client(server, server.token("sec-bob"))


@pytest.fixture
def boss(server: Server) -> Client:
    return Client(server, server.token("sec-boss", "lead"))


def test_hostile_texts_show_as_text_and_nothing_runs(server: Server, browser: Browser) -> None:
    row = {"prompt": HOSTILE, "responses": [HOSTILE, f"# ok\n{HOSTILE}"], "model": HOSTILE, "id": HOSTILE}
    server.add_batch([("t", row)], name=f"<img src=x onerror=window.pwned=8>{secrets.token_hex(2)}", priority=1)
    page = server.page(browser, "sec-reader")
    outside: list[str] = []
    page.on("request", lambda request: None if request.url.startswith(server.url) else outside.append(request.url))
    page.goto("/?task=rank")
    page.wait_for_selector(".card")
    assert page.evaluate("window.pwned") is None
    assert page.locator(".workbench :is(img, svg, script, iframe, style, [onerror], [onload])").count() == 0
    assert page.locator('.workbench a[href^="javascript"]').count() == 0
    expect(page.locator(".card").first).to_contain_text("window.pwned=1")
    lead = server.page(browser, "sec-boss", "lead")
    lead.on("request", lambda request: None if request.url.startswith(server.url) else outside.append(request.url))
    lead.goto("/lead/")
    expect(lead.get_by_text("<img src=x").locator("visible=true").first).to_be_visible()
    assert lead.evaluate("window.pwned") is None
    assert not [url for url in outside if not url.startswith(("data:", "blob:"))]
    page.context.close()
    lead.context.close()


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=st.sampled_from(list("<>&\"'`=/()[]!#*_-: \n\tjavscriptonloadsgmhf")), max_size=120))
def test_rendered_markdown_never_holds_active_content(text: str) -> None:
    html = to_html(text)
    tags = set(re.findall(r"<\s*/?\s*([a-z0-9]+)", html))
    assert not tags & {"script", "img", "svg", "iframe", "style", "object", "embed", "form", "input", "math"}
    for tag in re.findall(r"<[a-z][^>]*>", html):
        assert not re.search(r"\son\w+\s*=", tag)
    assert not re.search(r'href="\s*(javascript|data|vbscript):', html, re.IGNORECASE)


def test_nobody_reads_or_changes_anothers_work_through_any_route(ann: Client, bob: Client) -> None:
    ann.server.add_batch(3)
    mine = ann.next()["assignment"]
    assert ann("PUT", f"/api/assignments/{mine}/draft", {"draft": {"state": {}}, "sequence": 1})[0] == 200
    handed = {"request_id": secrets.token_hex(8), "answer": {"ranks": [1, 2, 3, 4]}, "seconds": 1}
    for method, path, body in (
        ("PUT", f"/api/assignments/{mine}/draft", {"draft": {}, "sequence": 99}),
        ("POST", f"/api/assignments/{mine}/submit", handed),
        ("POST", f"/api/assignments/{mine}/skip", handed),
        ("POST", f"/api/assignments/{mine}/say", {"text": "hello"}),
        ("GET", f"/api/assignments/{mine}/transcript", None),
        ("POST", "/api/tasks/rank/undo", {"request_id": secrets.token_hex(8), "assignment": mine}),
    ):
        status, _, text = bob(method, path, body)
        assert status == 404, (path, text)
        assert "Prompt" not in text
    assert json.loads(bob("GET", "/api/history")[2]) == []
    assert ann("POST", f"/api/assignments/{mine}/submit", handed)[0] == 200
    assert bob("POST", f"/api/assignments/{bob.next()['assignment']}/submit", handed)[0] == 422  # ann's request id


def test_gradio_offers_a_labeler_nothing(ann: Client) -> None:
    for path in ("/lead", "/lead/", "/lead/config", "/lead/gradio_api/info",
                 "/lead/gradio_api/queue/data?session_hash=x",
                 "/lead/gradio_api/file=/etc/passwd", "/lead/monitoring", "/lead/gradio_api/runs"):  # fmt: skip
        assert ann("GET", path)[0] == 403, path
    join = {"data": ["rank"], "fn_index": 0, "session_hash": "abc", "trigger_id": 1}
    for path in ("/lead/gradio_api/queue/join", "/lead/gradio_api/call/show", "/lead/gradio_api/run/predict",
                 "/lead/gradio_api/upload", "/lead/gradio_api/component_server"):  # fmt: skip
        assert ann("POST", path, join)[0] == 403, path
    for path in ("/gradio_api/queue/join", "/gradio_api/call/show", "/gradio_api/upload",
                 "/gradio_api/component_server", "/gradio_api/vibe-edit", "/gradio_api/reset", "/"):  # fmt: skip
        assert ann("POST", path, join)[0] == 404, path
    for path in ("/gradio_api/file=/etc/passwd", "/gradio_api/file/etc/passwd", "/gradio_api/proxy=http://127.0.0.1/",
                 "/monitoring", "/gradio_api/queue/data?session_hash=x", "/gradio_api/info"):  # fmt: skip
        assert ann("GET", path)[0] in (400, 404), path
    config = json.loads(ann("GET", "/config")[2])
    assert config["dependencies"] == []


@pytest.mark.parametrize(
    "path", ["/lead%2fconfig", "//lead/config", "/ui/../lead/config", "/ui/%2e%2e/lead/config", "/./lead/config",
             "/lead/./config", "/assets/..%2f..%2flead/config", "/LEAD/config", "/ui//lead/config",
             "/login/../lead/config", "/static/%5c..%5clead", "/gradio_api/heartbeat/../../lead/config"],
)  # fmt: skip
def test_odd_paths_lead_nowhere(ann: Client, path: str) -> None:
    for client in (ann, Client(ann.server)):
        status, _, text = client("GET", path)
        assert status in (303, 400, 401, 403, 404, 405), (status, text[:200])
        assert '"components"' not in text


def test_without_a_session_there_is_nothing(server: Server) -> None:
    nobody = Client(server)
    for method, path in (("GET", "/"), ("GET", "/config"), ("GET", "/api/tasks"), ("POST", "/api/tasks/rank/next"),
                         ("GET", "/lead/"), ("GET", "/lead/config"), ("POST", "/lead/gradio_api/queue/join"),
                         ("POST", "/lead/gradio_api/upload"), ("GET", "/password"),
                         ("POST", "/api/preview")):  # fmt: skip
        assert nobody(method, path, {})[0] == 401, path
    status, headers, _ = nobody("GET", "/?task=rank", headers={"Accept": "text/html"})
    assert (status, headers["location"]) == (303, "/login?next=/")
    for token in ("", "x", "a" * 5000, "' OR 1=1 --"):
        assert Client(server, token)("GET", "/api/tasks")[0] == 401


def test_a_request_from_another_site_is_refused(ann: Client) -> None:
    for headers in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}, {"Origin": "null"}):
        assert ann("POST", "/api/tasks/rank/next", {}, headers)[0] == 403
    same = {"Origin": ann.server.url, "Sec-Fetch-Site": "same-origin"}
    assert ann("POST", "/api/tasks/rank/next", {}, same)[0] == 200


def test_signing_in_is_rate_limited_and_tells_nothing(server: Server) -> None:
    Auth(server.database).create_user("sec-limited", "labeler", "right-password")
    nobody = Client(server)
    answers = [nobody("POST", "/login", *form(name="sec-limited", password="wrong")) for _ in range(FAILURES)]
    unknown = nobody("POST", "/login", *form(name="sec-nobody-of-this-name", password="wrong"))
    assert {status for status, _, _ in answers} == {401} == {unknown[0]}
    assert answers[0][2] == unknown[2]
    assert nobody("POST", "/login", *form(name="sec-limited", password="right-password"))[0] == 429


def test_the_cookie_is_out_of_reach_and_next_stays_here(server: Server) -> None:
    Auth(server.database).create_user("sec-cookie", "labeler", "right-password")
    nobody = Client(server)
    for target, lands in (("/?task=rank", "/?task=rank"), ("https://evil.example", "/"), ("//evil.example", "/"),
                          ("/\\evil.example", "/")):  # fmt: skip
        body, headers = form(name="sec-cookie", password="right-password")
        status, answer, _ = nobody("POST", f"/login?next={quote(target)}", body, headers)
        assert (status, answer["location"]) == (303, lands)
        assert "httponly" in answer["set-cookie"].lower()
        assert "samesite=lax" in answer["set-cookie"].lower()


def test_sessions_expire_and_end_with_sign_out_a_new_password_or_a_shut_door(server: Server) -> None:
    auth = Auth(server.database)
    auth.create_user("sec-session", "labeler", "first-password")
    (user_id,) = [auth.user_of(auth.sign_in("sec-session", "first-password", "test")).id]  # type: ignore[union-attr]

    def works(token: str) -> bool:
        return Client(server, token)("GET", "/api/tasks")[0] == 200

    token = auth.start_session(user_id)
    assert works(token)
    with server.database.write() as session:
        session.execute(update(SignIn).where(SignIn.user_id == user_id).values(expires_at=time.time() - 1))
    assert not works(token)
    token = auth.start_session(user_id)
    assert Client(server, token)("POST", "/logout")[0] == 303
    assert not works(token)
    token = auth.start_session(user_id)
    auth.set_password("sec-session", "second-password")
    assert not works(token)
    token = auth.start_session(user_id)
    auth.set_active("sec-session", False)
    assert not works(token)
    assert auth.sign_in("sec-session", "second-password", "test") is None


def test_too_much_is_refused(ann: Client, boss: Client) -> None:
    assert ann("POST", "/api/preview", {"text": "x" * (MAX_BODY + 10)})[0] == 413
    assert ann("POST", "/api/preview", {"text": "x" * 300_000})[0] == 422
    connection = http.client.HTTPConnection("127.0.0.1", ann.server.port, timeout=30)
    headers = {"Cookie": f"{COOKIE}={ann.token}", "Content-Type": "application/json", "Transfer-Encoding": "chunked"}
    chunks = (b'{"text": "' if number == 0 else b"x" * 100_000 for number in range(30))
    try:
        connection.request("POST", "/api/preview", chunks, headers, encode_chunked=True)
        assert connection.getresponse().status >= 400
    except (ConnectionError, http.client.HTTPException):
        pass  # cut off in the middle: as good
    assert boss("POST", "/lead/gradio_api/upload", b"", {"Content-Length": str(400_000_000)})[0] == 413


def test_answers_out_of_bounds_are_refused(ann: Client) -> None:
    ann.server.add_batch(1)
    here = f"/api/assignments/{ann.next()['assignment']}/submit"
    request = {"request_id": secrets.token_hex(8), "seconds": 1}
    for answer in ({}, {"ranks": [1, 2, 3]}, {"ranks": [1, 2, 3, 5]}, {"ranks": [0, 1, 2, 3]},
                   {"ranks": [True, 2, 3, 4]}, {"ranks": ["1", 2, 3, 4]},
                   {"ranks": [1, 1, 1, 1], "ratings": [8, 1, 1, 1]},
                   {"ranks": [1, 1, 1, 1], "flags": [["<script>"], [], [], []]}, {"ranks": {"0": 1}}):  # fmt: skip
        assert ann("POST", here, {**request, "answer": answer})[0] == 422, answer
    assert ann("POST", here, {**request, "request_id": "short", "answer": {"ranks": [1, 2, 3, 4]}})[0] == 422
    assert ann("POST", "/api/assignments/99999999999/submit", {**request, "answer": {}})[0] == 422
    assert ann("POST", "/api/tasks/nothing/next", {})[0] == 422


def test_a_probes_conversation_cannot_be_forged(ann: Client) -> None:
    ann.server.add_batch([("t", {"rule": "no-threats"})], "probe", rule_set="sparrow-dialogue")
    here = f"/api/assignments/{ann.next('probe')['assignment']}/submit"
    forged = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I will hurt you"}]
    answer = {"verdict": "violates", "note": "", "messages": forged}
    status, _, text = ann("POST", here, {"request_id": secrets.token_hex(8), "answer": answer, "seconds": 1})
    assert status == 422
    assert "talk to the model first" in text


def test_the_leads_page_serves_no_file_but_its_exports(boss: Client) -> None:
    secret = boss.server.folder / "annotations.db"
    for path in (
        secret,
        Path("/etc/passwd"),
        ROOT / "pyproject.toml",
        f"{boss.server.folder}/exports/../annotations.db",
    ):
        assert boss("GET", f"/lead/gradio_api/file={path}")[0] in (400, 403, 404), path


def test_every_answer_carries_the_protecting_headers(ann: Client) -> None:
    for path in ("/", "/api/tasks", "/login", "/ui/workbench.js"):
        headers = ann("GET", path)[1]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert "default-src 'self'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
    assert ann("GET", "/api/tasks")[1]["cache-control"] == "no-store"


def test_the_first_start_makes_one_password_and_prints_it_once(tmp_path: Path) -> None:
    server = Server(f"sqlite:///{tmp_path / 'new.db'}", tmp_path)
    with server.started("--https"):
        printed = re.search(r"sign in as  lead  with the password  (\S+)", (tmp_path / "log").read_text())
        assert printed
        nobody = Client(server)
        assert nobody("POST", "/login", *form(name="lead", password="lead"))[0] == 401
        status, headers, _ = nobody("POST", "/login", *form(name="lead", password=printed[1]))
        assert status == 303
        assert "secure" in headers["set-cookie"].lower()
    command = [sys.executable, "-m", "annotation_ui.cli", "--database", server.database_url, "create-user", "lead"]
    again = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert again.returncode == 2
    assert again.stderr == "align annotate: there is a user 'lead' already\n"
    stored = Database(server.database_url)
    with stored.read() as session:
        hashed = session.connection().exec_driver_sql("SELECT password_hash FROM users").scalar_one()
    assert hashed.startswith("$argon2id$")
    stored.close()
