"""A node of a job's Ray cluster: the process that a supervisor starts as the launcher of its node.

`PYTHON AGENT ray OPTIONS join COMMAND…` runs `ray start --block`, with the job's Python. On the first node it waits for
all nodes, starts the command through the supervisor (join.py), and ends the cluster and itself as the command ended.
The others end with the cluster. Only processes below this one are ended, never another cluster's: not by `ray stop`.

OPTIONS: JSON {nodes: count, start_s, words: number of words of `ray start` before COMMAND}. What workers and actors
print is printed here, behind the worker's id, and how a part of Ray died. The cluster's directory is short: Unix
sockets are in it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import math
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
    from typing import Any, BinaryIO, Callable

GCS_DIED, RAYLET_DIED, RAY_ENDED, RAY_LATE = 91, 92, 93, 94
"""Exit codes. RAY_ENDED: `ray start` ended, and neither its GCS nor its raylet before it."""
_DEATHS = {"gcs_server": GCS_DIED, "raylet": RAYLET_DIED}
WATCH_S = 0.2
START_SHARE = 0.9
"""Part of the time for a start after which a node is late, which is then named. The head waits for the first node."""
RESOLVE_S, PRINT_S, KILL_S = 2.0, 5.0, 10.0
LINE_BYTES = 1 << 20
"""A line of a worker that is longer is split."""
_LOG = re.compile(
    r"^(?:worker-(?P<worker>[0-9a-f]{8})[0-9a-f]*-[0-9a-f]+-(?P<pid>\d+)\.(?P<stream>out|err)"
    r"|(?:raylet|gcs_server)\.err|ray_process_exit\.log)$"
)
"""Files of a session: of its workers, and what is known of a part of Ray that died. Others have thousands of lines."""
_NOTES = (b":job_id:", b":actor_name:", b":task_name:")
"""Starts of lines that Ray writes to the files of workers for itself (_private/ray_constants.py)."""

AWAIT_NODES = """
import os, sys, time, ray
ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level="ERROR")
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[1]):
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
    """The cluster's part on this node. Results are wait statuses, as of the command; 0: it goes on."""

    def __init__(self, options: dict[str, Any], words: list[str]) -> None:
        self._options, self._start, self._command = options, words[: options["words"]], words[options["words"] :]
        self._is_head = "--head" in self._start
        self._env = {name: value for name, value in os.environ.items() if name != layout.JOIN_VARIABLE}
        tag, root = os.environ[layout.TAG_VARIABLE], os.environ[layout.ROOT_VARIABLE]
        self._folder = layout.short_dir(layout.attempt_dir(root, tag))
        for path in (layout.local_base(), self._folder):
            make_private_dir(path)
        self._logs = WorkerLogs(os.path.join(self._folder, "session_latest", "logs"))
        self._watched: dict[str, tuple[int, int]] = {}
        self._is_stopping = False

    def note_stop(self, *_: object) -> None:
        self._is_stopping = True

    def run(self) -> int:
        """Return how the command ended; without one 0, when the cluster of the first node has."""
        late_s = math.inf if self._is_head else time.monotonic() + START_SHARE * float(self._options["start_s"])
        while self._is_over() and not self._is_stopping:  # the first node has not started yet
            time.sleep(WATCH_S)
        own = ["--block", "--temp-dir=" + self._folder]
        if self._is_head and importlib.util.find_spec("grpc") is not None:  # then it would take port 10001 for clients
            with socket.socket() as probe:
                probe.bind(("", 0))
                own.append("--ray-client-server-port=%d" % probe.getsockname()[1])
        self._ray = self._python("-m", "ray.scripts.scripts", "start", *self._start, *own)
        status = self._await(self._has_started, late_s)
        if status or not self._is_head:
            return status or self._await(self._has_ended, is_start=False)
        joining = self._python("-c", AWAIT_NODES, str(self._options["nodes"]))
        status = self._await(lambda: joining.poll() is not None) or end_of(joining)
        if status:
            return status
        command = subprocess.Popen(self._command)
        return self._await(lambda: command.poll() is not None, is_start=False) or end_of(command)

    def _python(self, *words: str) -> subprocess.Popen[bytes]:
        """Start the job's Python without the supervisor's socket. What it prints are instructions; errors are shown."""
        argv = [sys.executable, *words]
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=self._env)

    def _has_started(self) -> bool:
        """Look for the processes of the cluster on this node; the raylet is the last. Of several with one name the
        oldest counts: a worker has the name of its raylet until it runs its own program."""
        table = procs.snapshot()
        for pid in sorted(reap.descendants(table, {os.getpid()}), key=lambda pid: (table[pid].start, pid)):
            name = procs.read_line("/proc/%d/comm" % pid)
            if name in _DEATHS:
                self._watched.setdefault(name, (pid, table[pid].start))
        return "raylet" in self._watched

    def _has_ended(self) -> bool:
        return (self._is_stopping or self._find_death() != 0) and self._is_over()

    def _await(self, is_done: Callable[[], bool], late_s: float = math.inf, *, is_start: bool = True) -> int:
        """Wait; a stop is only for the command once it runs."""
        while not is_done():
            died = self._find_death()
            if died or (is_start and self._is_stopping):
                return died or signal.SIGTERM
            if time.monotonic() > late_s:
                return RAY_LATE << 8
            self._logs.print_new()
            time.sleep(WATCH_S)
        return 0

    def _find_death(self) -> int:
        """Return the status that says which process of the cluster has died here. `ray start` logs how it ended."""
        for name, (pid, start) in self._watched.items():
            stat = procs.read_stat(pid)
            if stat is None or stat.is_dead or stat.start != start:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._ray.wait(PRINT_S)
                return _DEATHS[name] << 8
        return RAY_ENDED << 8 if self._ray.poll() is not None else 0

    def _is_over(self) -> bool:
        """Return whether the first node's GCS does not run, by its host's answer; False for that node itself."""
        if self._is_head:
            return False
        host, _, port = os.environ["RAY_ADDRESS"].rpartition(":")
        try:
            socket.create_connection((host, int(port)), RESOLVE_S).close()
        except OSError as error:
            return isinstance(error, ConnectionRefusedError)
        return False

    def end(self) -> None:
        """Kill all processes below this one: to drain a node of a cluster that ends, Ray takes up to 30 s."""
        for _ in range(int(KILL_S / WATCH_S)):
            table = procs.snapshot()
            left = [pid for pid in reap.descendants(table, {os.getpid()}) - {os.getpid()} if not table[pid].is_dead]
            if not left:
                break
            for pid in left:
                procs.send_signal(pid, table[pid].start, signal.SIGKILL)
            time.sleep(WATCH_S)
        self._logs.print_new(last=True)


