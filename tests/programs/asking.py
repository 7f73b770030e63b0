"""A service of a rank in a thread, and questions to it over HTTP."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ascendrun.programs.generation.server import RankService

JSON = {"Content-Type": "application/json"}


@contextmanager
def served(service: RankService) -> Iterator[tuple[str, int]]:
    server, over = service.listen("127.0.0.1", 0), threading.Event()
    thread = threading.Thread(target=server.serve_batches, args=(over.is_set, service.answer))
    thread.start()
    yield server.address
    over.set()
    thread.join()


def ask(
    address: tuple[str, int], method: str, page: str, body: Any = None, headers: Mapping[str, str] | None = None
) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(*address, timeout=60)
    raw = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
    connection.request(method, page, raw, {**JSON, **(headers or {})})
    reply = connection.getresponse()
    answer = reply.status, json.loads(reply.read())
    connection.close()
    return answer
