"""A node of a job's Ray cluster: the process that a supervisor starts as the launcher of its node.

`PYTHON AGENT ray OPTIONS join COMMAND…` runs `ray start --block`, with the job's Python. On the first node it waits for
all nodes, starts the command through the supervisor (join.py), and ends the cluster and itself as the command ended.
The others end with the cluster. Only processes below this one are ended, never another cluster's: not by `ray stop`.

OPTIONS: JSON {host, nodes: [host], resources: {name: count}, start_s}. What workers
and actors print is printed here, behind the worker's id. The cluster's directory is short: Unix sockets are in it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

from ascendrun.node import layout, procs, reap
from ascendrun.node.files import make_private_dir
from ascendrun.node.join import PASSED_ON, end_as

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, BinaryIO

GCS_DIED, RAYLET_DIED, RAY_ENDED, NODES_MISSING = 91, 92, 93, 94
"""Exit codes. RAY_ENDED: `ray start` ended, and neither its GCS nor its raylet before it."""
_DEATHS = {"gcs_server": GCS_DIED, "raylet": RAYLET_DIED}
WATCH_S = 0.1
START_SHARE = 0.9
"""Part of the time for a start after which the missing nodes are named; the head names none."""
RESOLVE_S, KILL_S = 2.0, 10.0
TAIL_BYTES = 16 << 10
LINE_BYTES = 1 << 20
"""A line of a worker that is longer is split."""
_STARTED = b"Ray runtime started."
_WORKER = re.compile(r"^worker-([0-9a-f]{8})[0-9a-f]*-[0-9a-f]+-(\d+)\.(out|err)$")

# Prints the names of the nodes that have not joined, after each change, and ends when all have.
AWAIT_NODES = """
import json, os, sys, time
import ray
ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level="ERROR")
missing, before = set(sys.argv[1:]), None
while missing:
    missing -= {node.get("NodeName") for node in ray.nodes() if node["Alive"]}
    if missing != before:
        print(json.dumps(sorted(missing)), flush=True)
    before = set(missing)
    time.sleep(0.2)
"""


def main(words: list[str]) -> int:
    """Run `ray OPTIONS COMMAND…` to the end of the cluster; COMMAND becomes the job's command (join.py)."""
    node = RayNode(json.loads(words[0]), words[1:])
    for number in PASSED_ON:
        signal.signal(number, node.note_stop)
    try:
        status = node.run()
    finally:
        node.end()
    return end_as(status)


