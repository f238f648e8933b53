"""The gate in front of the viewer: who may ask, from which page, and what a browser may do with the answer.

A run can hold private prompts, and the model's own output is untrusted text. So: only loopback names are
answered unless the user named another host, which then needs a token; a page of another site gets nothing
(Host, Origin and Sec-Fetch-Site are checked, which also stops DNS rebinding); and our own pages run under a
content security policy without inline scripts or styles.

HTTP connections that say nothing are closed: otherwise a few hundred half-open ones would block the viewer. uvicorn's
own time-outs begin with the first answer.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
import secrets
import socket
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qs, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
LONGEST_TARGET = 2048
"""Path and query of a request, in bytes. Ours stay under 200."""

SECURITY_HEADERS = {
    "content-security-policy": "; ".join(
        [
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "connect-src 'self'",
            "img-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        ]
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


@dataclass(frozen=True)
class Access:
    """The rules by which a request may read this server."""

    hosts: frozenset[str]
    """Host names that requests may carry, lower case, without port."""
    any_address: bool = False
    """Accept every literal IP address as Host (when bound to all interfaces)."""
    token: str | None = None
    """Required from every visitor when set."""
    posts: bool = False
    """Take POST requests, which start and cancel a job; a page that sends one must name its origin."""
    cookie: str = "gradtrace"
    """Cookies are shared by all ports of a host, so two viewers need two names."""

    def allows_host(self, host_header: str) -> bool:
        host = host_name(host_header)
        if host is None:
            return False
        return host in self.hosts or (self.any_address and is_address(host))


def access_for(host: str, port: int, token: str | None, posts: bool = False) -> Access:
    """The rule for a server bound to `host`: loopback needs no token, anything else always has one."""
    access = Access(hosts=LOOPBACK_NAMES, token=token, cookie=f"gradtrace_{port}", posts=posts)
    if host in LOOPBACK_NAMES:
        return access
    names = {host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()} | LOOPBACK_NAMES
    every_interface = is_address(host) and ipaddress.ip_address(host).is_unspecified
    token = token or secrets.token_urlsafe(24)
    return replace(access, hosts=frozenset(names), any_address=every_interface, token=token)


_HOST = re.compile(r"(?:\[(?P<address>[^]]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::[0-9]+)?")


def host_name(host_header: str) -> str | None:
    """The name in a Host header without its port, or None if it is not one ("a@b", "x:y:z", "")."""
    match = _HOST.fullmatch(host_header)
    if match is None or (match["address"] and not is_address(match["address"])):
        return None
    return (match["address"] or match["name"]).lower()


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Gate:
    """ASGI middleware: refuses what `Access` does not allow, and puts the security headers on every answer."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app = app
        self.access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # we have none; closing before accepting answers 403
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-cache")
            await send(message)

        refusal = self.refusal(scope)
        await (refusal or self.app)(scope, receive, send_guarded)

    def refusal(self, scope: Scope) -> Response | None:
        """The answer to a request that must not reach the application, or None."""
        headers = Headers(scope=scope)
        raw_path = scope.get("raw_path") or scope["path"].encode()
        if len(raw_path) + len(scope["query_string"]) > LONGEST_TARGET:
            return plain(414, "this address is too long")
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self.access.allows_host(hosts[0]):
            return plain(
                421,
                "this viewer answers only to the host names it was started for; "
                "start it with `gradtrace view --host NAME` to serve another",
            )
        is_post = self.access.posts and scope["method"] == "POST"
        if scope["method"] not in ("GET", "HEAD") and not is_post:
            return plain(405, "the viewer only reads", {"allow": "GET, HEAD"})
        if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
            return plain(413, "requests to the viewer have no body")
        origin = headers.get("origin")
        if is_post and origin is None:
            return plain(403, "a POST request must say from which page it comes (Origin)")
        if origin is not None and origin not in (f"http://{hosts[0]}", f"https://{hosts[0]}"):
            return plain(403, "a page of another site may not read this viewer")
        navigation = headers.get("sec-fetch-mode") == "navigate"
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and not navigation:
            return plain(403, "a page of another site may not read this viewer")
        return self.missing_token(scope, headers)

    def missing_token(self, scope: Scope, headers: Headers) -> Response | None:
        token = self.access.token
        if token is None:
            return None
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and same(bearer.strip(), token):
            return None
        if same(HTTPConnection(scope).cookies.get(self.access.cookie, ""), token):
            return None
        query = parse_qs(scope["query_string"].decode("ascii", "replace"))
        if same(query.pop("token", [""])[0], token):
            # From here on the token travels in a cookie; it leaves the address bar, history and bookmarks.
            rest = urlencode(query, doseq=True)
            response = RedirectResponse("/" + (f"?{rest}" if rest else ""), status_code=303)
            response.set_cookie(self.access.cookie, token, httponly=True, samesite="lax", path="/")
            return response
        return plain(
            401,
            "this viewer needs its token: open the address that `gradtrace view` printed",
            {"www-authenticate": "Bearer"},
        )


def same(given: str, wanted: str) -> bool:
    """Compared in constant time."""
    return hmac.compare_digest(given.encode(), wanted.encode())


def plain(status: int, text: str, headers: dict[str, str] | None = None) -> Response:
    return PlainTextResponse(text + "\n", status_code=status, headers=headers)


HEADER_SECONDS = 5.0
"""From the first byte of a request, or from the connection, to the end of its headers."""


class ImpatientProtocol(H11Protocol):
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._arm()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_waiting():
            self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _is_waiting(self) -> bool:
        """No request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(HEADER_SECONDS, self._close_if_waiting, self.cycle)

    def _close_if_waiting(self, cycle: Any) -> None:
        """Unless a request has come since the clock was set."""
        self._timer = None
        if self.cycle is cycle and self._is_waiting() and not self.transport.is_closing():
            self.transport.close()
