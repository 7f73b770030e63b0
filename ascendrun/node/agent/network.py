"""Network between nodes: the route to each peer as the kernel has it, and a test of connections on a port.

Of a test, one side listens and sends its name, the others connect and read it:

    listen  {ports, as, nonce, expect: [names], block, tag} -> {ports: {port: {heard: [names]} | {error}}, leased}
    tcp     {targets: [{peer, address, port}], as, nonce}   -> {tests: [{peer, address, port, wall_s} | {..., error}]}

`block`, `tag`: base of the HCCL ports to lease meanwhile for this run, None: none. A port or block that another test
uses is waited for. `leased`: {port, uid, tag}, another run had the block until the deadline. Both ends of a round share
the nonce, so that another program on the port is not taken for the peer. The listener ends when all expected peers have
connected, or at its deadline. A peer that is too early is rejected and retries.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import select
import socket
import struct
import time

from ascendrun.node.agent import leases
from ascendrun.node.agent.execute import work_off
from ascendrun.node.files import free_bytes
from ascendrun.node.op_errors import message

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Iterator, Sequence

    Item = Dict[str, Any]
    Raw = Dict[str, Any]

RETRY_S = 0.05
GREETING = "ascendrun-connection-test %s %s\n"
LINE_BYTES = 512
AT_ONCE = 32


def listen(item: Item, deadline: float) -> Raw:
    """Accept on every port of the item until each received all expected names, or the deadline."""
    answers: dict[str, Raw] = {}
    open_ports: dict[Any, Raw] = {}
    expected = set(item["expect"])
    names = [] if item.get("block") is None else leases.block_names(item["block"])
    held = [_until(lambda: leases.take(name, item["tag"], item["as"]), deadline) for name in names]  # noqa: B023
    try:
        for name in [name for name, lease in zip(names, held) if lease is None]:
            owner = leases.read_leases().get(name, {})
            return {"ports": {}, "leased": {"port": item["block"], "uid": owner.get("uid"), "tag": owner.get("tag")}}
        for number in item["ports"]:
            try:
                open_ports[_listener(int(number), deadline)] = answers.setdefault(str(number), {"heard": []})
            except OSError as error:
                answers[str(number)] = {"error": error.strerror or str(error)}
        while open_ports and time.monotonic() < deadline:
            if all(expected <= set(answer["heard"]) for answer in open_ports.values()):
                break
            ready, _, _ = select.select(list(open_ports), [], [], min(0.2, max(0.0, deadline - time.monotonic())))
            for one in ready:
                _send_greeting(one, item, open_ports[one], deadline)
    finally:
        for one in open_ports:
            one.close()
        for lease in held:
            if lease is not None:
                lease.release()
    return {"ports": answers}


def _until(call: Callable[[], Any], deadline: float) -> Any:
    """Return the first result that is not None; None: there is none before the deadline."""
    while True:
        result = call()
        if result is not None or time.monotonic() + RETRY_S > deadline:
            return result
        time.sleep(RETRY_S)


def _listener(number: int, deadline: float) -> socket.socket:
    """Listen on every address; raises OSError. A port that is in use is tried again until the deadline."""
    while True:
        try:
            return listen_on(number)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() + RETRY_S > deadline:
                raise
        time.sleep(RETRY_S)


def listen_on(number: int) -> socket.socket:
    """Listen on every address, IPv6 and IPv4 where the kernel has both. 0: on a free port. Raises OSError."""
    try:
        made = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        address = ("::", number)
    except OSError:
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        address = ("0.0.0.0", number)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(128)
    except OSError:
        made.close()
        raise
    return made


def _send_greeting(listener: socket.socket, item: Item, answer: Raw, deadline: float) -> None:
    peer, _ = listener.accept()
    with peer:
        # No TIME-WAIT may stay on this side: the job uses the port a moment later.
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.settimeout(max(0.01, min(1.0, deadline - time.monotonic())))
        try:
            peer.sendall((GREETING % (item["nonce"], item["as"])).encode("utf-8"))
            words = _line(peer).split()
            peer.recv(1)
        except OSError:
            return
        if len(words) == 3 and words[1] == item["nonce"] and words[2] not in answer["heard"]:
            answer["heard"].append(words[2])


def connect_all(item: Item, deadline: float) -> Raw:
    """Connect to all targets in parallel. Every target has a result, at the deadline that of its last try."""
    tests: list[Raw] = [dict(target, error=message("no-time-for-test"), code="failed") for target in item["targets"]]

    def test(number: int) -> bool:
        for result in _connect(item["targets"][number], item, deadline):
            tests[number] = dict(item["targets"][number], **result)
        return True

    work_off([functools.partial(test, number) for number in range(len(tests))], at_once=AT_ONCE, end=deadline + 0.2)
    return {"tests": list(tests)}


def _connect(target: Item, item: Item, deadline: float) -> Iterator[Raw]:
    """Yield the result of each try: {wall_s} of the connection that worked, which is the last, or {error, code}."""
    while time.monotonic() < deadline:
        started = time.monotonic()
        try:
            with socket.create_connection(
                (target["address"], int(target["port"])), timeout=max(0.01, deadline - started)
            ) as peer:
                wall_s = time.monotonic() - started
                peer.settimeout(max(0.01, deadline - time.monotonic()))
                peer.sendall((GREETING % (item["nonce"], item["as"])).encode("utf-8"))
                words = _line(peer).split()
            if len(words) == 3 and words[1] == item["nonce"]:
                if words[2] == target["peer"]:
                    yield {"wall_s": round(wall_s, 6)}
                else:
                    yield {"error": message("other-host-answered", peer=words[2]), "code": "wrong-host"}
                return
            yield {"error": message("other-program-answered"), "code": "failed"}
        except socket.timeout:
            yield {"error": message("no-reply"), "code": "silent"}
            return
        except ConnectionRefusedError:
            yield {"error": message("connection-refused"), "code": "refused"}
        except OSError as reason:
            yield {"error": message("error", error=reason.strerror or str(reason)), "code": "failed"}
        time.sleep(RETRY_S)


def _line(peer: socket.socket) -> str:
    data = b""
    while b"\n" not in data and len(data) < LINE_BYTES:
        more = peer.recv(LINE_BYTES)
        if not more:
            break
        data += more
    return data.partition(b"\n")[0].decode("utf-8", "replace")


RESOLVE_S = 8.0
"""Seconds. All peers are resolved in parallel; a peer without a result by then is unknown."""
NO_ROUTE: dict[str, str | None] = {"interface": None, "source": None}
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


def netlink() -> socket.socket:
    """Return a socket for `route_to`, to use in one thread. Raises OSError."""
    kernel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)
    kernel.settimeout(2.0)
    return kernel


def route_to(address: str, kernel: socket.socket) -> tuple[str | None, str | None]:
    """Return (interface, own address) for a numeric address; (None, None): no route. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    packed = socket.inet_pton(family, address.split("%")[0])
    kernel.sendto(pack_question(family, packed), (0, 0))
    index, source = parse_answer(kernel.recv(65536))
    interface = socket.if_indextoname(index) if index else None
    return interface, socket.inet_ntop(family, source) if source else None


