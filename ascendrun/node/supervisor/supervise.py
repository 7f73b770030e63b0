"""Owns the ranks of one attempt on one node: claims the attempt once, detached from SSH, agent and head.

It outlives everything but the node, and ends with the last process of the attempt.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import sys
import threading
import time
from functools import partial

from ascendrun.node import layout, procs, reap
from ascendrun.node.failpoint import failpoint
from ascendrun.node.files import claim_json, exists, make_private_dir, read_json, read_some, write_json
from ascendrun.node.layout import IDENTITY, PREPARED, RENEWED, ROLL, STOP, STOP_TAKEN, WHERE
from ascendrun.node.op_errors import message, os_failure
from ascendrun.node.records import IoErrors, Records, free_reserve, write_end
from ascendrun.node.supervisor import processes
from ascendrun.node.supervisor.peers import Peers
from ascendrun.node.supervisor.processes import Ending, Processes
from ascendrun.node.supervisor.rank_set import RankSet

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable


def main(folder: str) -> int:
    """Run `supervise FOLDER`: read {master_port, hccl_base, secret_env, umask, leases} from stdin, print one JSON line
    on stdout: {"pid": ...}, {"already": true} when another supervisor owns the attempt, or {"error": {...}}.

    `leases`: {"devices", "ports"}: inherited descriptors that hold leases (agent/leases.py) until they are closed."""
    os.umask(0o077)
    with os.fdopen(0, "rb", closefd=False) as stdin:
        spec = json.loads(stdin.read().decode("utf-8"))
    if os.fork():
        os._exit(0)
    for fd in (fd for fds in (spec.get("leases") or {}).values() for fd in fds):
        os.set_inheritable(fd, False)
    os.chdir("/")
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until Supervisor handles it: a stop may come right after the claim
    procs.become_subreaper()
    try:
        supervisor = _take_over(folder, spec)
    except OSError as error:
        _report({"error": os_failure(error, "keep-records", path=folder).as_json()})
        return 1
    if supervisor is None:
        _report({"already": True})
        return 0
    _report({"pid": os.getpid()})
    supervisor.run()
    return 0


def _take_over(folder: str, spec: dict[str, Any]) -> Supervisor | None:
    """Claim the attempt; None when it was claimed before. Raises OSError; then nothing is claimed."""
    prepared = read_json(os.path.join(folder, PREPARED))
    if prepared is None:
        raise FileNotFoundError(2, "there is no prepared attempt", folder)
    if read_json(os.path.join(folder, IDENTITY)) is not None:
        return None
    streams = layout.streams_dir(folder)
    records = Records(streams)
    try:
        records.hold_reserve()
    except OSError:
        free_reserve(streams)
        raise
    group = reap.make_group("%s-%d" % (prepared["tag"], os.getpid()))  # a machine may be several nodes
    failpoint("launch.before_claim")
    identity = dict(procs.identify(os.getpid()), cgroup=group)
    if not claim_json(os.path.join(folder, IDENTITY), identity):
        return None
    failpoint("launch.after_claim")
    records.add("supervising", pid=identity["pid"], start=identity["start"], boot_id=identity["boot_id"])
    return Supervisor(folder, prepared, spec, records, identity)


def _report(answer: dict[str, Any]) -> None:
    """Print the reply. The serving agent may be gone: the attempt runs without it."""
    try:
        os.write(1, json.dumps(answer).encode("ascii") + b"\n")
    except OSError:
        pass
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)
    os.close(null)
    sys.stdout = None


ORDERED = ("head", "hung", "fence", "peer")
"""What ends the ranks of all hosts."""
TICK_S = 1.0
BATCH_S = 0.005
"""Seconds of pause after small reads: frequent output causes 200 wake-ups a second, not one per line."""
SMALL_BYTES = 1 << 16
LAST_TRY_S = 120.0
"""Seconds after the ranks' end that their last output waits for its disk; on a full disk it does not wait."""
LEFTOVERS_S = 5.0
HEAD_SIGNALS_S = 1.0
"""A SIGTERM so soon after SIGUSR1 is a stop by the head: the agent could not write its request."""


