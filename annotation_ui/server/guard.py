"""Access control: checks the user, the origin and the body size of every request.

Users sign in and get a session. Programs use a token, which gives access only to the API at /api/v1.

The guard covers the app's routes, the labelers' page, and the lead's page with everything that Gradio adds (API, queue,
uploads and files).
"""

import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import quote

from anyio import to_thread
from sqlalchemy.exc import OperationalError
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from annotation_ui.server.auth import Auth, SignedIn
from annotation_ui.server.error_pages import LEADS_ONLY, cannot_store, error_page, wants_page
from annotation_ui.server.headers import COOKIE, PROTECTING, bearer_token, same_origin, session_cookie, session_token
from annotation_ui.server.proxy import ProxySignIn
from annotation_ui.store.tokens import Tokens

REQUESTS, PER_SECONDS = 120, 60.0  # burst size per token, and time to refill it


@dataclass
class RateLimit:
    """Token bucket per key. Allows bursts of `requests`, refilled evenly over `seconds`."""

    requests: int = REQUESTS
    seconds: float = PER_SECONDS
    clock: Callable[[], float] = time.monotonic
    _buckets: dict[int, tuple[float, float]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def wait(self, key: int) -> int:
        """Count a request of a key. Return 0 if it is allowed, or else the seconds until the next allowed request."""
        rate = self.requests / self.seconds
        with self._lock:
            now = self.clock()
            left, since = self._buckets.get(key, (float(self.requests), now))
            left = min(float(self.requests), left + (now - since) * rate)
            allowed = left >= 1
            self._buckets[key] = (left - allowed, now)
            return 0 if allowed else math.ceil((1 - left) / rate)


JSON = "application/json"
API_PATH = "/api/v1"
MAX_BODY, MAX_UPLOAD_BODY = 1_000_000, 300_000_000
_PUBLIC = ("/login", "/logout", "/healthz", "/favicon.ico")
_PUBLIC_FILES = ("/ui/", "/assets/", "/static/", "/lead/assets/", "/lead/static/")
# Gradio paths needed by the labelers' page, which has no events, uploads or files.
_LABELER_PAGE = ("/", "/config", "/theme.css", "/manifest.json", "/robots.txt", "/gradio_api/startup-events")
_LABELER_PAGE_FILES = ("/svelte/", "/gradio_api/heartbeat/")
_APP_ROUTES = ("/api/", "/password")
# Gradio paths needed by the lead's page. Gradio's other paths, such as files and proxies, are blocked.
_LEAD_PAGE = ("/lead", "/lead/", "/lead/config", "/lead/theme.css", "/lead/manifest.json", "/lead/robots.txt",
              "/lead/gradio_api/queue/data", "/lead/gradio_api/startup-events", "/lead/api",
              "/lead/api/openapi.json")  # fmt: skip
_LEAD_PAGE_FILES = ("/lead/svelte/", "/lead/gradio_api/heartbeat/", "/lead/exports/", "/lead/api/files/")
_UPLOADS = "/lead/uploads"
_LARGE_BODIES = (_UPLOADS, f"{API_PATH}/batches")
_LEAD_ACTIONS = ("/lead/gradio_api/queue/join", _UPLOADS)

Refusal = tuple[int, str, str | None]
"""Status, error, and the redirect address if a page needs a session."""


class Guard:
    """ASGI middleware that checks the session, role, origin and size of every request."""

    def __init__(self, app: ASGIApp, auth: Auth, https: bool = False, proxy: ProxySignIn | None = None) -> None:
        self.app, self.auth, self.https, self.proxy = app, auth, https, proxy
        self.tokens, self.rate_limit = Tokens(auth.database), RateLimit()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # the app uses no other protocol
            return
        try:
            refusal, signed_in = await self._check(scope)
        except OperationalError as error:
            refusal, signed_in = (503, cannot_store(error), None), None
        path, headers, cookie = scope["path"], Headers(scope=scope), None
        if signed_in and signed_in.renewed:  # the cookie must last as long as the session
            cookie = session_cookie(session_token(headers) or "", self.auth.hours, self.https)
        send = _set_headers(send, path, cookie)
        if refusal is not None:
            await _send_refusal(send, *refusal, page=wants_page(headers.get("accept", "")))
            return
        scope.setdefault("state", {})["user"] = signed_in.user if signed_in else None
        await self.app(scope, _limit_body(receive, _body_limit(path)), send)

    async def _check(self, scope: Scope) -> tuple[Refusal | None, SignedIn | None]:
        """Return the refusal (None if the request is allowed) and the signed-in user."""
        path, headers = _unambiguous_path(scope["path"]), Headers(scope=scope)
        safe = scope["method"] in ("GET", "HEAD")
        if path is None:
            return (400, "bad path", None), None
        if not safe and not same_origin(headers):
            return (403, "this request comes from another site", None), None
        limit = _body_limit(path)
        if int(headers.get("content-length") or 0) > limit:
            return (413, f"larger than {limit} bytes", None), None
        if path in _PUBLIC or path.startswith(_PUBLIC_FILES):
            return None, None
        if path.startswith(f"{API_PATH}/"):
            return await self._check_token(scope, headers), None
        named = self.proxy.names(scope, headers) if self.proxy else []
        if len(named) > 1:
            return (400, "the proxy names more than one user", None), None
        if named:
            signed_in = await to_thread.run_sync(self.auth.named_by_proxy, named[0])
            if signed_in is None:
                return (403, "the proxy names a user that is unknown or deactivated here: ask a lead", None), None
        else:
            signed_in = await to_thread.run_sync(self.auth.signed_in, session_token(headers))
        if signed_in is None:
            to_sign_in = safe and wants_page(headers.get("accept", ""))
            query = scope["query_string"].decode("latin-1")
            wanted = quote(f"{path}?{query}" if query else path)
            return (401, "sign in first", f"/login?next={wanted}" if to_sign_in else None), None
        if path == "/lead" or path.startswith("/lead/"):
            if signed_in.user.role != "lead":
                return (403, LEADS_ONLY, None), signed_in
            known = path in _LEAD_PAGE or path.startswith(_LEAD_PAGE_FILES) if safe else path in _LEAD_ACTIONS
        else:
            page_path = safe and (path in _LABELER_PAGE or path.startswith(_LABELER_PAGE_FILES))
            known = page_path or path.startswith(_APP_ROUTES)
        return (None if known else (404, "no such page", None)), signed_in

    async def _check_token(self, scope: Scope, headers: Headers) -> Refusal | None:
        """Authenticate a program by its token, and store the token in the request's state. Cookies are ignored."""
        presented = bearer_token(headers)
        token = await to_thread.run_sync(self.tokens.check, presented) if presented else None
        if token is None:
            return 401, "this token is not valid: send `Authorization: Bearer TOKEN`", None
        wait = self.rate_limit.wait(token.id)
        if wait:
            return 429, f"too many requests: wait {wait} s", None
        scope.setdefault("state", {})["token"] = token
        return None


def _body_limit(path: str) -> int:
    return MAX_UPLOAD_BODY if path in _LARGE_BODIES else MAX_BODY


def _unambiguous_path(path: str) -> str | None:
    """Return the path, or None if an inner router could interpret it differently."""
    return None if "//" in path or "/../" in f"{path}/" or "\\" in path or "\0" in path else path


def _limit_body(receive: Receive, limit: int) -> Receive:
    """Disconnect when the body exceeds the limit. This covers bodies without a Content-Length header."""
    received = 0

    async def receive_limited() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        return {"type": "http.disconnect"} if received > limit else message

    return receive_limited


def _set_headers(send: Send, path: str, cookie: str | None) -> Send:
    """Set the security headers of every response, and forbid caching unless the path is a public file.

    Gradio's CORS headers are removed. They would let pages of other servers on this machine read responses with the
    visitor's cookie.
    """
    private = not path.startswith(_PUBLIC_FILES)

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name in [name for name in headers if name.startswith("access-control-")]:
                del headers[name]
            for name, value in PROTECTING.items():
                headers[name] = value
            if private:
                headers["Cache-Control"] = "no-store"
            if cookie and COOKIE not in headers.get("set-cookie", ""):  # else the response signs the user in or out
                headers.append("set-cookie", cookie)
        await send(message)

    return send_with_headers


async def _send_refusal(send: Send, status: int, error: str, location: str | None, page: bool = False) -> None:
    body, kind = (error_page(status, error), "text/html; charset=utf-8") if page else (json.dumps({"error": error}), JSON)
    headers = [(b"content-type", kind.encode()), (b"cache-control", b"no-store")]
    if location:
        status, headers = 303, [*headers, (b"location", location.encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body.encode()})