def resolve(name: str) -> list[str]:
    """Return numeric addresses of a name, IPv4 first, each once. Raises OSError; waits long if DNS does not reply."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    found.sort(key=lambda answer: answer[0] != socket.AF_INET)
    return list(dict.fromkeys(str(answer[4][0]) for answer in found))


def find_routes(addresses: dict[str, Sequence[str]]) -> dict[str, dict[str, str | None]]:
    """Return {interface, source} of the peers with a route, by the first of their numeric addresses that has one."""
    found: dict[str, dict[str, str | None]] = {}
    with contextlib.suppress(OSError), netlink() as kernel:
        for peer, choices in addresses.items():
            for address in choices:
                try:
                    interface, source = route_to(address, kernel)
                except socket.timeout:
                    return found  # a late reply would be taken for the next address's
                except (OSError, UnicodeError):
                    continue
                if interface is not None:
                    found[peer] = {"interface": interface, "source": source}
                    break
    return found


def find_route(names: Sequence[str]) -> dict[str, str | None]:
    """Return {interface, source} by the first of `names` that resolves and has a route; None: none has."""
    for name in names:
        with contextlib.suppress(OSError, UnicodeError):
            found = find_routes({name: resolve(name)})
            if found:
                return found[name]
    return NO_ROUTE


def probe(root: str, peers: dict[str, list[str]]) -> dict[str, Any]:
    """Return {at_ns, free_bytes, routes}: each peer's route is {interface, source}, None: unknown.

    A thousand peers whose first name is an address take no threads.
    """
    end = time.monotonic() + RESOLVE_S
    routes = find_routes({peer: names[:1] for peer, names in peers.items()})
    others = [peer for peer in peers if peer not in routes]
    found = work_off([functools.partial(find_route, peers[peer]) for peer in others], at_once=AT_ONCE, end=end)
    routes.update((peer, route or NO_ROUTE) for peer, route in zip(others, found))
    return {"at_ns": time.time_ns(), "free_bytes": free_bytes(root), "routes": routes}