class Supervisor:
    """The main loop. Decisions are made once per iteration: after all events have been read.

    An error of the system in one step never ends the supervisor or a rank: it is recorded and the other steps continue.
    """

    def __init__(
        self, folder: str, prepared: dict[str, Any], spec: dict[str, Any], records: Records, identity: dict[str, Any]
    ) -> None:
        self._prepared, self._records = prepared, records
        self._errors = IoErrors(records)
        self._folder = Folder(folder, prepared, identity)
        self._processes = Processes(prepared, folder, self._folder.streams, identity["cgroup"])
        self._ending = Ending(prepared["stop"], self._processes, records)
        self._ranks = RankSet(prepared, spec, self._processes, self._ending, records)
        self._peers = Peers(prepared, spec.get("master_port"))
        self._stop_seen: Any = None
        self._asked_s: float | None = None
        self._started_s = time.monotonic()
        exit_s = float(prepared.get("exit_s", processes.EXIT_S))
        self._tick_s = max(0.02, min(TICK_S, exit_s / 4))
        self._next_tick_s = 0.0
        self._wake_fd, self._alarm_fd = self._catch_signals()

    def run(self) -> None:
        self._check_lease()
        if not self._check_stop_file() and self._ending.stopping_by is None:
            self._ranks.start_all(self._errors)
        # After the last fork.
        self._folder.start_thread(wake=partial(os.write, self._alarm_fd, b"\0"), every_s=self._tick_s)
        while not self._ending.is_over:
            self._turn()
        self._finish()

    def _catch_signals(self) -> tuple[int, int]:
        ours, theirs = os.pipe()
        for fd in (ours, theirs):
            os.set_blocking(fd, False)
        for number in (signal.SIGCHLD, signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
        self._ranks.poll.register(ours, select.POLLIN)
        return ours, theirs

    # --- one iteration ---

    def _turn(self) -> None:
        now = time.monotonic()
        ready = self._ranks.poll.poll(int(self._ending.wait_s(now, self._next_tick_s) * 1000) + 1)
        guard = self._errors.guard
        guard("read-output", self._read_output, ready)
        guard("signals", self._handle_signals)
        guard("exits", self._ranks.reap)
        now = time.monotonic()
        if now >= self._next_tick_s:
            self._next_tick_s = now + self._tick_s
            guard("checks", self._tick, now)
            guard("lease", self._check_lease)
        guard("stop", self._ending.climb, now)
        if self._ending.is_sweeping():
            guard("processes", self._ending.sweep, now)

    def _read_output(self, ready: list[tuple[int, int]]) -> None:
        moved = self._ranks.read([fd for fd, _ in ready if fd != self._wake_fd])
        if 0 < moved < SMALL_BYTES:
            select.select([self._wake_fd], [], [], BATCH_S)

    def _handle_signals(self) -> None:
        received = read_some(self._wake_fd, 4096) or b""
        now = time.monotonic()
        if signal.SIGUSR1 in received:
            self._asked_s = now
        if signal.SIGTERM in received:
            if self._asked_s is not None and now - self._asked_s < HEAD_SIGNALS_S:
                self._ending.stop("head", message("stop-requested", why="signal", by="node"))
            else:
                self._ending.stop("node", message("supervisor-terminated"))
        if signal.SIGUSR1 in received:
            self._folder.look_soon()
        if received:
            self._check_stop_file()

    def _tick(self, now: float) -> None:
        self._folder.check()
        if not self._records.flush() and self._records.error is not None:
            self._errors.note("records", self._records.error)
        self._errors.guard("roll", self._folder.write_roll, now)
        self._check_stop_file()
        self._check_peers()
        limit_s = self._prepared.get("max_s")
        if limit_s is not None and now - self._started_s >= limit_s:
            self._ending.stop("limit", message("run-limit", limit_s=limit_s))
        self._ranks.record_dropped(self._errors, now)
        self._ranks.check(now)

    def _check_stop_file(self) -> bool:
        """Return True when a stop was requested, now or before."""
        order, error = self._folder.stop_request()
        if error is not None:
            self._errors.note("stop-file", error)
        if order is None:
            return self._stop_seen is not None
        if order != self._stop_seen:
            self._stop_seen = order
            self._folder.acknowledge_stop()
            by, key = ("hung", "stop-hung") if order.get("hung") else ("head", "stop-requested")
            reason = message(key, why=order.get("why") or "-", by=order.get("by") or "-")
            self._ending.stop(by, reason, now=bool(order.get("now")), grace_s=order.get("grace_s"))
        return True

    def _check_lease(self) -> None:
        """End the ranks when the head has not renewed the attempt's lease for too long; see node/reap.py."""
        fence_s = self._prepared.get("fence_s")
        if fence_s is None:
            return
        self._errors.guard("lease", self._folder.read_lease)
        grace_s = float(self._prepared["stop"]["grace_s"])
        if reap.is_lease_over(self._folder.lease_began_ns, fence_s=fence_s, grace_s=grace_s):
            self._ending.stop("fence", message("head-unreachable", limit_s=fence_s))

    def _check_peers(self) -> None:
        """End the ranks when those of another host have failed, and no controller ends these."""
        by = self._ending.stopping_by
        has_failed = by not in ORDERED and any(rank.result and not rank.is_done for rank in self._processes.ranks)
        node = self._peers.tick(notify=has_failed or by == "node")
        if node is not None and by is None:
            self._ending.stop("peer", message("peer-ended", node=node))

    # --- the end ---

    def _write_last_output(self) -> None:
        deadline = time.monotonic() + LAST_TRY_S
        spools = [spool for process in self._processes.all for spool in process.spools.values()]
        while time.monotonic() < deadline:
            errors = [spool.error for spool in spools if not spool.flush(now=True)]
            if all(error is None or error.errno in (errno.ENOSPC, errno.EDQUOT) for error in errors):
                break
            select.select([], [], [], self._tick_s)  # time.sleep fails where a test shifts this host's clock
            self._errors.guard("checks", self._tick, time.monotonic())
        for spool in spools:
            spool.close()

    def _finish(self) -> None:
        self._ranks.read_rest()
        self._check_peers()
        self._write_last_output()
        self._ranks.record_dropped(self._errors, time.monotonic(), last=True)
        self._errors.finish()
        self._check_peers()  # again: a datagram may be lost
        self._folder.look_soon(last=True)
        self._errors.guard("forked-ranks", self._ranks.forked.check)
        self._processes.sampler.end()
        failpoint("finish.before_terminal")
        leftovers = self._ending.leftovers
        if not leftovers:
            self._ranks.release_leases()
        free_reserve(self._folder.streams)
        write_end(
            self._folder.path,
            self._records,
            leftovers=leftovers,
            wait_s=TICK_S,
            codes={str(one.number): one.result for one in self._processes.all},
            exits={str(one.number): one.summary() for one in self._processes.all if one.has_ended},
        )
        reap.remove_group(self._processes.group)
        if leftovers:
            self._await_leftovers(leftovers)

    def _await_leftovers(self, leftovers: list[dict[str, Any]]) -> None:
        """Stay until the processes that SIGKILL did not end are gone, and record that."""
        left = [(one["pid"], one["start"]) for one in leftovers]
        while procs.describe_all(left):
            select.select([self._wake_fd], [], [], LEFTOVERS_S)
            if signal.SIGTERM in (read_some(self._wake_fd, 4096) or b""):
                return
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
        records = self._records
        records.add("leftovers_gone", durable=True)
        while not records.flush() and records.error is not None and records.error.errno != errno.ENOENT:
            select.select([], [], [], LEFTOVERS_S)


ROLL_S = 1.0
ROLL_COST = 100.0
"""The search for descendants takes at most one hundredth of the time."""


class Folder:
    """`path`: the directory of the attempt; `streams`: that of its growing files, another if `path` is on a network.

    Then a thread looks at `path`: its server may hang, the ranks' output must not.
    """

    def __init__(self, path: str, prepared: dict[str, Any], identity: dict[str, Any]) -> None:
        self.path = path
        self.streams = layout.streams_dir(path)
        self._prepared, self._identity = prepared, identity
        self._looks_in_thread = False
        self._look_now, self._is_over = threading.Event(), False
        self._order: dict[str, Any] | None = None
        self._error: OSError | None = None
        self.lease_began_ns = 0
        self._roll: list[reap.Who] = []
        self._next_roll_s = 0.0

    @property
    def is_elsewhere(self) -> bool:
        return self.streams != self.path

    def start_thread(self, *, wake: Callable[[], Any], every_s: float) -> None:
        """Look in a thread if the directory is on a network; `wake()` is called after a new request to stop."""
        if self.is_elsewhere:
            self._looks_in_thread = True
            threading.Thread(target=self._look, args=(wake, every_s), daemon=True, name="folder").start()

    def look_soon(self, *, last: bool = False) -> None:
        """Let the thread look now; `last`: no more."""
        self._is_over = last
        self._look_now.set()

    def check(self) -> None:
        """Make the directories again if they were removed, unless a thread does. Raises OSError."""
        if not self._looks_in_thread:
            self._keep()

    def stop_request(self) -> tuple[dict[str, Any] | None, OSError | None]:
        """Return (the request to stop, None: none; why the last look failed). A file that cannot be read is no
        request."""
        if self._looks_in_thread:
            error, self._error = self._error, None
            return self._order, error
        try:
            return read_json(os.path.join(self.path, STOP)), None
        except OSError as reason:
            return None, reason

    def acknowledge_stop(self) -> None:
        """Rename the request's file: a supervisor that leaves it is recognised as hung."""
        with contextlib.suppress(OSError):
            os.replace(os.path.join(self.path, STOP), os.path.join(self.path, STOP_TAKEN))

    def read_lease(self) -> None:
        """Set `lease_began_ns`, the newest time at which the head renewed the attempt's lease. Raises OSError."""
        began_ns = reap.lease_began_ns(os.path.join(self.streams, RENEWED))
        self.lease_began_ns = max(self.lease_began_ns, began_ns)

    def write_roll(self, now: float) -> None:
        """Record the living descendants. After this process's death they have a trace, also without an environment.
        Raises OSError."""
        if now < self._next_roll_s:
            return
        table = procs.snapshot()
        self._next_roll_s = now + max(ROLL_S, ROLL_COST * (time.monotonic() - now))
        found = reap.descendants(table, {os.getpid()}) - {os.getpid()}
        roll = sorted((pid, table[pid].start) for pid in found if not table[pid].is_dead)
        if roll != self._roll:
            value = {"boot_id": self._identity["boot_id"], "seen": roll}
            write_json(os.path.join(self.streams, ROLL), value, durable=False)
            self._roll = roll

    def _look(self, wake: Callable[[], Any], every_s: float) -> None:
        while not self._is_over:
            try:
                self._keep()
                order = read_json(os.path.join(self.path, STOP))
            except OSError as error:
                self._error = error
            else:
                if order is not None and order != self._order:
                    self._order = order
                    with contextlib.suppress(BlockingIOError):  # the loop has been woken often enough
                        wake()
            self._look_now.wait(every_s)
            self._look_now.clear()

    def _keep(self) -> None:
        """Make the attempt's folders again if they were removed: the records of the ranks' ends need a place."""
        if self.is_elsewhere and not exists(self.streams):
            make_private_dir(self.streams)
        if exists(self.path):
            return
        make_private_dir(self.path)
        if self.is_elsewhere:
            write_json(os.path.join(self.path, WHERE), {"streams": self.streams})
        write_json(os.path.join(self.path, IDENTITY), self._identity)
        write_json(os.path.join(self.path, PREPARED), self._prepared)
