"""One question to a web server: a deadline for all of it, the environment's proxies, verified TLS, no redirects."""

from __future__ import annotations

import http.client
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ANSWER_BYTES = 64 * 1024


@dataclass(frozen=True)
class WebAnswer:
    """`body`: at most ANSWER_BYTES of it."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class RequestFailedError(Exception):
    """The server could not be asked, or did not answer in time. The message never holds the URL."""


class Cut:
    """Ends a question from another thread: its connection is shut, whatever it waits for."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self.is_cut = False

    def add(self, one: socket.socket) -> None:
        with self._lock:
            self._sockets.append(one)
            is_cut = self.is_cut
        if is_cut:
            self.cut()

    def cut(self) -> None:
        with self._lock:
            self.is_cut = True
            sockets = tuple(self._sockets)
        for one in sockets:
            try:
                socket.socket.shutdown(one, socket.SHUT_RDWR)  # below TLS, which would wait for its own goodbye
            except OSError:
                pass  # it is closed already


def ask_web(
    url: str, *, headers: Mapping[str, str], body: bytes | None, deadline_s: float, cut: Cut | None = None
) -> WebAnswer:
    """POST when there is a body, else GET. An answer of any status is an answer. Raises RequestFailedError."""
    cut = cut or Cut()
    request = urllib.request.Request(url, data=body, headers={"User-Agent": "ascendrun", **headers})
    opener = urllib.request.build_opener(_Http(cut), _Https(cut), _NoRedirect())
    timer = threading.Timer(deadline_s, cut.cut)
    timer.daemon = True
    timer.start()
    try:
        try:
            response = opener.open(request, timeout=deadline_s)
        except urllib.error.HTTPError as error:
            response = error
        with response:
            data = response.read(ANSWER_BYTES)
        if cut.is_cut:
            raise RequestFailedError(f"no whole answer within {deadline_s:g} s")
        return WebAnswer(int(response.status or 0), dict(response.headers.items()), data)
    except (OSError, http.client.HTTPException, ValueError) as error:
        if cut.is_cut:
            raise RequestFailedError(f"no answer within {deadline_s:g} s") from None
        raise RequestFailedError(_describe(error)) from None  # the cause may hold the URL
    finally:
        timer.cancel()


def _describe(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    inner = reason if isinstance(reason, Exception) else error
    if isinstance(inner, TimeoutError):
        return "no answer in time"
    if isinstance(inner, OSError):
        return str(inner.strerror or inner)[:200]
    return type(inner).__name__ if isinstance(inner, ValueError) else f"{type(inner).__name__}: {inner}"[:200]


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A notice, with its credential, goes where the settings say and nowhere else."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class _Http(urllib.request.HTTPHandler):
    def __init__(self, cut: Cut) -> None:
        super().__init__()
        self._cut = cut

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_maker(_Connection, self._cut), req)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, cut: Cut) -> None:
        super().__init__()
        self._cut = cut

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_maker(_TlsConnection, self._cut), req)


class _Connection(http.client.HTTPConnection):
    cut: Cut

    def connect(self) -> None:
        super().connect()
        self.cut.add(self.sock)


class _TlsConnection(http.client.HTTPSConnection):
    cut: Cut

    def connect(self) -> None:
        super().connect()
        self.cut.add(self.sock)


def _maker(kind: type[_Connection] | type[_TlsConnection], cut: Cut) -> Any:
    def make(host: str, **options: Any) -> http.client.HTTPConnection:
        connection = kind(host, **options)
        connection.cut = cut
        return connection

    return make
