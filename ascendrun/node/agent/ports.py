"""Test whether a port is free, and its reservation."""

from __future__ import annotations

import socket


class ReservedPort:
    """A port bound on every address and not listened on: no other process can bind it until `release`."""

    def __init__(self, number: int, sockets: list[socket.socket]) -> None:
        self.number = number
        self._sockets = sockets

    def share(self) -> list[socket.socket]:
        """Return the sockets; a server that sets SO_REUSEADDR can bind the port too from now on."""
        for bound in self._sockets:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return self._sockets

    def release(self) -> None:
        for bound in self._sockets:
            bound.close()
        self._sockets = []


def hold_port(number: int, *, after_others: bool = False) -> ReservedPort | None:
    """Reserve the port. None: in use, on any address of IPv4 or IPv6, or not permitted for this user.

    `after_others`: ignore ended connections that the kernel remembers for a minute, as a server that sets SO_REUSEADDR
    does.
    """
    sockets: list[socket.socket] = []
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            bound = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue
        sockets.append(bound)
        try:
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(after_others))
            bound.bind((address, number))
        except (OSError, OverflowError) as error:
            if family == socket.AF_INET6 and getattr(error, "errno", 0) in (97, 99):
                continue
            for other in sockets:
                other.close()
            return None
    return ReservedPort(number, sockets)
