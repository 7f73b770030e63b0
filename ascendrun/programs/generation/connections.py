"""HTTP side of a server: connections and their limits by uvicorn, requests by starlette, in a thread of their own.

Order of the checks of a request: connection, head (time and size), token or origin, path, media type, body (size and
time), contents. A request costs memory for a body only after all checks before it.

A browser on the same machine can be made to send requests by any page that it shows. Without a token, a request must
therefore name this server by an address or a name of this machine (a name of somebody else's domain may point here:
DNS rebinding), come from no other site, and have a media type that a page cannot send without being asked for leave.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import select
import socket
import threading
import traceback
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Callable

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from ascendrun.programs.generation.page import headers_of, make_page
from ascendrun.programs.generation.requests import (
    POLL_S,
    Read,
    Request,
    RequestQueue,
    RequestRefusedError,
    busy,
    failed,
)
from ascendrun.text import language_of_reader, listed

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

LINGER_S = 1.0
READERS = 2
"""Threads that read bodies, so that a large one does not delay other connections."""
TURNS = 20
"""Turns of the event loop in which the last requests arrive and the last refusals are sent: turns, not seconds, so that
a suspended process has them after it resumes."""
OF_STREAMS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
MORE_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 405: {"Allow": "GET, POST"}, 503: {"Retry-After": "1"}}


class Listener:
    """The thread of the connections of a server."""

    def __init__(
        self,
        queue: RequestQueue,
        listening: socket.socket,
        *,
        pages: Mapping[str, Callable[[], dict[str, Any]]],
        routes: Mapping[str, Read],
        error: Callable[[int, str], dict[str, Any]],
        token: str,
    ) -> None:
        self.queue, self.socket = queue, listening
        self.pages, self.routes, self.make_error, self.token = pages, routes, error, token
        self.connections: set[Connection] = set()
        self.is_closed = False
        """Whether nothing more is accepted, and everything that had connected by then is known."""
        self.bodies_bytes = 0
        self.names = own_names()
        self.readers = ThreadPoolExecutor(READERS, "read")
        self.loop = asyncio.new_event_loop()
        self.app = self.make_app()
        self.ended = self.loop.create_future()
        config = uvicorn.Config(
            self.gate,
            interface="asgi3",
            http=partial(Connection, self),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=queue.limits.head_bytes,
            timeout_keep_alive=2**31,  # `sweep` ends silent connections
        )
        self.uvicorn = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.loop.run_until_complete, args=(self.run(),), daemon=True)

    def start(self) -> None:
        self.thread.start()

    def close(self) -> None:
        """Accept no more connections than those that have connected by now. Any thread."""
        self.loop.call_soon_threadsafe(lambda: self.loop.create_task(self.stop_listening()))

    def end(self) -> None:
        """End the thread, and connections without a reply."""
        asyncio.run_coroutine_threadsafe(self.abort(), self.loop).result()
        self.thread.join()
        self.readers.shutdown(wait=False)
        self.loop.close()

    async def run(self) -> None:
        sweeping = asyncio.ensure_future(self.sweep())
        naming = asyncio.ensure_future(self.add_full_name())
        await self.uvicorn.serve(sockets=[self.socket])
        await self.ended  # the model's thread may still talk to this one
        for task in (sweeping, naming):
            task.cancel()
        await asyncio.gather(sweeping, naming, return_exceptions=True)

    async def add_full_name(self) -> None:
        """A name server that does not respond takes seconds: nothing waits for it."""
        self.names |= {(await self.loop.run_in_executor(None, socket.getfqdn)).lower()}

    async def sweep(self) -> None:
        """End connections whose clients neither send nor read."""
        while True:
            await asyncio.sleep(POLL_S / 2)
            deadline_s = self.loop.time() - self.queue.limits.silence_s
            for connection in list(self.connections):
                if connection.quiet_since_s is not None and connection.quiet_since_s < deadline_s:
                    connection.transport.abort()

    async def stop_listening(self) -> None:
        while not self.uvicorn.started:
            await asyncio.sleep(POLL_S / 20)
        knock = select.poll()
        knock.register(self.socket, select.POLLIN)
        while knock.poll(0):
            await asyncio.sleep(POLL_S / 20)
        # Closing the servers now would end connections that were accepted and have no transport yet.
        self.loop.remove_reader(self.socket.fileno())
        for _ in range(TURNS):  # requests of connections that were accepted last
            await asyncio.sleep(POLL_S / 20)
        self.uvicorn.should_exit = True  # closes connections without a request
        self.is_closed = True

    async def abort(self) -> None:
        for _ in range(TURNS):  # refusals that are being sent
            if not self.queue.waiting:
                break
            await asyncio.sleep(POLL_S / 20)
        self.uvicorn.should_exit = self.uvicorn.force_exit = True
        self.ended.set_result(None)
        for connection in list(self.connections):
            connection.transport.abort()

    def make_app(self) -> ASGIApp:
        routes = [Route("/", self.index, methods=["GET"])]
        routes += [Route(path, partial(self.page, path), methods=["GET"]) for path in self.pages]
        routes += [Route(path, partial(self.post, path), methods=["POST"]) for path in self.routes]
        app = Starlette(
            routes=routes, exception_handlers={RequestRefusedError: self.refused, HTTPException: self.no_route}
        )
        app.router.redirect_slashes = False
        return app

    async def gate(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count a request until its reply is complete, and refuse it before anything of its body is read."""
        queue = self.queue
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        queue.waiting += 1
        try:
            if len(self.connections) > queue.limits.connections:
                raise RequestRefusedError(503, busy())
            self.check(scope, headers)
            await self.app(scope, receive, send)
        except RequestRefusedError as error:
            await reply(self.error(error), error.status)(scope, receive, send)
        except ClientDisconnect:
            pass
        finally:
            queue.waiting -= 1

    async def index(self, asked: HttpRequest) -> Response:
        page = make_page(language_of_reader(asked.headers.get("accept-language", "")))
        return HTMLResponse(page, headers=headers_of(page))

    async def page(self, path: str, asked: HttpRequest) -> Response:
        return reply(self.pages[path]())

    async def post(self, path: str, asked: HttpRequest) -> Response:
        if asked.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            message = listed("program.media-type")
            raise RequestRefusedError(415, message)
        body = await self.body(asked)
        try:
            content = await self.loop.run_in_executor(self.readers, self.routes[path], body)
        except RequestRefusedError:
            raise
        except Exception:  # an error of the program
            traceback.print_exc()
            raise RequestRefusedError(500, failed()) from None
        request = Request(path, content, self.loop)
        self.queue.add(request)
        try:
            return await self.follow(request, asked)
        except BaseException:
            request.is_gone = True
            raise

    async def body(self, asked: HttpRequest) -> bytes:
        """Read a body within the limits. Raises RequestRefusedError, ClientDisconnect."""
        limits, length = self.queue.limits, asked.headers.get("content-length", "")
        if not length.isdecimal():
            raise RequestRefusedError(411, listed("program.body-length"))
        if int(length) > limits.body_bytes:
            raise RequestRefusedError(413, listed("program.body-size", length=length, most=limits.body_bytes))
        if self.bodies_bytes + int(length) > limits.bodies_bytes:
            raise RequestRefusedError(503, busy())
        self.bodies_bytes += int(length)
        try:
            return await asyncio.wait_for(asked.body(), limits.silence_s)
        except asyncio.TimeoutError:
            raise RequestRefusedError(408, listed("program.body-late")) from None
        finally:
            self.bodies_bytes -= int(length)

    async def follow(self, request: Request, asked: HttpRequest) -> Response:
        """Return what the model's thread replies. Raises ClientDisconnect if the client leaves before that."""
        part = asyncio.ensure_future(request.parts.get())
        left = asyncio.ensure_future(asked.receive())  # after the body only a disconnect is received
        try:
            await asyncio.wait((part, left), return_when=asyncio.FIRST_COMPLETED)
            if not part.done():
                raise ClientDisconnect
            found = part.result()
        finally:
            part.cancel()
            left.cancel()
            await asyncio.gather(part, left, return_exceptions=True)
        if isinstance(found, str):
            return StreamingResponse(self.events(request, found), headers=OF_STREAMS)
        if isinstance(found, RequestRefusedError):
            raise found
        assert found is not None, "a request was ended without a reply"
        return reply(found)

    async def events(self, request: Request, part: Any) -> AsyncIterator[str]:
        try:
            while part is not None:
                yield part if isinstance(part, str) else f"data: {json.dumps(self.error(part))}\n\n"
                part = await request.parts.get()
        finally:  # ended, or the client has left
            request.is_gone = True

    def error(self, refused: RequestRefusedError) -> dict[str, Any]:
        return {**self.make_error(refused.status, str(refused)), **refused.values}

    async def refused(self, asked: HttpRequest, error: Any) -> Response:
        return reply(self.error(error), error.status)

    async def no_route(self, asked: HttpRequest, error: Any) -> Response:
        known = [*(f"POST {path}" for path in self.routes), *(f"GET {path}" for path in self.pages)]
        if error.status_code == 404:
            wrong = listed("program.unknown-path", known=known)
        else:
            wrong = listed("program.method", method=asked.method, known=known)
        return await self.refused(asked, RequestRefusedError(error.status_code, wrong))

    def check(self, scope: Scope, headers: dict[str, str]) -> None:
        """Raise RequestRefusedError for a request that may be somebody else's."""
        token = self.token
        if token:
            given = headers.get("authorization", "").encode("latin-1")
            if scope["method"] != "GET" and not hmac.compare_digest(given, b"Bearer " + token.encode()):
                raise RequestRefusedError(401, listed("program.no-token"))
            return
        host = headers.get("host", "")
        if not is_own_name(host, self.names):
            raise RequestRefusedError(421, listed("program.foreign-host", host=host, variable="ASCENDRUN_SERVE_TOKEN"))
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            raise RequestRefusedError(403, listed("program.foreign-origin", origin=origin))


