"""Addresses of this machine that commands serve on."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from typing import Any

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


def is_of_this_user(accepted: socket.socket) -> bool:
    """Return whether a process of this user, or of root, has the other end of a connection on this machine, as the
    kernel lists it. False also for an end that is closed: its owner is not known any more."""
    ends = f"{_listed(accepted.getpeername())} {_listed(accepted.getsockname())} 01"
    with open("/proc/net/tcp6" if accepted.family is socket.AF_INET6 else "/proc/net/tcp", encoding="ascii") as file:
        rows = [line.split() for line in file if ends in line]
    return any(inode != "0" and int(uid) in (0, os.geteuid()) for uid, inode in ((row[7], row[9]) for row in rows))


def _listed(address: tuple[Any, ...]) -> str:
    """Return an address as /proc/net/tcp has it: each 32 bits in the order of this machine, then the port."""
    packed = ipaddress.ip_address(address[0]).packed
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{address[1]:04X}"


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
