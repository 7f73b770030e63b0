"""One HTTP server for all programs: requests wait in a bounded queue, and the rank's thread takes several at once.

The connections are in a thread with an event loop; the model is only used by the thread that calls `Server.take`.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import select
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Callable, Union

from ascendrun.programs.errors import InvalidDataError
from ascendrun.text import Text

TOKEN = "ASCENDRUN_SERVE_TOKEN"
"""The variable with the bearer token that requests must have; unset: none."""
ONCE = ("content-length", "host", "transfer-encoding")
"""Headers that a request has once."""
BACKLOG = 128
"""Clients in a burst are queued, instead of retrying after a second."""
POLL_S = 0.2
LINGER_S = 1.0
REFUSAL_TURNS = 20
"""Turns of the event loop in which the last refusals are sent: turns, not seconds, so that a suspended process has
them after it resumes."""
GATHER_S = 0.002
"""Seconds that a request waits for others to join its batch."""
READERS = 2
"""Threads that read bodies, so that a large one does not delay other connections."""


@dataclass(frozen=True)
class Limits:
    """`silence_s`: to send a request, or to read what was replied. `answer_s`: after the stop signal, in which taken
    requests must complete. `waiting`: requests without a reply; more are refused."""

    head_bytes: int = 16 * 2**10
    body_bytes: int = 4 * 2**20
    connections: int = 256
    waiting: int = 512
    silence_s: float = 30.0
    answer_s: float = 30.0


class RequestRefusedError(Exception):
    """A request is invalid; `status`: the HTTP status code; `values`: more of the reply, next to the error."""

    def __init__(self, status: int, message: str | Text, **values: Any) -> None:
        super().__init__(message)
        self.status, self.values = status, values


Reply = Union[dict[str, Any], RequestRefusedError]
Read = Callable[[bytes], Any]
"""Read a body. Raises RequestRefusedError. Called in another thread than the model's."""