class Connection(H11Protocol):
    """A connection with a clock: how long its client has sent no complete head, or has read nothing.

    The clock stands while a request is worked on. A new connection above the limit takes the place of the one that has
    been silent for longest, so that silent connections keep nobody out.
    """

    def __init__(self, listener: Listener, **values: Any) -> None:
        super().__init__(**values)
        self.listener = listener
        self.quiet_since_s: float | None = self.loop.time()
        self.is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        others, limits = self.listener.connections, self.listener.queue.limits
        others.add(self)
        peer = [other for other in others if other.client and self.client and other.client[0] == self.client[0]]
        for crowd, most in ((peer, limits.peer_connections), (others, limits.connections)):
            silent = [other for other in crowd if other.quiet_since_s is not None and other is not self]
            if len(crowd) > most and silent:
                longest = min(silent, key=lambda other: other.quiet_since_s or 0.0)
                others.discard(longest)
                longest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.listener.connections.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self.is_refused:
            super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete and not self.flow.write_paused:
            self.quiet_since_s = None

    def on_response_complete(self) -> None:
        self.quiet_since_s = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        self.quiet_since_s = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self.quiet_since_s = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        error = self.listener.error(RequestRefusedError(400, listed("program.malformed")))
        raw = json.dumps(error).encode() + b"\n"
        head = f"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n"
        self.transport.write(head.encode() + b"Connection: close\r\n\r\n" + raw)
        self.transport.write_eof()
        self.is_refused = True  # what the client still sends is read: closing now would take the reply with it
        self.loop.call_later(LINGER_S, self.transport.abort)


class Json(JSONResponse):
    """A JSON object and a line feed, which a terminal shows well."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode() + b"\n"


def reply(content: dict[str, Any], status: int = 200) -> Response:
    return Json(content, status, headers=MORE_HEADERS.get(status))


def own_names() -> frozenset[str]:
    name = socket.gethostname().lower()
    return frozenset((name, name.partition(".")[0], "localhost"))


def is_own_name(host: str, names: frozenset[str]) -> bool:
    """Return whether a Host header names this machine: a page of another site has neither an address nor its name."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() and not host.endswith("]") else host
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return name.lower().rstrip(".") in names
    return True
