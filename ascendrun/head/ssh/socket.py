"""TCP to a host for SSH: every address is tried, every wait is limited, dead peers are detected."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any, Callable, Optional

from ascendrun.core.errors import UnreachableError
from ascendrun.text import Text

RESOLVE_S = 5.0
"""Seconds that the name service may take."""

USER_TIMEOUT_MS = 8_000
"""Milliseconds unacknowledged after which the kernel ends the connection; paramiko never notices a dead peer."""

KEEPALIVE_S = 3
"""The kernel probes an idle peer at this interval; no user time on either side, unlike SSH's own keepalive."""

QUICK_READS = 40
"""A handshake has fewer reads; immediate acknowledgements save 40 ms each time the peer's Nagle algorithm waits."""

Address = tuple[socket.AddressFamily, tuple[Any, ...]]


class QuickAckSocket:
    """Socket that acknowledges its first reads immediately: the kernel resets TCP_QUICKACK, so each read sets it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._quick_reads = QUICK_READS if hasattr(socket, "TCP_QUICKACK") else 0
        self.send = sock.send
        self.settimeout = sock.settimeout

    def recv(self, size: int) -> bytes:
        if self._quick_reads:
            self._quick_reads -= 1
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        return self._sock.recv(size)

    def wake(self) -> None:
        """End the connection both ways, so that a thread waiting in `recv` returns immediately (unlike `close`)."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # not connected any more: no thread waits

    def close(self) -> None:
        self._sock.close()

    @property
    def _closed(self) -> bool:
        """Return whether it is closed; read by paramiko's Transport when it stops."""
        return self._sock.fileno() < 0

    def getpeername(self) -> Any:
        return self._sock.getpeername()


def dial(host: str, port: int, *, label: str, family: int, tcp_s: float) -> tuple[QuickAckSocket, str]:
    """Return a connected socket and the numeric address it reached, after trying every address within `tcp_s` in total.

    Raises UnreachableError: no such name, or the error of each address.
    """
    addresses = resolve(host, port, label=label, family=family)
    until = time.monotonic() + tcp_s
    failures: list[Text] = []
    for position, address in enumerate(addresses):
        left_s = until - time.monotonic()
        share_s = left_s / (len(addresses) - position)
        if share_s <= 0:
            break
        try:
            return QuickAckSocket(_connect(address, share_s)), str(address[1][0])
        except OSError as error:
            failures.append(_failure(str(address[1][0]), error, share_s))
    raise UnreachableError.of(
        "ssh.no-connection",
        "{host}: no TCP connection to port {port} ({errors})",
        "check the host, sshd and firewalls: ssh -p {port} {name}",
        host=label,
        name=host,
        port=port,
        errors=failures,
    )


def resolve(host: str, port: int, *, label: str, family: int) -> list[Address]:
    """Return every TCP address of `host`, in the resolver's order. Raises UnreachableError after at most RESOLVE_S."""
    try:
        return _lookup(host, port, family, socket.AI_NUMERICHOST)
    except socket.gaierror:
        pass  # a name, not a number: it may take long, so a helper thread resolves it
    result: list[Any] = []

    def look_up() -> None:
        try:
            result.append(_lookup(host, port, family, 0))
        except (OSError, UnicodeError) as error:
            result.append(error)

    helper = threading.Thread(target=look_up, daemon=True)
    helper.start()
    helper.join(RESOLVE_S)
    found = result[0] if result else None
    if isinstance(found, list):
        return found
    if found is None:
        what = Text(
            "ssh.resolve-timeout",
            "{host}: name {name} was not resolved within {limit_s:.0f} s",
            host=label,
            name=host,
            limit_s=RESOLVE_S,
        )
    elif isinstance(found, OSError):
        error = found.strerror
        what = Text(
            "ssh.no-address", "{host}: name {name} has no address ({error})", host=label, name=host, error=error
        )
    else:
        what = Text("ssh.invalid-name", "{host}: invalid host name {name:quote}", host=label, name=host)
    raise UnreachableError(
        what,
        hint=Text(
            "ssh.no-address.hint",
            "check /etc/hosts and DNS: getent hosts {name}; or set addr= in the hostfile",
            name=host,
        ),
    ) from found


def _lookup(host: str, port: int, family: int, flags: int) -> list[Address]:
    found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, 0, flags)
    return [(entry[0], entry[4]) for entry in found]


def _connect(address: Address, timeout_s: float) -> socket.socket:
    sock = socket.socket(address[0], socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        _tune(sock)
        sock.connect(address[1])
    except BaseException:
        sock.close()
        raise
    return sock


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_S),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", USER_TIMEOUT_MS),
    ):
        option: int | None = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _failure(address: str, error: OSError, waited_s: float) -> Text:
    if isinstance(error, socket.timeout):
        return Text("ssh.no-reply", "{address}: no reply within {limit_s:.1f} s", address=address, limit_s=waited_s)
    why = (error.strerror or str(error)).lower()
    return Text("ssh.connect-failed", "{address}: {error}", address=address, error=why)


Dial = Callable[[], tuple[Any, Optional[str]]]
"""Makes the byte stream that SSH runs on: a socket, or a channel through a jump host; with the address, if known."""
