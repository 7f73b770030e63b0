"""Test of connections between nodes on a port: one side listens and sends its name, the others connect and read it.

    listen  {ports, as, nonce, expect: [names]}            -> {ports: {port: {heard: [names]} | {error}}}
    tcp     {targets: [{peer, address, port}], as, nonce}   -> {tests: [{peer, address, port, wall_s} | {..., error}]}

Both ends of a round share the nonce, so that another program on the port is not taken for the peer. The listener
ends when all expected peers have connected, or at its deadline. A peer that is too early is rejected and retries.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time

from ascendrun.node.op_errors import message

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict

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
    try:
        for number in item["ports"]:
            try:
                open_ports[_listener(int(number))] = answers.setdefault(str(number), {"heard": []})
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
    return {"ports": answers}


def _listener(number: int) -> socket.socket:
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
    """Connect to all targets in parallel."""
    todo = list(item["targets"])
    tested: list[Raw] = []
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if not todo:
                    return
                target = todo.pop()
            raw = dict(target, **_connect(target, item, deadline))
            with lock:
                tested.append(raw)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(AT_ONCE, len(todo)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline + 0.2 - time.monotonic()))
    with lock:
        return {"tests": list(tested)}


def _connect(target: Item, item: Item, deadline: float) -> Raw:
    """Return {wall_s} of the connection that worked, or {error} with the last reason of failure."""
    code, error = "failed", message("no-time-for-test")
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
                    return {"wall_s": round(wall_s, 6)}
                return {"error": message("other-host-answered", peer=words[2]), "code": "wrong-host"}
            code, error = "failed", message("other-program-answered")
        except socket.timeout:
            return {"error": message("no-reply"), "code": "silent"}
        except ConnectionRefusedError:
            code, error = "refused", message("connection-refused")
        except OSError as reason:
            code, error = "failed", message("error", error=reason.strerror or str(reason))
        time.sleep(RETRY_S)
    return {"error": error, "code": code}


def _line(peer: socket.socket) -> str:
    data = b""
    while b"\n" not in data and len(data) < LINE_BYTES:
        more = peer.recv(LINE_BYTES)
        if not more:
            break
        data += more
    return data.partition(b"\n")[0].decode("utf-8", "replace")
