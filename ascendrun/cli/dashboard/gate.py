"""Who may use the dashboard: the checks of every request, and the headers of every response."""

from __future__ import annotations

import html
import ipaddress
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from ascendrun.core.dataclass import dataclass
from ascendrun.text import Text, language_for_reader, language_of_reader

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
READS = ("GET", "HEAD")
HEAD = '<!doctype html><link rel="icon" href="data:,"><title>ascendrun</title>'
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
REFUSALS = {
    "host": (421, Text("dashboard.refused-host", "unknown host name in the address of this page")),
    "origin": (403, Text("dashboard.refused-origin", "requests from other sites are refused")),
    "token": (401, Text("dashboard.refused-token", "open the address that `ascendrun dashboard` printed")),
    "method": (405, Text("dashboard.refused-method", "this dashboard only shows; nothing can be changed here")),
}


@dataclass(frozen=True)
class Access:
    """`hosts`: names by which browsers may reach the server, without port, besides loopback ones. `any_address`: any IP
    address is such a name too, as the server listens on all. `lang`: None: each browser's own. `allows_actions`: forms
    of its pages may be sent."""

    token: str
    port: int
    hosts: frozenset[str] = frozenset()
    any_address: bool = False
    is_tls: bool = False
    lang: str | None = None
    allows_actions: bool = False

    @property
    def cookie(self) -> str:
        """The name of the cookie; cookies are shared by all ports of a host."""
        return f"ascendrun-{self.port}"

    def refusal(self, request: Request) -> str | None:
        """Return the code of the first failed check, None: the request is served.

        A page of another site cannot read or change anything: its name is not in `hosts`, not even after it was rebound
        to this address, and its requests carry an Origin or Sec-Fetch-Site that is not ours, and no cookie.
        """
        headers = request.headers
        host = headers.get("host", "")
        if not self._knows(host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host):
            return "host"
        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
        is_form = origin == "null" and site == "same-origin"  # of a page that sends no referrer
        if origin is not None and not is_form and origin != f"{'https' if self.is_tls else 'http'}://{host}":
            return "origin"
        is_opened = request.method == "GET" and headers.get("sec-fetch-mode") == "navigate"
        if site not in ("none", "same-origin") and not is_opened:
            return "origin"
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer if kind == "Bearer" else request.cookies.get(self.cookie, "")
        if not secrets.compare_digest(given.encode(), self.token.encode()):
            return "token"
        if request.method in READS:
            return None
        if not self.allows_actions or request.method != "POST":
            return "method"
        return "origin" if origin is None else None

    def _knows(self, name: str) -> bool:
        name = name.lower()
        if name in LOOPBACK or name in self.hosts:
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return self.any_address


class Gate:
    """ASGI middleware: serves only what `access` permits, in the language of the reader."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def send_safely(message: MutableMapping[str, object]) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        request = Request(scope)
        with language_for_reader(self._access.lang or language_of_reader(request.headers.get("accept-language", ""))):
            await (self._answer(request) or self._app)(scope, receive, send_safely)

    def _answer(self, request: Request) -> Response | None:
        """Return what is served instead of the page; None: the page."""
        access = self._access
        refusal = access.refusal(request)
        token = request.query_params.get("token")
        is_entry = refusal in (None, "token") and request.url.path == "/" and request.method == "GET"
        if is_entry and token is not None and secrets.compare_digest(token.encode(), access.token.encode()):
            # A redirect would belong to the site that the reader came from, and carry no strict cookie.
            page = f'{HEAD}<meta http-equiv="refresh" content="0;url=/">'
            response = HTMLResponse(page)
            response.set_cookie(
                access.cookie, access.token, httponly=True, samesite="strict", secure=access.is_tls, path="/"
            )
            return response
        if refusal is None:
            return None
        status, text = REFUSALS[refusal]
        if "text/html" in request.headers.get("accept", ""):
            return HTMLResponse(f"{HEAD}<p>{html.escape(str(text))}", status)
        return PlainTextResponse(f"{text}\n", status)
