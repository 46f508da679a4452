"""The door of the whole app: who may call which path, from where, with how much.

Every request passes here first: the app's own routes, the labelers' page and the lead's pages with everything that
Gradio adds to them (its API, queue, uploads and files).
"""

from __future__ import annotations

import json
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import quote, urlsplit

from anyio import to_thread
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from annotation_ui.auth import Auth

COOKIE = "align_session"
MAX_BODY, MAX_LEAD_BODY = 1_000_000, 300_000_000
_PUBLIC = ("/login", "/healthz", "/favicon.ico")
_PUBLIC_FILES = ("/ui/", "/assets/", "/static/", "/lead/assets/", "/lead/static/")
# All that the labelers' page needs of Gradio: it has no event, no upload and no file of its own.
_PAGE = ("/", "/config", "/theme.css", "/manifest.json", "/robots.txt", "/gradio_api/startup-events")
_PAGE_FILES = ("/svelte/", "/gradio_api/heartbeat/")
_OWN = ("/api/", "/logout", "/password")
_HEADERS = {
    # Gradio's pages need inline and evaluated script; nothing may be loaded from, or sent to, anywhere else.
    "Content-Security-Policy": "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "connect-src 'self' data: blob:; worker-src 'self' blob:; object-src 'none'; base-uri 'self'; form-action 'self'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
}


class Guard:
    """ASGI middleware: signed in, the right role, the same origin, a sane size."""

    def __init__(self, app: ASGIApp, auth: Auth) -> None:
        self.app, self.auth = app, auth

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # no part of the app speaks anything else
            return
        refusal, user = await self._check(scope)
        if refusal is not None:
            await _answer(send, *refusal)
            return
        scope.setdefault("state", {})["user"] = user
        limit = MAX_LEAD_BODY if scope["path"].startswith("/lead") else MAX_BODY
        await self.app(scope, _limited(receive, limit), _with_headers(send, scope["path"]))

    async def _check(self, scope: Scope) -> tuple[tuple[int, str, str | None] | None, Any]:
        path, headers = _clean(scope["path"]), Headers(scope=scope)
        safe = scope["method"] in ("GET", "HEAD")
        if path is None:
            return (400, "bad path", None), None
        if not safe and not _same_origin(headers):
            return (403, "this request comes from another site", None), None
        limit = MAX_LEAD_BODY if path.startswith("/lead") else MAX_BODY
        if int(headers.get("content-length") or 0) > limit:
            return (413, f"larger than {limit} bytes", None), None
        if path in _PUBLIC or path.startswith(_PUBLIC_FILES):
            return None, None
        user = await to_thread.run_sync(self.auth.user_of, cookie_of(headers))
        if user is None:
            page = safe and "text/html" in headers.get("accept", "")
            return (401, "sign in first", f"/login?next={quote(path)}" if page else None), None
        if path == "/lead" or path.startswith("/lead/"):
            return ((403, "for leads only", None) if user.role != "lead" else None), user
        own = path.startswith(_OWN)
        page_path = safe and (path in _PAGE or path.startswith(_PAGE_FILES))
        return (None if own or page_path else (404, "no such page", None)), user


def cookie_of(headers: Headers) -> str | None:
    """The session token that a request carries."""
    try:
        cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return None
    return cookie.value if cookie else None


def _clean(path: str) -> str | None:
    """The path, or None for one that could mean something else further in."""
    return None if "//" in path or "/../" in f"{path}/" or "\\" in path or "\0" in path else path


def _same_origin(headers: Headers) -> bool:
    """Browsers name the page that a request comes from; other programs carry no cookie by accident."""
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return False
    origin = headers.get("origin")
    return origin is None or urlsplit(origin).netloc == headers.get("host")


def _limited(receive: Receive, limit: int) -> Receive:
    """A body without a stated length is cut off at the limit."""
    seen = 0

    async def limited() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        return {"type": "http.disconnect"} if seen > limit else message

    return limited


def _with_headers(send: Send, path: str) -> Send:
    private = not path.startswith(_PUBLIC_FILES)

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers[name] = value
            if private:
                headers["Cache-Control"] = "no-store"
        await send(message)

    return sending


async def _answer(send: Send, status: int, error: str, location: str | None) -> None:
    headers = [(b"content-type", b"application/json"), (b"cache-control", b"no-store")]
    if location:
        status, headers = 303, [*headers, (b"location", location.encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"error": error}).encode()})
