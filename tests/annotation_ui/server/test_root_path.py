"""The app below a path of a proxy: every address that a page uses has the path."""

import http.client
import secrets
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from playwright.sync_api import expect
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.routing import Mount, Route
from starlette.testclient import TestClient

from align.core.errors import UserError
from annotation_ui.reports.export import Selection, rows_to_export
from annotation_ui.server.auth import Auth
from annotation_ui.server.headers import COOKIE
from annotation_ui.server.root_path import BelowRoot, RootPath, checked_root_path, root_path
from tests.annotation_ui.running import Server

ROOT = "/team/labels"


@pytest.mark.parametrize("path", ["labels", "/a b", "/a/../b", "//", "http://h/a", "/a?b", "/a//b"])
def test_what_is_not_a_path_is_refused(path):
    if path == "//":
        assert checked_root_path(path) == ""
    else:
        with pytest.raises(UserError, match="--root-path"):
            checked_root_path(path)


@pytest.mark.parametrize(("given", "checked"), [("", ""), ("/", ""), ("/labels/", "/labels"), (ROOT, ROOT)])
def test_a_root_path_has_no_slash_at_its_end(given, checked):
    assert checked_root_path(given) == checked


def test_paths_lose_the_root_and_redirects_of_the_app_get_it():
    async def seen(request):
        return PlainTextResponse(f"{request.url.path} {root_path.get()}")

    async def moved(request):
        return RedirectResponse(request.query_params["to"], 303)

    app = Starlette(routes=[Route("/moved", moved), Route("/{rest:path}", seen)])
    client = TestClient(RootPath(app, ROOT), base_url="http://host", follow_redirects=False)
    within = Starlette(routes=[Mount("/lead", Starlette(routes=[Route("/{rest:path}", seen)])), Route("/x/y", seen)])
    below = TestClient(RootPath(BelowRoot(within, ROOT), ROOT), base_url="http://host", follow_redirects=False)
    for sent in ("/lead/a", "/x/y"):  # the routes of mounted apps, too, are found
        for prefix in ("", ROOT):
            assert below.get(prefix + sent).text == f"{ROOT}{sent} {ROOT}"
    assert below.get("/lead").headers["location"] == f"http://host{ROOT}/lead/"
    for sent, path in ((f"{ROOT}/x/y", "/x/y"), ("/x/y", "/x/y"), (f"{ROOT}/", "/"), (f"{ROOT}x", f"{ROOT}x")):
        assert client.get(sent).text == f"{path} {ROOT}"
    assert client.get(ROOT).headers["location"] == f"{ROOT}/"
    for to, location in (
        ("/login?next=/a", f"{ROOT}/login?next=/a"),
        ("http://host/lead/", f"http://host{ROOT}/lead/"),
        ("https://elsewhere.example/lead/", "https://elsewhere.example/lead/"),
        ("relative", "relative"),
    ):
        assert client.get("/moved", params={"to": to}).headers["location"] == location


class Proxy(BaseHTTPRequestHandler):
    """As `location /team/labels/ { proxy_pass http://app/; }`: what is not below the path never reaches the app."""

    protocol_version = "HTTP/1.1"
    app_port, missed = 0, None

    def forward(self):
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if not self.path.startswith(f"{ROOT}/"):
            self.missed.append(self.path)
            self.send_error(404)
            return
        connection = http.client.HTTPConnection("127.0.0.1", self.app_port, timeout=300)
        connection.request(self.command, self.path.removeprefix(ROOT), body, dict(self.headers))
        response = connection.getresponse()
        content = response.read()
        self.send_response(response.status)
        for name, value in response.getheaders():
            if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_HEAD = forward  # noqa: N815

    def log_message(self, *_):
        pass


@pytest.mark.slow
def test_people_sign_in_label_and_export_below_the_path(browser, tmp_path):
    server, missed = Server(f"sqlite:///{tmp_path / 'annotations.db'}", tmp_path), []
    handler = type("OfThisApp", (Proxy,), {"app_port": server.port, "missed": missed})
    with server.started("--root-path", f"{ROOT}/"), ThreadingHTTPServer(("127.0.0.1", 0), handler) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{proxy.server_port}"
        password = secrets.token_hex(8)
        server.user_id("ann")  # a new user
        Auth(server.database).set_password("ann", password)
        batch = server.add_batch([("t", {"prompt": "Q", "responses": ["a", "b"]})], "compare")
        page = browser.new_context(base_url=url).new_page()
        page.set_default_timeout(60_000)
        page.goto(f"{ROOT}/?task=compare")
        page.fill('input[name="name"]', "ann")
        page.fill('input[name="password"]', password)
        page.click('button[type="submit"]')
        page.click('[data-choice="tie"]')
        page.keyboard.press("Enter")
        expect(page.locator(".count")).to_have_text("1 done")
        assert page.url.startswith(f"{url}{ROOT}/")
        (row,) = rows_to_export(server.database, Selection("rankings", batches=(batch,)))
        assert row["choice"] == "tie"
        lead = browser.new_context(base_url=url)
        lead.add_cookies([{"name": COOKIE, "value": server.token("boss", "lead"), "url": url}])
        office = lead.new_page()
        office.set_default_timeout(60_000)
        office.goto(f"{ROOT}/lead/")
        expect(office.locator(".lead-table").first).to_contain_text(batch)  # an event of Gradio was answered
        office.get_by_role("link", name="Label", exact=True).click()
        office.wait_for_selector(".workbench .top")
        expect(office).to_have_url(f"{url}{ROOT}/?task=compare")
        assert [path for path in missed if path != "/favicon.ico"] == []
        proxy.shutdown()
