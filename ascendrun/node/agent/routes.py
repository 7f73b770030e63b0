"""Interface and own address towards each peer: read from the kernel, nothing is sent to the peers."""

from __future__ import annotations

import socket
import struct
import threading
import time

from ascendrun.node.files import free_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Sequence

RESOLVE_S = 8.0
"""Seconds. All peers are resolved in parallel; a peer without a result by then is unknown."""
PARALLEL = 32
_RTM_GETROUTE, _NLM_F_REQUEST, _NLMSG_ERROR = 26, 1, 2
_RTA_DST, _RTA_OIF, _RTA_PREFSRC = 1, 4, 7
_HEADER = struct.Struct("=IHHII")
_ROUTE = struct.Struct("=BBBBBBBBI")
_ATTRIBUTE = struct.Struct("=HH")


def pack_question(family: int, address: bytes) -> bytes:
    """Return the netlink request for the route to one address."""
    attribute = _ATTRIBUTE.pack(4 + len(address), _RTA_DST) + address
    body = _ROUTE.pack(family, len(address) * 8, 0, 0, 0, 0, 0, 0, 0) + attribute
    return _HEADER.pack(_HEADER.size + len(body), _RTM_GETROUTE, _NLM_F_REQUEST, 1, 0) + body


def parse_answer(data: bytes) -> tuple[int | None, bytes | None]:
    """Return (interface index, own address) from the kernel's reply; None where missing (no route)."""
    length, kind = _HEADER.unpack_from(data)[:2]
    if kind == _NLMSG_ERROR:
        return None, None
    index, source = None, None
    at = _HEADER.size + _ROUTE.size
    while at + 4 <= min(length, len(data)):
        size, name = _ATTRIBUTE.unpack_from(data, at)
        value = data[at + 4 : at + size]
        if name == _RTA_OIF:
            index = struct.unpack("=I", value)[0]
        elif name == _RTA_PREFSRC:
            source = value
        at += max(4, (size + 3) & ~3)
    return index, source


def route_to(address: str) -> tuple[str | None, str | None]:
    """Return (interface, own address) for a numeric address; (None, None): no route. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    packed = socket.inet_pton(family, address.split("%")[0])
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0) as kernel:
        kernel.settimeout(2.0)
        kernel.sendto(pack_question(family, packed), (0, 0))
        index, source = parse_answer(kernel.recv(65536))
    interface = socket.if_indextoname(index) if index else None
    return interface, socket.inet_ntop(family, source) if source else None


def resolve(name: str) -> list[str]:
    """Return numeric addresses of a name, IPv4 first, each once. Raises OSError; waits long if DNS does not reply."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    found.sort(key=lambda answer: answer[0] != socket.AF_INET)
    return list(dict.fromkeys(str(answer[4][0]) for answer in found))


def find_route(names: Sequence[str]) -> dict[str, str | None]:
    """Return {interface, source} by the first of `names` that resolves and has a route; None: none has."""
    for name in names:
        try:
            addresses = resolve(name)
        except (OSError, UnicodeError):
            continue
        for address in addresses:
            try:
                interface, source = route_to(address)
            except OSError:
                continue
            if interface is not None:
                return {"interface": interface, "source": source}
    return {"interface": None, "source": None}


def probe(root: str, peers: dict[str, list[str]]) -> dict[str, Any]:
    """Return {at_ns, free_bytes, routes}: each peer's route is {interface, source}, None: unknown."""
    late = {"interface": None, "source": None}
    found: dict[str, Any] = {}
    names = list(peers)
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if not names:
                    return
                name = names.pop()
            route = find_route(peers[name])
            with lock:
                found[name] = route

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(PARALLEL, len(peers)))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + RESOLVE_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    with lock:
        answers = {name: found.get(name, late) for name in peers}
    return {"at_ns": time.time_ns(), "free_bytes": free_bytes(root), "routes": answers}
