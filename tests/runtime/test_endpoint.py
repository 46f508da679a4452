import re
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from align.core.errors import UserError
from align.runtime.endpoint import post_json


@contextmanager
def serving(*behavior):
    """A server that answers its i-th request as `behavior[i]` says, all further ones with what was sent."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            sent = self.rfile.read(int(self.headers["Content-Length"]))
            number = len(self.server.times)
            self.server.times.append(time.monotonic())
            self.server.headers = dict(self.headers)
            how = behavior[number] if number < len(behavior) else "echo"
            self.send_response(how if isinstance(how, int) else 200)
            if how == 307:
                self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", str(len(sent) + 10 if how in ("cut", "stall") else len(sent)))
            self.end_headers()
            self.wfile.write(b"x" * len(sent) if how == "text" else sent)
            if how == "stall":
                self.wfile.flush()
                time.sleep(6.0)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.times, server.url = [], f"http://127.0.0.1:{server.server_port}/"
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("failure", ["cut", "stall", 408, 409, 425, 429, 500, 502, 503, 504])
def test_what_may_pass_is_tried_again(failure):
    with serving(failure) as server:
        assert post_json(server.url, {"a": "ü"}, timeout=2, retries=1, pause=0.01) == {"a": "ü"}
        assert len(server.times) == 2


@pytest.mark.parametrize(
    ("failure", "complaint"),
    [
        (400, 'HTTP 400 Bad Request: {"a": 1}'),
        (401, "HTTP 401 Unauthorized: "),
        (307, "HTTP 307 Temporary Redirect: "),
        ("text", "the response is not JSON"),
    ],
)
def test_what_will_not_pass_is_tried_once(failure, complaint):
    with serving(failure) as server, pytest.raises(UserError) as caught:
        post_json(server.url, {"a": 1}, timeout=5, retries=3, pause=0.01)
    assert str(caught.value).startswith(f"{server.url}: {complaint}")
    assert "\n" not in str(caught.value)
    assert len(server.times) == 1


def test_a_server_that_never_answers_and_one_that_is_gone_are_told_apart():
    with (
        serving("stall", "stall") as server,
        pytest.raises(UserError, match=r": no response within 0\.2 s, tried 2 times; compl"),
    ):
        post_json(server.url, {}, timeout=0.2, retries=1, pause=0.01)
    with pytest.raises(UserError, match=r": cannot be reached .*tried 2 times; completed results"):
        post_json(server.url, {}, timeout=1, retries=1, pause=0.01)


def test_pauses_double_from_the_first_on():
    with (
        serving(503, 503, 503) as server,
        pytest.raises(UserError, match=r": HTTP 503 .*, tried 3 times; completed results"),
    ):
        post_json(server.url, {}, timeout=5, retries=2, pause=0.1)
    first, second = (after - before for before, after in zip(server.times, server.times[1:], strict=False))
    assert 0.1 <= first < second
    assert second >= 0.2


@pytest.mark.parametrize("url", ["nowhere", "ftp://127.0.0.1/", "http://", "http://[x"])
def test_what_is_no_address_is_one_line(url):
    why = r"invalid URL \(Invalid IPv6 URL\)$" if "[" in url else "cannot be reached "
    with pytest.raises(UserError, match=f"^{re.escape(url)}: {why}"):
        post_json(url, {}, timeout=1, retries=1, pause=0.01)


def test_a_proxy_of_the_environment_is_used(monkeypatch):
    with serving() as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        assert post_json("http://no-such-host.invalid/v1", {"a": 1}, timeout=5, retries=0) == {"a": 1}
        monkeypatch.setenv("no_proxy", "no-such-host.invalid")
        with pytest.raises(UserError, match="cannot be reached"):
            post_json("http://no-such-host.invalid/v1", {"a": 1}, timeout=5, retries=0)


def test_headers_and_content_type_are_sent():
    with serving() as server:
        assert post_json(server.url, None, headers={"Authorization": "Bearer k"}) is None
    assert (server.headers["Authorization"], server.headers["Content-Type"]) == ("Bearer k", "application/json")