def plain_error(status: int, message: str) -> dict[str, Any]:
    return {"error": message}


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def read_json(body: bytes) -> dict[str, Any]:
    """Read a body that must be a JSON object. Raises RequestRefusedError."""
    try:
        found = json.loads(body, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RequestRefusedError(
            400, Text("program.body-not-json", "the body is not JSON: {error}", error=str(error))
        ) from None
    if not isinstance(found, dict):
        raise RequestRefusedError(400, Text("program.body-not-object", "the body must be a JSON object"))
    return found


class Request:
    """A request in the queue. The model's thread replies to it, once, or sends parts and ends it.

    `is_gone`: the client has disconnected; nobody reads the reply.
    """

    def __init__(self, path: str, content: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.path, self.content, self.loop = path, content, loop
        self.parts: asyncio.Queue[tuple[int, Any] | None] = asyncio.Queue()
        self.is_gone = False

    def reply(self, content: Reply) -> None:
        self.put((content.status if isinstance(content, RequestRefusedError) else 200, content))
        self.put(None)

    def refuse(self, status: int, message: str | Text) -> None:
        self.reply(RequestRefusedError(status, message))

    def send(self, event: str) -> None:
        """Send one server-sent event; `end` after the last one."""
        self.put((200, event))

    def end(self) -> None:
        self.put(None)

    def put(self, part: tuple[int, Any] | None) -> None:
        try:
            self.loop.call_soon_threadsafe(self.parts.put_nowait, part)
        except RuntimeError:  # the loop has ended
            self.is_gone = True


class Server:
    """`pages`: contents of GET paths; `routes`: readers of the bodies of POST paths. Raises OSError where it cannot
    listen."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        pages: Mapping[str, Callable[[], dict[str, Any]]],
        routes: Mapping[str, Read],
        error: Callable[[int, str], dict[str, Any]] = plain_error,
        limits: Limits | None = None,
    ) -> None:
        self.pages, self.routes, self.error, self.limits = pages, routes, error, limits or Limits()
        self.token = os.environ.get(TOKEN, "")
        family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        self.socket = socket.create_server((host, port), family=family, backlog=BACKLOG)
        self.address: tuple[str, int] = self.socket.getsockname()[:2]
        self.waiting = 0
        """Requests that were begun and have no complete reply."""
        self.queue: deque[Request] = deque()
        self.arrived = threading.Condition()
        self.connections: dict[asyncio.StreamWriter, bool] = {}
        """Open connections, and whether they are between two requests."""
        self.is_closing = False
        self.listens, self.closed = threading.Event(), threading.Event()
        self.readers = ThreadPoolExecutor(READERS, "read")
        self.loop: asyncio.AbstractEventLoop
        self.deadline_s: float | None = None
        """Of all replies, by time.monotonic(); None: the server was not told to stop."""

    # --- the thread of the model ---

    def serve(self, is_over: Callable[[], bool], work: Callable[[float], None]) -> bool:
        """Call `work(seconds to wait for a request)` until `is_over`, then until all requests have a reply. Return
        false if some had none within the limit."""
        self.loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self.loop.run_until_complete, args=(self.listen(),), daemon=True)
        thread.start()
        self.listens.wait()
        while not is_over():
            work(POLL_S)
        self.loop.call_soon_threadsafe(lambda: self.loop.create_task(self.close()))
        self.deadline_s = time.monotonic() + self.limits.answer_s
        while (self.waiting or not self.closed.is_set()) and time.monotonic() < self.deadline_s:
            work(POLL_S / 10)
        has_answered = not self.waiting
        for request in self.take(len(self.queue), 0.0):
            request.refuse(503, stopping())
        self.loop.call_soon_threadsafe(lambda: self.ending.set())
        thread.join()
        self.readers.shutdown(wait=False)
        self.loop.close()
        return has_answered

    def take(self, most: int, wait_s: float) -> list[Request]:
        """Return up to `most` requests, after at most `wait_s` without any; [] then."""
        with self.arrived:
            if wait_s and not self.queue:
                self.arrived.wait_for(lambda: self.queue, wait_s)
                if 0 < len(self.queue) < most:
                    self.arrived.wait_for(lambda: len(self.queue) >= most, GATHER_S)
            found = [self.queue.popleft() for _ in range(min(most, len(self.queue)))]
        return [each for each in found if not each.is_gone]

    def serve_batches(
        self, is_over: Callable[[], bool], answer: Callable[[list[Any]], list[Reply]], *, most: int = 64
    ) -> bool:
        """Serve with a function from the contents of requests that came together to their replies."""

        def work(wait_s: float) -> None:
            batch = self.take(most, wait_s)
            try:
                self.reply(batch, answer([each.content for each in batch]) if batch else [])
            except Exception:  # one of them is to blame, or memory ran out: one by one
                for request in batch:
                    try:
                        self.reply([request], answer([request.content]))
                    except Exception:
                        traceback.print_exc()
                        request.refuse(500, failed())

        return self.serve(is_over, work)

    def reply(self, requests: Sequence[Request], contents: Sequence[Reply]) -> None:
        for request, content in zip(requests, contents):
            request.reply(content)

    # --- the thread of the connections ---

    async def listen(self) -> None:
        self.ending = asyncio.Event()
        limit = self.limits.head_bytes
        self.listener = await asyncio.start_server(self.converse, sock=self.socket, limit=limit, backlog=BACKLOG)
        self.listens.set()
        await self.ending.wait()
        for _ in range(REFUSAL_TURNS):  # refusals that are being sent
            if not self.waiting:
                break
            await asyncio.sleep(POLL_S / 20)
        for writer in list(self.connections):
            writer.transport.abort()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def close(self) -> None:
        """Accept what has connected by now, listen no more, and close connections without a request."""
        knock = select.poll()
        knock.register(self.socket, select.POLLIN)
        while knock.poll(0):
            await asyncio.sleep(POLL_S / 20)
        self.listener.close()
        self.is_closing = True
        await asyncio.sleep(POLL_S)
        for writer, is_idle in self.connections.items():
            if is_idle:
                writer.close()
        self.closed.set()

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections[writer] = True
        try:
            if len(self.connections) > self.limits.connections:
                await self.write(writer, 503, busy(), stays=False)
                return
            while await self.exchange(reader, writer):
                pass
            await linger(reader, writer)
        except (OSError, EOFError, asyncio.TimeoutError, asyncio.CancelledError):  # cancelled: by the server's end
            writer.transport.abort()  # a client that is gone, or that neither sends nor reads
        finally:
            del self.connections[writer]
            writer.close()

    async def exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Read one request and reply to it. Return whether the connection stays open."""
        self.connections[writer] = True
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), self.limits.silence_s)
        except asyncio.LimitOverrunError:
            too_large = Text("program.head-size", "headers of more than {most} bytes", most=self.limits.head_bytes)
            await self.write(writer, 431, too_large, stays=False)
            return False
        self.connections[writer] = False
        self.waiting += 1
        asked = Asked()
        try:
            asked.read(head)
            found = self.find(asked)
            if asked.method == "GET":
                await self.write(writer, 200, found(), stays=asked.stays)
                return asked.stays
            body = await self.body(asked, reader, writer)
            content = await self.loop.run_in_executor(self.readers, found, body)
            if len(self.queue) >= self.limits.waiting:
                raise RequestRefusedError(503, busy())
            request = Request(asked.path, content, self.loop)
            with self.arrived:
                self.queue.append(request)
                self.arrived.notify()
            await self.follow(request, asked, reader, writer)
        except RequestRefusedError as refused:
            await self.write(writer, refused.status, refused, stays=asked.stays and not self.is_closing)
        except (OSError, EOFError, asyncio.TimeoutError):
            raise
        except Exception:  # of a reader of bodies, or a page: an error of the program
            traceback.print_exc()
            asked.stays = False
            await self.write(writer, 500, failed(), stays=False)
        finally:
            self.waiting -= 1
        return asked.stays and not self.is_closing

    @property
    def paths(self) -> list[str]:
        return [*(f"POST {path}" for path in self.routes), *(f"GET {path}" for path in self.pages)]

    def find(self, asked: Asked) -> Any:
        """Return the page or the reader of a request. Raises RequestRefusedError."""
        known = {"GET": self.pages, "POST": self.routes}
        given = asked.headers.get("authorization", "").encode("latin-1")
        if self.token and asked.method != "GET" and not hmac.compare_digest(given, b"Bearer " + self.token.encode()):
            raise RequestRefusedError(401, Text("program.no-token", "the bearer token is missing or wrong"))
        if asked.path in known.get(asked.method, {}):
            return known[asked.method][asked.path]
        if any(asked.path in some for some in known.values()):
            wrong = Text(
                "program.method",
                "{method} is not supported here; expected {known}",
                method=asked.method,
                known=self.paths,
            )
            raise RequestRefusedError(405, wrong)
        raise RequestRefusedError(404, Text("program.unknown-path", "unknown path; expected {known}", known=self.paths))

    async def body(self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        length = asked.headers.get("content-length", "")
        if not (length.isascii() and length.isdecimal()):
            raise RequestRefusedError(411, Text("program.body-length", "Content-Length is missing"))
        if len(length) > 18 or int(length) > self.limits.body_bytes:
            message = "body of {length} bytes; the limit is {most} bytes"
            raise RequestRefusedError(
                413, Text("program.body-size", message, length=length, most=self.limits.body_bytes)
            )
        if asked.headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await asyncio.wait_for(reader.readexactly(int(length)), self.limits.silence_s)
        asked.stays = asked.keeps
        return body

    async def follow(
        self, request: Request, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Send what the model's thread replies, and see whether the client is still there."""
        watch = asyncio.ensure_future(reader.read(1))
        streams = False
        try:
            while True:
                found = await self.next_part(request, asked, watch)
                if found is None or not (streams or isinstance(found[1], str)):
                    watch.cancel()  # the client may send its next request as soon as it has the last byte
                    await asyncio.gather(watch, return_exceptions=True)
                if found is None:
                    break
                status, content = found
                if not isinstance(content, str) and not streams:
                    await self.write(writer, status, content, stays=asked.stays and not self.is_closing)
                    return
                if not streams:
                    writer.write(stream_head(asked))
                    streams = True
                if not isinstance(content, str):
                    content = f"data: {json.dumps(self.error(status, str(content)))}\n\n"
                await self.write_part(writer, asked, content)
            if asked.is_new:
                writer.write(b"0\r\n\r\n")
                await self.drain(writer)
        except BaseException:
            request.is_gone = True
            raise
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def next_part(self, request: Request, asked: Asked, watch: asyncio.Future[bytes]) -> tuple[int, Any] | None:
        """Return what the model's thread replies next. Raises EOFError if the client disconnects before that."""
        part = asyncio.ensure_future(request.parts.get())
        watched: set[asyncio.Future[Any]] = {part} if watch.done() else {part, watch}
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        if watch.done():
            if not watch.result():
                part.cancel()
                raise EOFError
            asked.stays = False  # a second request before the reply to the first
        return await part

    async def write_part(self, writer: asyncio.StreamWriter, asked: Asked, text: str) -> None:
        raw = text.encode()
        writer.write(b"%x\r\n%s\r\n" % (len(raw), raw) if asked.is_new else raw)
        await self.drain(writer)

    async def write(
        self, writer: asyncio.StreamWriter, status: int, content: dict[str, Any] | Exception | Text, *, stays: bool
    ) -> None:
        given = content if isinstance(content, dict) else self.error(status, str(content))
        if isinstance(content, RequestRefusedError):
            given = {**given, **content.values}
        raw = json.dumps(given).encode() + b"\n"
        more = "" if stays else "Connection: close\r\n"
        more += {401: "WWW-Authenticate: Bearer\r\n", 405: "Allow: GET, POST\r\n", 503: "Retry-After: 1\r\n"}.get(
            status, ""
        )
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(raw)}\r\n{more}\r\n".encode() + raw)
        await self.drain(writer)

    async def drain(self, writer: asyncio.StreamWriter) -> None:
        await asyncio.wait_for(writer.drain(), self.limits.silence_s)


@dataclass
class Asked:
    """The head of a request. `keeps`: the client keeps the connection; `stays`: it may, because the body was read.
    `is_new`: HTTP/1.1."""

    method: str = ""
    path: str = ""
    is_new: bool = True
    keeps: bool = False
    stays: bool = False

    def read(self, head: bytes) -> None:
        """Raises RequestRefusedError."""
        first, *lines = head.decode("latin-1").lstrip("\r\n").split("\r\n")[:-2]
        words = first.split(" ")
        self.headers: dict[str, str] = {}
        for line in lines:
            name, colon, value = line.partition(":")
            key = name.lower()
            if not colon or not name or name.strip() != name or (key in self.headers and key in ONCE):
                raise RequestRefusedError(400, malformed())
            self.headers[key] = value.strip()
        if len(words) != 3 or not words[1].startswith("/") or words[2] not in ("HTTP/1.1", "HTTP/1.0"):
            raise RequestRefusedError(400, malformed())
        if "transfer-encoding" in self.headers:
            self.headers.pop("content-length", None)
        self.method, self.path, self.is_new = words[0], words[1].partition("?")[0], words[2] == "HTTP/1.1"
        self.keeps = self.is_new and "close" not in self.headers.get("connection", "").lower()
        self.stays = self.keeps and self.method == "GET" and "content-length" not in self.headers


def stream_head(asked: Asked) -> bytes:
    kind = "Transfer-Encoding: chunked" if asked.is_new else "Connection: close"
    return f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n{kind}\r\n\r\n".encode()


async def linger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read what the client still sends: a connection closed before that would take the reply with it."""
    if writer.can_write_eof():
        writer.write_eof()
    deadline_s = time.monotonic() + LINGER_S
    more = b"more"
    while more and time.monotonic() < deadline_s:
        more = await asyncio.wait_for(reader.read(2**16), LINGER_S)


def not_listening(host: str, port: int, reason: str | None) -> InvalidDataError:
    return InvalidDataError(
        "program.cannot-listen",
        "--host={host} --port={port}: {error}\n"
        "hint: choose another port (0: any free port), or an address of this machine",
        host=host,
        port=port,
        error=reason,
    )


def ending(server: Server, has_answered: bool) -> Text:
    """Return the last line of a service that was stopped. `has_answered`: of `Server.serve`."""
    if has_answered:
        return Text("program.served", "stop requested; no request is left")
    return Text(
        "program.unanswered",
        "stop requested; requests without a reply after {s:.0f} s are dropped",
        s=server.limits.answer_s,
    )


def busy() -> Text:
    return Text("program.server-busy", "too many requests are waiting")


def stopping() -> Text:
    return Text("program.server-stops", "the server stops")


def failed() -> Text:
    return Text("program.server-failed", "internal error; the log of the job has its traceback")


def malformed() -> Text:
    return Text("program.malformed", "not an HTTP/1.1 request")
