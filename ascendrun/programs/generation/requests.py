"""Requests of HTTP clients, their bodies, and the bounded queue from which the rank's thread takes several at once."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable, Union

from ascendrun.text import Text, listed

POLL_S = 0.2
GATHER_S = 0.002
"""Seconds that a request waits for others to join its batch."""


@dataclass(frozen=True)
class Limits:
    """`silence_s`: to send a request, or to read what was replied. `answer_s`: after the stop signal, in which taken
    requests must complete. `waiting`: requests without a reply; more are refused. `connections`: open at once,
    `peer_connections`: from one address. `bodies_bytes`: of all requests that are being read."""

    head_bytes: int = 16 * 2**10
    body_bytes: int = 4 * 2**20
    bodies_bytes: int = 64 * 2**20
    connections: int = 256
    peer_connections: int = 192
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


def finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits} exceeds the range of numbers")
    return number


def read_json(body: bytes) -> dict[str, Any]:
    """Read a body that must be a JSON object of finite numbers. Raises RequestRefusedError."""
    try:
        found = json.loads(body, parse_constant=refuse_constant, parse_float=finite)
    except (ValueError, RecursionError) as error:
        raise RequestRefusedError(400, listed("program.body-not-json", error=str(error))) from None
    if not isinstance(found, dict):
        raise RequestRefusedError(400, listed("program.body-not-object"))
    return found


def refuse_unknown(asked: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise RequestRefusedError if the body has other keys than these."""
    unknown = sorted(set(asked) - set(known))
    if unknown:
        raise RequestRefusedError(400, listed("program.body-unknown", unknown=unknown, known=list(known)))


class Request:
    """A request in the queue. The model's thread replies to it, once, or sends parts and ends it.

    `is_gone`: the client has disconnected; nobody reads the reply.
    """

    def __init__(self, path: str, content: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.path, self.content, self.loop = path, content, loop
        self.parts: asyncio.Queue[Reply | str | None] = asyncio.Queue()
        self.is_gone = False

    def reply(self, content: Reply) -> None:
        self.send(content)
        self.end()

    def refuse(self, status: int, message: str | Text) -> None:
        self.reply(RequestRefusedError(status, message))

    def end(self) -> None:
        self.send(None)

    def send(self, part: Reply | str | None) -> None:
        """Send a part of the reply: of a stream one server-sent event, then `end` after the last one."""
        try:
            self.loop.call_soon_threadsafe(self.parts.put_nowait, part)
        except RuntimeError:  # the loop has ended
            self.is_gone = True


class RequestQueue:
    """Requests between the thread of the connections, which adds them, and the model's, which takes them.

    `waiting`: requests that were begun and have no complete reply.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.waiting = 0
        self.requests: deque[Request] = deque()
        self.arrived = threading.Condition()

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: Request) -> None:
        """Raises RequestRefusedError."""
        if len(self.requests) >= self.limits.waiting:
            raise RequestRefusedError(503, busy())
        with self.arrived:
            self.requests.append(request)
            self.arrived.notify()

    def take(self, most: int, wait_s: float) -> list[Request]:
        """Return up to `most` requests, after at most `wait_s` without any; [] then."""
        with self.arrived:
            if wait_s and not self.requests:
                self.arrived.wait_for(lambda: self.requests, wait_s)
                if 0 < len(self.requests) < most:
                    self.arrived.wait_for(lambda: len(self.requests) >= most, GATHER_S)
            found = [self.requests.popleft() for _ in range(min(most, len(self.requests)))]
        return [each for each in found if not each.is_gone]


def busy() -> Text:
    return listed("program.server-busy")


def failed() -> Text:
    return listed("program.server-failed")
