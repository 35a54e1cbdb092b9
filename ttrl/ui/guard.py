"""Let only the holder of the key read pages: the checks around every request.

The server listens on the loopback, but other users of the machine and foreign web pages can reach
it there. So each request passes four checks: a method that only reads; a loopback name as its host,
against DNS rebinding; no foreign page as its origin; and the key. The printed address carries the
key once. The browser then keeps it as a cookie, hidden from scripts and never sent by other sites.
"""

import hmac
import secrets
from urllib.parse import quote, urlencode

from markupsafe import escape
from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "ttrl_ui"
_HOSTS = frozenset({"127.0.0.1", "localhost", "[::1]"})
_POLICY = (
    "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'self'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "SAMEORIGIN",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "private, no-cache",
}


def new_key() -> str:
    """Return a random key."""
    return secrets.token_urlsafe(32)


class Guard:
    """Check each request before `app` sees it, and add the headers of each answer."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # a WebSocket
            await send({"type": "websocket.close", "code": 1008})
            return
        refusal = self._refusal(scope)

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await (refusal or self._app)(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        """Return the answer to a refused request; None for the others."""
        request = HTTPConnection(scope)
        headers = request.headers
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("these pages can only be read\n", 405, {"Allow": "GET, HEAD"})
        if _host_name(headers.get("host", "")) not in _HOSTS:
            return PlainTextResponse("unknown host: use the printed address\n", 421)
        given = request.query_params.get("key")
        if given is None:
            if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
                return PlainTextResponse("no answers to pages of other addresses\n", 403)
            if self._is_key(request.cookies.get(COOKIE, "")):
                return None
        elif self._is_key(given):
            query = request.query_params.multi_items()
            return self._welcome(scope, [pair for pair in query if pair[0] != "key"])
        return PlainTextResponse("A key is missing: open the address printed by `ttrl ui`.\n", 401)

    def _is_key(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), self._key.encode())

    def _welcome(self, scope: Scope, rest: list[tuple[str, str]]) -> Response:
        """Keep the key as a cookie, and go to the address without it. A redirection would be part
        of a foreign page's navigation, and browsers would hold the cookie back.
        """
        path = "/" + scope["path"].lstrip("/\\")  # never //another.host
        address = quote(path) + ("?" + urlencode(rest) if rest else "")
        page = (
            '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>ttrl ui</title>'
            f'<meta http-equiv="refresh" content="0;url={escape(address)}"></head>'
            f'<body><a href="{escape(address)}">Continue</a></body></html>'
        )
        response = HTMLResponse(page, headers={"Cache-Control": "no-store"})
        response.set_cookie(COOKIE, self._key, httponly=True, samesite="strict", path="/")
        return response


def _host_name(host: str) -> str:
    """Return a Host header without its port. A forwarded port may be any."""
    name, colon, port = host.rpartition(":")
    if colon and port.isdecimal():
        return name.lower()
    return host.lower()
