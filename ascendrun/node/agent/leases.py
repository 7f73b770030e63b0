"""Leases of this machine's devices and ports: names in the abstract socket space, for all users and head nodes.

A name is bound by one socket at a time within a network namespace, and free when the last descriptor of that socket is
closed. Next to it, a second name states the owner; everybody reads it in /proc/net/unix:

    @ascendrun/1/npu/3              the NPU with the minor number 3; without /dev/davinci*, the NPU 3;
                                    of a simulated node that is a directory: its hash, ".3"
    @ascendrun/1/cuda/0000:3b:00.0  the GPU with this bus id; without the NVIDIA driver's files, its number
    @ascendrun/1/hccl/61024         32 host ports of HCCL from 61024 on
    @ascendrun/1/port/20001         MASTER_PORT
    @ascendrun/1/of/npu/3/1000/1700000000/3f786850/f00-j-0001.1
                                    owner of npu/3: uid, since (UTC seconds), node (hash of its root), run id
"""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import stat
import threading
import time

from ascendrun.node import layout, procs
from ascendrun.node.failpoint import failpoint
from ascendrun.node.op_errors import OperationError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterable

PREFIX = "ascendrun/1/"
NAME_BYTES = 107
BLOCK = 32
"""Host ports of HCCL: those of a base, and of one name. A base that is not a multiple of it needs two names."""
SIM_VARIABLE = "ASCENDRUN_SIM_ROOT"
AGAIN_S = 3.0
"""Seconds that a name may take to become free after the older agent that holds it was ended."""

_NUMBER = re.compile(r"(\d+)$")


class Lease:
    """One name, held until every process that has its descriptors is gone or has closed them."""

    def __init__(self, name: str, sockets: list[socket.socket]) -> None:
        self.name = name
        self.sockets = sockets

    def release(self) -> None:
        for bound in self.sockets:
            bound.close()
        self.sockets = []


def take(name: str, tag: str, node: str) -> Lease | None:
    """Lease a name for an attempt. None: it is leased. `node`: see node_hash. Raises OSError."""
    bound = _bind(PREFIX + name)
    if bound is None:
        return None
    owner = "%sof/%s/%d/%d/%s/%s" % (PREFIX, name, os.geteuid(), time.time(), node, tag)
    stated = _bind(owner[:NAME_BYTES])
    return Lease(name, [bound] if stated is None else [bound, stated])


def _bind(name: str) -> socket.socket | None:
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(b"\0" + name.encode("utf-8"))
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    return bound


