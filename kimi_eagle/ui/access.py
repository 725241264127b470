"""Who may ask the page for what: this user's browser, on this machine, to read. ASGI middleware.

A page on loopback can be reached by whatever runs on the machine, and by any web page that the
user has open. So the Host must be one of ours (a name that was made to point here is not), no
other origin is let in, and every request carries the token: in the first address, then in a cookie
that no script and no other site can use.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOOPBACK = ("127.0.0.1", "localhost", "::1")
TOKEN = "token"  # noqa: S105 (the name of a parameter)
_READS = ("GET", "HEAD")

HEADERS = (
    (
        "content-security-policy",
        "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    ),
    ("cache-control", "no-cache, private"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("referrer-policy", "no-referrer"),
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
)


class Access:
    """Lets through what may be read, and says of everything else why not."""

    def __init__(self, app: App, *, token: str, hosts: Collection[str] = LOOPBACK, port: int = 0):
        """Args: `hosts`: names that this server is reached by; `port`: told apart by in the
        cookie's name, since a browser gives the cookies of one port to every other."""
        self._app = app
        self._token = token
        self._hosts = frozenset(host.lower() for host in hosts)
        self._cookie = f"kimi-eagle-{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # a socket is never opened here
        headers = _headers(scope)
        refused = self._refused(scope, headers)
        if refused is not None:
            await _answer(send, scope, *refused)
            return
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = [value for name, value in query if name == TOKEN]
        if given and self._is_token(given[-1]):
            rest = urlencode([pair for pair in query if pair[0] != TOKEN])
            await self._welcome(send, scope, rest)
        elif self._is_token(_cookie(headers.get("cookie", ""), self._cookie)) or self._is_token(
            headers.get("authorization", "").removeprefix("Bearer ")
        ):
            await self._app(scope, receive, _with_headers(send))
        else:
            told = "open the address that `kimi-eagle ui` printed: it has the token in it\n"
            await _answer(send, scope, 403, told)

    def _refused(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str] | None:
        """Status and message for what nobody may ask, with the token or without."""
        if scope["method"] not in _READS:
            return 405, "this page only reads: GET and HEAD\n"
        host = headers.get("host", "")
        if _name(host) not in self._hosts:
            return 421, "this server is not known by that name\n"
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            return 403, "other origins are not let in\n"
        site = headers.get("sec-fetch-site", "none")
        # Following a link with the token in it is the one way in from elsewhere.
        opened = headers.get("sec-fetch-mode") == "navigate" and TOKEN in scope[
            "query_string"
        ].decode("latin-1")
        if site not in ("none", "same-origin") and not opened:
            return 403, "other origins are not let in\n"
        return None

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())

    async def _welcome(self, send: Send, scope: Scope, query: str) -> None:
        """Put the token into a cookie, and lead to the same address without it."""
        path = scope["path"] if not scope["path"].startswith("//") else "/"
        cookie = f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict"
        location = path + (f"?{query}" if query else "")
        more = [
            (b"set-cookie", cookie.encode()),
            (b"location", location.encode("ascii", "ignore")),
        ]
        await _answer(send, scope, 303, "", more)


def _name(host: str) -> str:
    """The name in a Host header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _headers(scope: Scope) -> dict[str, str]:
    """Headers by name; of one given twice, what no rule lets through."""
    found: dict[str, str] = {}
    for raw, value in scope["headers"]:
        name = raw.decode("latin-1").lower()
        text = value.decode("latin-1")
        found[name] = text if name not in found else f"{found[name]}, {text}"
    return found


def _cookie(text: str, name: str) -> str:
    try:
        found = SimpleCookie(text).get(name)
    except CookieError:
        return ""
    return found.value if found is not None else ""


def _with_headers(send: Send) -> Send:
    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            known = {name.lower() for name, _ in message["headers"]}
            message["headers"] = [
                *message["headers"],
                *((n.encode(), v.encode()) for n, v in HEADERS if n.encode() not in known),
            ]
        await send(message)

    return sending


async def _answer(
    send: Send, scope: Scope, status: int, text: str, more: list[tuple[bytes, bytes]] | None = None
) -> None:
    body = text.encode()
    headers = [
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", str(len(body)).encode()),
        *((b"allow", b"GET, HEAD") for _ in range(status == 405)),
        *((name.encode(), value.encode()) for name, value in HEADERS),
        *(more or ()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body if scope["method"] == "GET" else b""})
