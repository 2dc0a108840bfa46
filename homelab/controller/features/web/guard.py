"""Who may see a page: the address names this machine, and the reader has the token. What acts is asked by the page itself.

It stands before everything else of the server.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Collection
from urllib.parse import parse_qs

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_NO_TOKEN = (
    "This page needs the token in its address: open the whole address that `homelab web` has printed. After a restart it is another one.\n"
)
_OTHER_PAGE = "Only the page that `homelab web` serves may ask for this.\n"
_OTHER_NAME = "This page is not served under that name. Open the address that `homelab web` has printed.\n"


class PageGuard:
    """`hosts`: the names and addresses that a browser may have asked for; `policy`: the Content-Security-Policy of every answer."""

    def __init__(self, app: ASGIApp, *, token: str, hosts: Collection[str], cookie: str, policy: str) -> None:
        self._app, self._token, self._hosts, self._cookie = app, token, frozenset(hosts), cookie
        self._headers = (
            (b"content-security-policy", policy.encode()), (b"cache-control", b"no-store"), (b"referrer-policy", b"no-referrer"),
            (b"x-content-type-options", b"nosniff"), (b"x-frame-options", b"DENY"), (b"cross-origin-resource-policy", b"same-origin"),
            (b"cross-origin-opener-policy", b"same-origin"), (b"permissions-policy", b"camera=(), microphone=(), geolocation=()"),
        )  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request. Whoever comes without the right name or token learns nothing else."""
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        added = list(self._headers)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        if host_of(headers.get(b"host", b"")) not in self._hosts:
            await PlainTextResponse(_OTHER_NAME, 403)(scope, receive, guarded)
            return
        does_act = scope["method"] not in ("GET", "HEAD")
        # A cookie is that of all ports of this machine, and goes with what any page of them sends: browsers name that page in Origin.
        if does_act and headers.get(b"origin", b"").lower() != b"http://" + headers[b"host"].strip().lower():
            await PlainTextResponse(_OTHER_PAGE, 403)(scope, receive, guarded)
            return
        (given,) = [""] if does_act else parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[:1] or [""]
        if given and self._is_token(given):
            cookie = f"{self._cookie}={self._token}; HttpOnly; SameSite=Strict; Path=/"
            added.append((b"set-cookie", cookie.encode()))
        elif not self._has_kept(headers.get(b"cookie", b"")):
            await PlainTextResponse(_NO_TOKEN, 403)(scope, receive, guarded)
            return
        await self._app(scope, receive, guarded)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self._token.encode())

    def _has_kept(self, header: bytes) -> bool:
        # Not `SimpleCookie`: other programs of this machine set cookies for all of its ports, and one that it cannot read hides all others.
        for cookie in header.decode("latin-1").split(";"):
            name, _, value = cookie.strip().partition("=")
            if name == self._cookie and self._is_token(value):
                return True
        return False


def host_of(header: bytes) -> str:
    """The name or the address of a Host header, without its port; IPv6 without brackets."""
    text = header.decode("latin-1").strip().lower()
    name = text[1 : text.find("]")] if text.startswith("[") else text.partition(":")[0]
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return name