class Leases:
    """What the attempts of this agent hold between prepare and GO. Safe to use from several threads."""

    def __init__(self, root: str) -> None:
        self._node = node_hash(root)
        self._lock = threading.Lock()
        self._held: dict[str, dict[str, Lease]] = {}

    def prepare(self, tag: str, request: dict[str, Any]) -> tuple[int | None, list[int]]:
        """Lease all `devices`, the first free of `ports` and every free block of `hccl`; return (port, bases).

        Raises OperationError "held" or "port-taken"; then nothing is held. Repeatable.
        """
        run = layout.split_tag(tag)[0]
        with self._lock:
            others = [other for other in self._held if other != tag and layout.split_tag(other)[0] == run]
        for other in others:
            self.release(other)
        try:
            self._take_devices(tag, request.get("devices"))
            failpoint("lease.after_devices")
            bases = [base for base in request.get("hccl") or [] if self._take_block(tag, base, request["hccl"])]
            if request.get("hccl") and not bases:
                raise _held(request["hccl"])
            return self._take_port(tag, request.get("ports") or []), bases
        except (OSError, OperationError):
            self.release(tag)
            raise

    def keep(self, tag: str, prepared: dict[str, Any], *, port: int | None, base: int | None) -> None:
        """Hold exactly what GO needs: take it again if another agent prepared the attempt. Raises OperationError."""
        self._take_devices(tag, prepared.get("devices"))
        if base is not None and not self._take_block(tag, base, [base]):
            raise _held([base])
        if port is not None and not self._take_port(tag, [port]):
            raise OperationError("port-taken", "ports-in-use", ports=[port])
        needed = {name for one in (base,) if one is not None for name in block_names(one)} | {"port/%s" % port}
        for name in [name for name in self._of(tag) if name.split("/")[0] in ("hccl", "port") and name not in needed]:
            self._of(tag).pop(name).release()

    def descriptors(self, tag: str) -> dict[str, list[int]]:
        """Return the descriptors for the supervisor: `devices`, which the ranks get too, and `ports`."""
        found: dict[str, list[int]] = {"devices": [], "ports": []}
        for name, lease in self._of(tag).items():
            kind = "ports" if name.split("/")[0] in ("hccl", "port") else "devices"
            found[kind] += [bound.fileno() for bound in lease.sockets]
        return found

    def release(self, tag: str) -> None:
        with self._lock:
            held = self._held.pop(tag, {})
        for lease in held.values():
            lease.release()

    def are_elsewhere(self, tag: str) -> bool:
        """Return whether another process of this node holds a lease of the attempt."""
        ours = self._of(tag)
        owner = (tag, self._node)
        return any(
            (row.get("tag"), row.get("node")) == owner and name not in ours for name, row in read_leases().items()
        )

    def _of(self, tag: str) -> dict[str, Lease]:
        with self._lock:
            return self._held.setdefault(tag, {})

    def _take(self, name: str, tag: str) -> Lease | None:
        """Return the lease, taken now or before; from an older agent of the same run it is taken over."""
        held = self._of(tag)
        if name not in held:
            lease = take(name, tag, self._node)
            if lease is None and end_older_agent(name, tag, self._node):
                deadline = time.monotonic() + AGAIN_S
                while lease is None and time.monotonic() < deadline:
                    time.sleep(0.01)
                    lease = take(name, tag, self._node)
            if lease is None:
                return None
            held[name] = lease
        return held[name]

    def _take_devices(self, tag: str, devices: dict[str, Any] | None) -> None:
        if not devices:
            return
        names = device_names(devices["type"], devices["ids"])
        for number, name in zip(devices["ids"], names):
            if self._take(name, tag) is None:
                raise _held_device(devices["type"], number, name)

    def _take_block(self, tag: str, base: int, candidates: list[int]) -> bool:
        """Lease the ports of a base if they are free. A single candidate may have ended connections.

        Several nodes of the attempt on this machine share them: for HCCL they are one server.
        """
        names = block_names(base)
        held = self._of(tag)
        if all(name in held for name in names):
            return True
        numbers = range(base, base + BLOCK)
        if all(self._take(name, tag) for name in names) and are_free(numbers, after_others=len(candidates) == 1):
            return True
        for name in names:
            if name in held:
                held.pop(name).release()
        owners = read_leases()
        return all(owners.get(name, {}).get("tag") == tag for name in names)

    def _take_port(self, tag: str, numbers: list[int]) -> int | None:
        """Lease the first free port. It stays bound: a server with SO_REUSEADDR, such as torch's store, can bind it
        too; other programs and the kernel's own choice of ports cannot."""
        for number in numbers:
            if "port/%d" % number in self._of(tag):
                return number
        for number in numbers:
            lease = self._take("port/%d" % number, tag)
            if lease is None:
                continue
            reserved = hold_port(number, after_others=len(numbers) == 1)
            if reserved is not None:
                for bound in reserved.sockets:
                    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                lease.sockets += reserved.sockets
                return number
            self._of(tag).pop(lease.name).release()
        if numbers:
            raise OperationError("port-taken", "ports-in-use", ports=numbers)
        return None


def block_names(base: int) -> list[str]:
    """Return the names of a base's ports."""
    first = base - base % BLOCK
    return ["hccl/%d" % start for start in (first, first + BLOCK) if start < base + BLOCK]


def are_free(numbers: Iterable[int], *, after_others: bool = False) -> bool:
    """Return whether all ports can be bound now."""
    for number in numbers:
        reserved = hold_port(number, after_others=after_others)
        if reserved is None:
            return False
        reserved.release()
    return True


def device_names(
    kind: str, ids: Iterable[int], *, dev: str = "/dev", proc: str = "/proc/driver/nvidia/gpus"
) -> list[str]:
    """Return the name of each device: containers number them differently, and agree on the minor number or bus id."""
    known: list[Any] = []
    simulated = os.environ.get(SIM_VARIABLE)
    if simulated:
        return ["%s/%s.%d" % (kind, node_hash(simulated), number) for number in ids]
    try:
        if kind == "npu":
            files = [name for name in os.listdir(dev) if re.match(r"davinci\d+$", name)]
            for name in sorted(files, key=lambda name: int(name[len("davinci") :])):  # those of this node or container
                found = os.stat(os.path.join(dev, name))
                known.append(os.minor(found.st_rdev) if stat.S_ISCHR(found.st_mode) else None)
        elif kind == "cuda":
            known = sorted(os.listdir(proc))
    except OSError:
        pass
    keys = {number: key for number, key in enumerate(known) if key is not None}
    return ["%s/%s" % (kind, keys.get(number, number)) for number in ids]


