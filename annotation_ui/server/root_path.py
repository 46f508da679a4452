"""Root path below which a proxy serves the app, such as /labels."""

import re
from contextvars import ContextVar
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from align.core.errors import UserError

root_path: ContextVar[str] = ContextVar("root_path", default="")
"""Root path of the request. Empty, or starts with a slash and ends without one."""
_PATH = re.compile(r"(?:/[A-Za-z0-9._~-]+)*")


def checked_root_path(path: str) -> str:
    """Return the path without a trailing slash. Raise UserError if it is not a path."""
    path = path.rstrip("/")
    if not _PATH.fullmatch(path) or "/." in path:
        raise UserError(f"--root-path {path!r}: must be a path such as /labels")
    return path


class RootPath:
    """Outer ASGI middleware for a proxy that serves the app below a root path, whether or not the proxy removes the path.

    The guard sees paths without the root path. Redirects get the root path.
    """

    def __init__(self, app: ASGIApp, root: str) -> None:
        self.app, self.root = app, root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        root_path.set(self.root)
        path, raw = scope["path"], scope.get("raw_path") or b""
        if path == self.root:
            headers = [(b"location", f"{self.root}/".encode())]
            await send({"type": "http.response.start", "status": 307, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
            return
        if path.startswith(f"{self.root}/"):
            scope = {**scope, "path": path[len(self.root) :], "raw_path": raw.removeprefix(self.root.encode())}
        host = Headers(scope=scope).get("host", "")

        async def send_with_root(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if "location" in headers:
                    headers["location"] = self._with_root(headers["location"], host)
            await send(message)

        await self.app(scope, receive, send_with_root)

    def _with_root(self, location: str, host: str) -> str:
        """Add the root path if the address belongs to this app."""
        parts = urlsplit(location)
        own = parts.path.startswith("/") and parts.netloc in ("", host) and not parts.path.startswith(f"{self.root}/")
        return parts._replace(path=self.root + parts.path).geturl() if own else location


class BelowRoot:
    """Inner ASGI middleware that prefixes each path with the root path, as mounted apps expect."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        self.app, self.root = app, root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            raw = self.root.encode() + (scope.get("raw_path") or b"")
            scope = {**scope, "path": self.root + scope["path"], "raw_path": raw, "root_path": self.root}
        await self.app(scope, receive, send)
