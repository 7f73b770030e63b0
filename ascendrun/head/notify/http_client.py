"""One HTTP request: one deadline, the proxies of the environment, verified TLS, no redirects."""

from __future__ import annotations

import http.client
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from ascendrun.core.dataclass import dataclass
from ascendrun.text import Text

REPLY_BYTES = 64 * 1024


@dataclass(frozen=True)
class HttpResponse:
    """Response of a service. `body`: at most REPLY_BYTES of it."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class RequestFailedError(Exception):
    """The request failed or timed out. The message never contains the URL."""

    def __init__(self, message: Text | str) -> None:
        super().__init__(message)
        self.message = message


class Cancellation:
    """Cancellation of a request from another thread: shuts its connection down, whatever it waits for."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self.is_cancelled = False

    def add(self, connected: socket.socket) -> None:
        with self._lock:
            self._sockets.append(connected)
            is_cancelled = self.is_cancelled
        if is_cancelled:
            self.cancel()

    def cancel(self) -> None:
        with self._lock:
            self.is_cancelled = True
            sockets = tuple(self._sockets)
        for connected in sockets:
            with suppress(OSError):  # closed already; below TLS, which would wait for its own close
                socket.socket.shutdown(connected, socket.SHUT_RDWR)


def http_request(
    url: str, *, headers: Mapping[str, str], body: bytes | None, deadline_s: float, cancellation: Cancellation | None
) -> HttpResponse:
    """Send a POST with a body, else a GET; return a response of any status. Raises RequestFailedError."""
    cancellation = cancellation or Cancellation()
    request = urllib.request.Request(url, data=body, headers={"User-Agent": "ascendrun", **headers})
    opener = urllib.request.build_opener(_Opener(cancellation), _NoRedirect())
    timer = threading.Timer(deadline_s, cancellation.cancel)
    timer.daemon = True
    timer.start()
    try:
        try:
            response = opener.open(request, timeout=deadline_s)
        except urllib.error.HTTPError as error:
            response = error
        with response:
            data = response.read(REPLY_BYTES)
        if cancellation.is_cancelled:
            raise RequestFailedError(_timed_out(deadline_s))
        return HttpResponse(int(response.status or 0), dict(response.headers.items()), data)
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None)
        inner = reason if isinstance(reason, Exception) else error
        if cancellation.is_cancelled or isinstance(inner, (TimeoutError, socket.timeout)):
            raise RequestFailedError(_timed_out(deadline_s)) from None
        raise RequestFailedError(_describe(inner)) from None  # the cause may contain the URL
    finally:
        timer.cancel()


def _timed_out(limit_s: float) -> Text:
    return Text("http.timed-out", "no complete response within {limit_s:g} s", limit_s=limit_s)


def _describe(error: Exception) -> str:
    if isinstance(error, OSError):
        return str(error.strerror or error)[:200]
    return type(error).__name__ if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"[:200]


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A notification, with its credential, is sent to the URL of the settings only."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class _Connection(http.client.HTTPConnection):
    def __init__(self, *arguments: Any, cancellation: Cancellation, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._cancellation = cancellation

    def connect(self) -> None:
        super().connect()
        self._cancellation.add(self.sock)


class _TlsConnection(_Connection, http.client.HTTPSConnection):
    pass


class _Opener(urllib.request.HTTPSHandler, urllib.request.HTTPHandler):
    def __init__(self, cancellation: Cancellation) -> None:
        super().__init__()
        self._plain: Any = partial(_Connection, cancellation=cancellation)
        self._tls: Any = partial(_TlsConnection, cancellation=cancellation)

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._plain, req)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._tls, req)