def _held_device(kind: str, number: int, name: str) -> OperationError:
    owner = read_leases().get(name, {})
    if "tag" not in owner:
        return OperationError("held", "device-in-use", type=kind, device=number)
    fields = {key: owner[key] for key in ("user", "tag", "since_s")}
    return OperationError("held", "device-leased", type=kind, device=number, **fields)


def _held(bases: list[int]) -> OperationError:
    return OperationError("held", "hccl-ports-in-use", ports=list(bases))


# --- what is leased ---


def read_leases() -> dict[str, dict[str, Any]]:
    """Return all leased names of this network namespace: {inode}, and {uid, user, since_s, node, tag} if the owner is
    stated."""
    found: dict[str, dict[str, Any]] = {}
    owners: dict[str, dict[str, Any]] = {}
    with open("/proc/net/unix", "rb") as file:
        for line in file:
            fields = line.decode("utf-8", "replace").split(None, 7)
            if len(fields) < 8 or fields[4] != "0001" or not fields[7].startswith("@" + PREFIX):
                continue
            name = fields[7].strip()[len(PREFIX) + 1 :]
            if not name.startswith("of/"):
                found[name] = {"inode": int(fields[6])}
                continue
            parts = name.split("/", 6)
            if len(parts) == 7 and parts[3].isdigit() and parts[4].isdigit():
                uid = int(parts[3])
                owner = {
                    "uid": uid,
                    "user": procs.user_name(uid),
                    "since_s": int(parts[4]),
                    "node": parts[5],
                    "tag": parts[6],
                }
                owners["/".join(parts[1:3])] = owner
    for name, owner in owners.items():
        if name in found:
            found[name].update(owner)
    return found


def listing() -> list[dict[str, Any]]:
    """Return all leases as {type, key, device, uid, user, since_s, tag}. `device`: this node's number, None: no device,
    or it has another number here."""
    numbers = {
        name: number
        for kind in ("npu", "cuda")
        for number, name in reversed(list(enumerate(device_names(kind, range(64)))))
    }

    def order(item: tuple[str, Any]) -> tuple[str, int, str]:
        kind, _, key = item[0].partition("/")
        number = _NUMBER.search(key)
        return kind, int(number.group(1)) if number and kind != "cuda" else 0, key

    rows = []
    for name, row in sorted(read_leases().items(), key=order):
        kind, _, key = name.partition("/")
        fields = {field: row.get(field) for field in ("uid", "user", "since_s", "tag")}
        rows.append(dict(fields, type=kind, key=key, device=numbers.get(name)))
    return rows


def end_older_agent(name: str, tag: str, node: str) -> bool:
    """Kill the serving agent of this node that holds a name for the same run: its connection is gone, and it has not
    noticed. Return whether the name may become free: it was killed, or is free already."""
    row = read_leases().get(name)
    if row is None:
        return True
    run = layout.split_tag(tag)[0]
    if (row.get("uid"), row.get("node")) != (os.geteuid(), node) or not row["tag"].startswith(run + "."):
        return False
    target = "socket:[%d]" % row["inode"]
    holders = [
        one for one in procs.snapshot().values() if one.pid != os.getpid() and target in procs.open_files(one.pid)
    ]
    agents = [one for one in holders if procs.read_cmdline(one.pid).endswith(b"\0serve\0")]
    return len(agents) == len(holders) and any(procs.send_signal(one.pid, one.start, signal.SIGKILL) for one in agents)


def node_hash(root: str) -> str:
    """Return 8 hex digits for the agent's directory: a machine may be several nodes."""
    return str(layout.sha256(os.fsencode(root)).hexdigest()[:8])


def hold_port(number: int, *, after_others: bool = False) -> Lease | None:
    """Bind the port on every address, without listening on it. None: in use, on any address of IPv4 or IPv6, or not
    permitted for this user.

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
    return Lease("port/%d" % number, sockets)
