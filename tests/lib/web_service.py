"""A web service in a thread that answers as it is told, and remembers what it was asked."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Union

from tests.lib.vcluster.processes import await_that

DEADLINE_S = 60.0


@dataclass(frozen=True)
class Say:
    status: int = 200
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()


HANG, DROP, DRIP = "hang", "drop", "drip"
Answer = Union[Say, str]


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Service:
    """`answers`: one for each question in turn; when they are used up, `default`."""

    def __init__(self, *answers: Answer, default: Answer = Say()) -> None:
        self.answers: list[Answer] = list(answers)
        self.default = default
        self.asked: list[Asked] = []
        self._closing = threading.Event()
        self._lock = threading.Lock()
        service = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                with service._lock:
                    service.asked.append(Asked(self.command, self.path, dict(self.headers.items()), body))
                    answer = service.answers.pop(0) if service.answers else service.default
                service._say(self, answer)

            do_GET = do_POST = do_CONNECT = _answer

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def _say(self, handler: http.server.BaseHTTPRequestHandler, answer: Answer) -> None:
        handler.close_connection = True
        if answer == DROP:
            return
        if answer == HANG:
            self._closing.wait(DEADLINE_S)
            return
        if answer == DRIP:
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
            try:
                while not self._closing.wait(0.05):
                    handler.wfile.write(b"x")
            except OSError:
                return
            return
        assert isinstance(answer, Say)
        handler.send_response(answer.status)
        for name, value in answer.headers:
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(answer.body)))
        handler.end_headers()
        handler.wfile.write(answer.body)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def url(self, path: str = "/hook/0123456789abcdef?key=topsecret99") -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def await_asked(self, count: int) -> list[Asked]:
        await_that(lambda: len(self.asked) >= count)
        return self.asked[:count]

    def close(self) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def settings_text(
    targets: list[dict[str, Any]], *, hook: dict[str, Any] | None = None, deadman: dict[str, Any] | None = None
) -> str:
    """A settings file; JSON is YAML."""
    blocks = {"notify": targets, "hook": hook, "deadman": deadman}
    return json.dumps({name: block for name, block in blocks.items() if block})