class WorkerLogs:
    """What Ray's workers write to the session's directory. `_open`: by file its descriptor, its target, its source."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._open: dict[str, tuple[BinaryIO, BinaryIO, bytes]] = {}

    def print_new(self, *, last: bool = False) -> None:
        """Print new lines as `(worker ID, pid PID) LINE` on the stream they were written to, or as `(ray) LINE`."""
        with contextlib.suppress(OSError):  # the cluster has not started yet
            for name in sorted(set(os.listdir(self._folder)) - set(self._open)):
                found = _LOG.match(name)
                if found:
                    target = sys.stdout.buffer if found["stream"] == "out" else sys.stderr.buffer
                    who = "(worker %s, pid %s) " % found.group("worker", "pid") if found["worker"] else "(ray) "
                    self._open[name] = open(os.path.join(self._folder, name), "rb"), target, who.encode("ascii")
        for file, target, source in self._open.values():
            for line in iter(functools.partial(file.readline, LINE_BYTES), b""):
                if not line.endswith(b"\n") and len(line) < LINE_BYTES and not last:
                    file.seek(-len(line), os.SEEK_CUR)  # it goes on
                    break
                if not line.startswith(_NOTES):
                    target.write(source + line + (b"" if line.endswith(b"\n") else b"\n"))
            target.flush()


def end_of(process: subprocess.Popen[bytes]) -> int:
    """Return the wait status of a process that has ended."""
    code = int(process.returncode)
    return -code if code < 0 else code << 8