class RayNode:
    """The cluster's part on this node. Results are wait statuses, as of the command."""

    def __init__(self, options: dict[str, Any], command: list[str]) -> None:
        self._options, self._command = options, command
        self._is_head = options["host"] == options["nodes"][0]
        self._gcs = os.environ["RAY_ADDRESS"].rpartition(":")
        self._env = {name: value for name, value in os.environ.items() if name != layout.JOIN_VARIABLE}
        tag, root = os.environ[layout.TAG_VARIABLE], os.environ[layout.ROOT_VARIABLE]
        self._folder = layout.short_dir(layout.attempt_dir(root, tag))
        for path in (layout.local_base(), self._folder):
            make_private_dir(path)
        self._output = os.path.join(self._folder, "start.log")
        self._logs = WorkerLogs(os.path.join(self._folder, "session_latest", "logs"))
        self._watched: dict[str, tuple[int, int]] = {}
        self._is_stopping = False

    def note_stop(self, *_: object) -> None:
        self._is_stopping = True

    def run(self) -> int:
        deadline = time.monotonic() + START_SHARE * float(self._options["start_s"])
        while self._is_over() and not self._is_stopping:  # the first node has not started yet
            time.sleep(WATCH_S)
        with open(self._output, "ab") as log:
            argv = [sys.executable, "-m", "ray.scripts.scripts", *self._arguments()]
            ray = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._env)
        while _STARTED not in self._printed():
            is_late = self._is_head and time.monotonic() > deadline  # it names the others
            if ray.poll() is not None or self._is_stopping or is_late:
                return self._fail(RAY_ENDED)
            time.sleep(WATCH_S)
        table = procs.snapshot()
        for pid in reap.descendants(table, {os.getpid()}):
            name = procs.read_line("/proc/%d/comm" % pid)
            if name in _DEATHS:
                self._watched[name] = pid, table[pid].start
        if not self._is_head:
            return self._watch(ray, None)
        return self._await_nodes(ray, deadline) or self._watch(ray, subprocess.Popen(self._command))

    def _arguments(self) -> list[str]:
        """Return those of `ray start`. Ports that are not given are chosen by the kernel, so none is another's."""
        host, _, port = self._gcs
        own = ["--head", "--port=" + port] if self._is_head else ["--address=%s:%s" % (host, port)]
        if self._is_head:
            own.append("--include-dashboard=false")
            if importlib.util.find_spec("grpc") is not None:  # then it listens on a port for clients, 10001 by default
                own.append("--ray-client-server-port=%d" % free_port())
        return [
            "start",
            "--block",
            "--disable-usage-stats",
            *own,
            "--temp-dir=" + self._folder,
            "--node-name=" + self._options["host"],
            "--node-ip-address=" + own_address(host, int(port)),
            "--min-worker-port=0",
            "--max-worker-port=0",
            "--dashboard-agent-listen-port=0",
            "--resources=" + json.dumps(self._options["resources"]),
        ]

    def _await_nodes(self, ray: subprocess.Popen[bytes], deadline: float) -> int:
        """Return 0 when all nodes have joined."""
        place = os.path.join(self._folder, "missing")
        with open(place, "wb") as out:
            names = self._options["nodes"]
            argv = [sys.executable, "-c", AWAIT_NODES, *names]
            waiting = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, env=self._env)
        while waiting.poll() is None:
            died = self._find_death(ray)
            if died or self._is_stopping:
                return self._fail(died or RAY_ENDED)
            if time.monotonic() > deadline:
                lines = procs.read_text(place).split("\n")
                missing = json.loads(lines[-2]) if len(lines) > 1 else names[1:]
                sys.stderr.write("ascendrun: Ray nodes missing: %s\n" % ", ".join(missing))
                return NODES_MISSING << 8
            time.sleep(WATCH_S)
        return 0 if waiting.returncode == 0 else self._fail(RAY_ENDED)

    def _watch(self, ray: subprocess.Popen[bytes], command: subprocess.Popen[bytes] | None) -> int:
        """Return how the command ended; without one 0, when the cluster of the first node has."""
        next_s = 0.0
        while True:
            if command is not None and command.poll() is not None:
                code = command.returncode
                return -code if code < 0 else code << 8
            died = self._find_death(ray)
            if command is None and (died or time.monotonic() >= next_s):
                if self._is_over():
                    return 0
                next_s = time.monotonic() + (WATCH_S if self._is_stopping else 1.0)
            if died:
                return self._fail(died)
            self._logs.print_new()
            time.sleep(WATCH_S)

    def _find_death(self, ray: subprocess.Popen[bytes]) -> int:
        """Return the exit code that says which process of the cluster has died here, 0: none."""
        for name, (pid, start) in self._watched.items():
            stat = procs.read_stat(pid)
            if stat is None or stat.is_dead or stat.start != start:
                return _DEATHS[name]
        return RAY_ENDED if ray.poll() is not None else 0

    def _is_over(self) -> bool:
        """Return whether the first node's GCS does not run, by its host's answer; False for that node itself."""
        if self._is_head:
            return False
        try:
            socket.create_connection((self._gcs[0], int(self._gcs[2])), RESOLVE_S).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            pass
        return False

    def _fail(self, code: int) -> int:
        what = {value: name for name, value in _DEATHS.items()}.get(code, "ray start")
        sys.stderr.write("ascendrun: Ray: %s ended\n" % what)
        sys.stderr.flush()
        sys.stderr.buffer.write(self._printed()[-TAIL_BYTES:])
        return code << 8

    def _printed(self) -> bytes:
        with open(self._output, "rb") as file:
            return file.read()

    def end(self) -> None:
        """Kill all processes below this one: to drain a node of a cluster that ends, Ray takes up to 30 s."""
        deadline = time.monotonic() + KILL_S
        while time.monotonic() < deadline:
            table = procs.snapshot()
            left = [pid for pid in reap.descendants(table, {os.getpid()}) - {os.getpid()} if not table[pid].is_dead]
            if not left:
                break
            for pid in left:
                procs.send_signal(pid, table[pid].start, signal.SIGKILL)
            time.sleep(WATCH_S / 2)
        self._logs.print_new(last=True)


class WorkerLogs:
    """What Ray's workers write to the session's directory, by file: its descriptor, its source, the part of a line."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._open: dict[str, tuple[BinaryIO, BinaryIO, bytes]] = {}
        self._rest: dict[str, bytes] = {}

    def print_new(self, *, last: bool = False) -> None:
        """Print the new lines as `(worker ID, pid PID) LINE`, on the stream that they were written to."""
        with contextlib.suppress(OSError):  # the cluster has not started yet
            for name in sorted(set(os.listdir(self._folder)) - set(self._open)):
                found = _WORKER.match(name)
                if found:
                    target = sys.stdout.buffer if found.group(3) == "out" else sys.stderr.buffer
                    source = ("(worker %s, pid %s) " % (found.group(1), found.group(2))).encode("ascii")
                    self._open[name] = open(os.path.join(self._folder, name), "rb"), target, source
        for name, (file, target, source) in self._open.items():
            while True:
                chunk = file.read(LINE_BYTES)
                lines = (self._rest.get(name, b"") + chunk).split(b"\n")
                rest = lines.pop()
                if rest and (len(rest) >= LINE_BYTES or (last and not chunk)):
                    lines, rest = [*lines, rest], b""
                self._rest[name] = rest
                if lines:
                    target.write(b"".join(source + line + b"\n" for line in lines))
                    target.flush()
                if not chunk:
                    break


def own_address(host: str, port: int) -> str:
    """Return this machine's address towards another; Ray would take that of a route to the internet."""
    family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
