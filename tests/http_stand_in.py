"""A server on this machine that answers as a function says, in place of services that are asked over HTTP."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Request(NamedTuple):
    """What a client has sent."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@contextmanager
def answering(answer: Callable[[Request], tuple[Any, ...] | None]) -> Iterator[str]:
    """Yield the address of a server; `answer` gives status, content and further headers, or None to hang up."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            found = answer(Request(self.command, self.path, dict(self.headers), body))
            if found is None:
                return
            status, content, *headers = found
            with suppress(BrokenPipeError):  # the client has given up
                self.send_response(status)
                for name, value in (*headers, ("Content-Length", str(len(content)))):
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

        do_GET = do_PUT = do_POST  # noqa: N815 (names of the base class)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
