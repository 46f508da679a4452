"""HTTP headers: the session cookie, the origin of a request, and security headers."""

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import cookie_parser

COOKIE = "align_session"

PROTECTING = {
    # Gradio's pages need inline and evaluated scripts. Other origins are blocked.
    "Content-Security-Policy": "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "connect-src 'self' data: blob:; worker-src 'self' blob:; object-src 'none'; base-uri 'self'; form-action 'self'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
}
"""Headers of every response, including errors."""


def session_cookie(token: str, hours: float, https: bool) -> str:
    """Return the Set-Cookie header of a session that expires in `hours`. If 0, the cookie is deleted."""
    secure = "; Secure" if https else ""
    return f"{COOKIE}={token}; HttpOnly; Max-Age={int(hours * 3600)}; Path=/; SameSite=lax{secure}"


def session_token(headers: Headers) -> str | None:
    """Return the session token in a request's cookie.

    Python's SimpleCookie would drop it after a malformed cookie, which any other server on this host can set.
    """
    return cookie_parser(headers.get("cookie", "")).get(COOKIE) or None


def bearer_token(headers: Headers) -> str | None:
    """Return the token in a request's Authorization header."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def same_origin(headers: Headers) -> bool:
    """Return whether the request comes from a page of this app, or from a program that sends neither header."""
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return False
    origin = headers.get("origin")
    try:
        return origin is None or urlsplit(origin).netloc == headers.get("host")
    except ValueError:  # not an address, such as http://[x
        return False
