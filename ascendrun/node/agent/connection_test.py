"""Test of connections between nodes on a port: one side listens and sends its name, the others connect and read it.

    listen  {ports, as, nonce, expect: [names], block, tag} -> {ports: {port: {heard: [names]} | {error}}}
    tcp     {targets: [{peer, address, port}], as, nonce}   -> {tests: [{peer, address, port, wall_s} | {..., error}]}

`block`, `tag`: base of the HCCL ports to lease meanwhile for this run, None: none. A port or block that another test
uses is waited for. Both ends of a round share the nonce, so that another program on the port is not taken for the peer.
The listener ends when all expected peers have connected, or at its deadline. A peer that is too early is rejected and
retries.
"""

from __future__ import annotations

import errno
import select
import socket
import struct
import threading
import time

from ascendrun.node.agent import leases
from ascendrun.node.op_errors import message

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Iterator

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
            return _listen(number)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() + RETRY_S > deadline:
                raise
        time.sleep(RETRY_S)


def _listen(number: int) -> socket.socket:
    """Listen on every address, IPv6 and IPv4 where the kernel has both."""
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
    todo = list(range(len(tests)))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if not todo:
                    return
                number = todo.pop()
            target = item["targets"][number]
            for result in _connect(target, item, deadline):
                tests[number] = dict(target, **result)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(AT_ONCE, len(todo)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline + 0.2 - time.monotonic()))
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
