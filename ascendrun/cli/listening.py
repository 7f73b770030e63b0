"""Addresses of this machine that commands serve on."""

from __future__ import annotations

import ipaddress
import socket

from ascendrun.core.errors import ConflictError

LOOPBACK = "127.0.0.1"


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def listen(address: str, port: int, *, instead: str) -> socket.socket:
    """Return a listening socket. `instead`: what to write for a free port. Raises ConflictError when the address is in
    use, or not of this machine."""
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=128)
    except OSError as error:
        raise cannot_listen(address, port, error, instead=instead) from error


def cannot_listen(address: str, port: int, error: OSError, *, instead: str) -> ConflictError:
    return ConflictError.of(
        "cli.cannot-listen",
        "cannot listen on {address}:{port}: {error}",
        "choose another port: {instead}",
        address=address,
        port=port,
        error=error.strerror or str(error),
        instead=instead,
    )
