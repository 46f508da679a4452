"""Sign-in by a proxy that names the user in a header. The header is accepted only from the proxy's address."""

import os
import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from align.core.errors import UserError

_PEER = "align.peer"
_HEADER = re.compile(r"[A-Za-z0-9-]{1,64}")


@dataclass(frozen=True)
class ProxySignIn:
    """Header with the user's name, and the only address from which it is accepted."""

    header: str
    address: IPv4Address | IPv6Address

    def names(self, scope: Scope, headers: Headers) -> list[str]:
        """Return the users named by the proxy: none for other clients, and several if a client has forged a header."""
        return headers.getlist(self.header) if _address(scope.get(_PEER) or "") == self.address else []


def proxy_sign_in(header: str, address: str) -> ProxySignIn | None:
    """Return the sign-in configured on the command line, or None."""
    if not header and not address:
        return None
    if not header or not address:
        raise UserError("--proxy-user-header and --proxy-address must be given together")
    if not _HEADER.fullmatch(header):
        raise UserError(f"--proxy-user-header {header!r}: must be a header name such as X-Forwarded-User")
    found = _address(address)
    if found is None:
        raise UserError(f"--proxy-address {address!r}: must be the IP address of the proxy")
    return ProxySignIn(header, found)


class Peer:
    """ASGI wrapper that keeps the address of the connection and, with `https`, reads the proxy's headers.

    The proxy's headers can replace the client address, so sign-in by a proxy checks the address of the connection.
    """

    def __init__(self, app: ASGIApp, https: bool) -> None:
        trusted = os.environ.get("FORWARDED_ALLOW_IPS", "127.0.0.1")
        # Without a proxy, a local client could claim any address.
        self.app: ASGIApp = ProxyHeadersMiddleware(app, trusted) if https else app  # type: ignore[arg-type, assignment]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = scope.get("client")
        scope[_PEER] = client[0] if client else None
        await self.app(scope, receive, send)


def _address(text: str) -> IPv4Address | IPv6Address | None:
    """Parse an IP address. Convert an IPv4-mapped IPv6 address to IPv4."""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address
