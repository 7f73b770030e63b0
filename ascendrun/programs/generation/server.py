"""HTTP server of a program: its connections in a thread of their own, its model in the thread that serves.

The connections are generation/connections.py, the queue between both threads generation/requests.py.
"""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Callable

from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.generation.requests import POLL_S, Limits, Read, Reply, RequestQueue, failed, plain_error
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.text import Text, listed

TOKEN = "ASCENDRUN_SERVE_TOKEN"
"""The variable with the bearer token that requests must have; unset: none."""
BACKLOG = 128
"""Clients in a burst are queued, instead of retrying after a second."""


class Server:
    """`pages`: contents of GET paths; `routes`: readers of the bodies of POST paths. Raises OSError where it cannot
    listen, InvalidDataError without the packages of the extra `serve`."""

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
        try:
            from ascendrun.programs.generation.connections import Listener
        except ModuleNotFoundError as missing:
            raise InvalidDataError(listed("program.serve-package", package=missing.name)) from None
        self.queue = RequestQueue(limits or Limits())
        self.paths = [*(f"POST {path}" for path in routes), *(f"GET {path}" for path in pages)]
        family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        self.socket = socket.create_server((host, port), family=family, backlog=BACKLOG)
        self.address: tuple[str, int] = self.socket.getsockname()[:2]
        token = os.environ.get(TOKEN, "")
        self.listener = Listener(self.queue, self.socket, pages=pages, routes=routes, error=error, token=token)
        self.deadline_s: float | None = None
        """Of all replies, by time.monotonic(); None: the server was not told to stop."""

    def serve(self, is_over: Callable[[], bool], work: Callable[[float], None]) -> bool:
        """Call `work(seconds to wait for a request)` until `is_over`, then until all requests have a reply. Return
        false if some had none within the limit."""
        self.listener.start()
        while not is_over():
            work(POLL_S)
        self.listener.close()
        self.deadline_s = time.monotonic() + self.queue.limits.answer_s
        while (self.queue.waiting or not self.listener.is_closed) and time.monotonic() < self.deadline_s:
            work(POLL_S / 10)
        has_answered = not self.queue.waiting
        for request in self.queue.take(len(self.queue), 0.0):
            request.refuse(503, listed("program.server-stops"))
        self.listener.end()
        return has_answered

    def serve_batches(
        self, is_over: Callable[[], bool], answer: Callable[[list[Any]], list[Reply]], *, most: int = 64
    ) -> bool:
        """Serve with a function from the contents of requests that came together to their replies."""

        def work(wait_s: float) -> None:
            batch = self.queue.take(most, wait_s)
            try:
                replies = answer([each.content for each in batch]) if batch else []
                for request, reply in zip(batch, replies):
                    request.reply(reply)
            except Exception:  # one of them is to blame, or memory ran out: one by one
                for request in batch:
                    try:
                        request.reply(answer([request.content])[0])
                    except Exception:
                        traceback.print_exc()
                        request.refuse(500, failed())

        return self.serve(is_over, work)


def not_listening(host: str, port: int, reason: str | None) -> InvalidDataError:
    return InvalidDataError(listed("program.cannot-listen", host=host, port=port, error=reason))


def ending(server: Server, has_answered: bool) -> Text:
    """Return the last line of a service that was stopped. `has_answered`: of `Server.serve`."""
    if has_answered:
        return listed("program.served")
    return listed("program.unanswered", s=server.queue.limits.answer_s)


@dataclass(frozen=True)
class RankService:
    """What each rank serves. `read`: of the bodies of POST `path`; `answer`: as of Server.serve_batches; `facts`: for
    GET /health."""

    path: str
    read: Read
    answer: Callable[[list[Any]], list[Reply]]
    facts: Mapping[str, Any]

    def listen(self, host: str, port: int) -> Server:
        """Create a server that listens and does not serve yet. Raises OSError."""

        def health() -> dict[str, Any]:
            return {"status": "ok", **self.facts, "waiting": server.queue.waiting - 1}  # without this one

        server = Server(host, port, pages={"/health": health}, routes={self.path: self.read})
        return server

    def serve(self, options: Mapping[str, Any], here: Runtime) -> None:
        """Serve at `host` and `port` of the options plus the local rank."""
        host, port = options["host"], options["port"] + here.local_rank if options["port"] else 0
        try:
            server = self.listen(host, port)
        except OSError as error:
            raise not_listening(host, port, error.strerror) from error
        host, port = server.address
        print(listed("program.serving", host=host, port=port, paths=server.paths), flush=True)
        here.record(event="serving", host=host, port=port)
        has_answered = server.serve_batches(lambda: here.stop_requested, self.answer)
        here.record(done=True)
        here.log(ending(server, has_answered))
