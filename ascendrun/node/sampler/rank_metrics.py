"""Resources that each rank of an attempt uses on its host, with all its children.

The processes of a rank are found by descent, in the attempt's control group if it has one, else among all processes;
the more this search costs, the rarer it is. In between only the known processes are read.
"""

from __future__ import annotations

import collections
import os
import time

from ascendrun.node import layout, procs, reap
from ascendrun.node.sampler import connections

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Sequence

SCAN_SHARE = 200.0
"""Scanning all processes may cost one part in this many of a core."""
SETTLED_S = 10.0
"""Seconds; an older process has its final environment: a fork has had its exec."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

Leader = collections.namedtuple("Leader", "pid start rank local_rank may_launch forks", defaults=(False, False))
"""A process that the supervisor started. `rank`, `local_rank` None: a launcher, whose children are the ranks.
`may_launch`: it is alone on its node, one of several, and may be a launcher too. `forks`: it may start the ranks of its
node: if a process below it is a rank, it is none itself."""


class RankFigures:
    """Use from one thread. `leaders`: returns them; those below a launcher start late. `devices`: the device of each
    local rank, None: the job has none."""

    def __init__(
        self, leaders: Callable[[], Sequence[Leader]], *, group: str | None, devices: Sequence[int] | None
    ) -> None:
        self._leaders = leaders
        self._group = group
        self._devices = devices
        self._next_scan_s = 0.0
        self._members: dict[int, tuple[int, int, int | None]] = {}  # pid: (start, rank, local rank)
        self._roots: dict[int, int] = {}  # rank: pid
        self._reported: dict[int, tuple[int | None, int | None]] = {}  # pid: (rank, local rank) in its environment
        self._before: dict[int, _Totals] = {}
        self._joined: set[int] = set()  # pids: processes whose final environment is of the whole job
        self.forked: dict[int, tuple[int, int]] = {}
        """Ranks that a script started itself, as of the last search: {rank: (pid, start)}."""
        self.own_world: int | None = None
        """World size of processes that train on this node only, though the job has other nodes; None: none seen."""
        self.is_alone: bool | None = None
        """Whether rank 0 is not connected to another rank, nor was; None: it is elsewhere, has no others, or a launcher
        or script starts the ranks, or this is not known."""

    def take(self, now_s: float) -> list[dict[str, Any]]:
        """Take a sample. `now_s`: monotonic. One item per living rank, in order of rank."""
        if now_s >= self._next_scan_s:
            started_s = time.thread_time()
            self._scan()
            self._look_for_peers()
            took_s = time.thread_time() - started_s
            self._next_scan_s = now_s + took_s * SCAN_SHARE
        boot_ticks = time.clock_gettime(time.CLOCK_BOOTTIME) * procs.TICKS_PER_S
        ranks: dict[int, list[tuple[procs.Stat, int | None]]] = {}
        for pid, (start, rank, local_rank) in list(self._members.items()):
            process = procs.read_stat(pid)
            if process is None or process.start != start or process.is_dead:
                del self._members[pid]
            else:
                ranks.setdefault(rank, []).append((process, local_rank))
        before, self._before = self._before, {}
        return [self._figures(rank, ranks[rank], before.get(rank), now_s, boot_ticks) for rank in sorted(ranks)]

    def _figures(
        self,
        rank: int,
        members: list[tuple[procs.Stat, int | None]],
        before: _Totals | None,
        now_s: float,
        boot_ticks: float,
    ) -> dict[str, Any]:
        root = next((one for one, _ in members if one.pid == self._roots.get(rank)), members[0][0])
        local_rank = next((local for _, local in members if local is not None), None)
        totals = _Totals(now_s, boot_ticks)
        resident = []
        for process, _ in members:
            totals.add(process, read_io(process.pid))
            resident.append(read_memory(process.pid))
        self._before[rank] = totals
        rates = totals.since(before)
        known = [one for one in resident if one is not None]
        devices = self._devices
        has_device = devices is not None and local_rank is not None and local_rank < len(devices)
        return {
            "rank": rank,
            "pid": root.pid,
            "device": devices[local_rank] if has_device and devices is not None and local_rank is not None else None,
            "cpu": rates[0],
            "read_bytes_s": rates[1],
            "write_bytes_s": rates[2],
            # Shared pages of a family count once: forked loaders show their parent's pages as their own.
            "rss_bytes": sum(one[0] - one[1] for one in known) + max(one[1] for one in known) if known else None,
            "threads": sum(process.threads for process, _ in members),
            "state": root.state,
        }

    # Assignment of processes to ranks

    def _scan(self) -> None:
        processes = map(procs.read_stat, reap.group_pids(self._group) or procs.pids())
        table = {process.pid: process for process in processes if process is not None}
        children: dict[int, list[procs.Stat]] = {}
        for process in table.values():
            children.setdefault(process.ppid, []).append(process)
        self._members, self._roots, self.forked = {}, {}, {}
        for leader in self._leaders():
            found = table.get(leader.pid)
            if found is not None and found.start == leader.start:
                self._walk(found, leader, children)
        self._reported = {pid: reported for pid, reported in self._reported.items() if pid in table}
        self._joined &= set(table)

    def _walk(self, top: procs.Stat, leader: Leader, children: dict[int, list[procs.Stat]]) -> None:
        todo = [(top, leader.rank, leader.local_rank, False)]
        seen: set[int] = set()
        found: list[tuple[procs.Stat, int, int | None, bool]] = []
        while todo:
            process, rank, local_rank, is_own = todo.pop()
            if process.pid in seen:
                continue
            seen.add(process.pid)
            if leader.rank is None or leader.forks:
                own = self._environment(process)
                if own[0] is not None:
                    rank, local_rank, is_own = *own, True
            if rank is not None:
                found.append((process, rank, local_rank, is_own))
            if leader.may_launch and self.own_world is None and process.pid not in self._joined:
                self.own_world = own_world(procs.read_environ(process.pid))
                if self._age_s(process) > SETTLED_S:
                    self._joined.add(process.pid)
            todo.extend((child, rank, local_rank, is_own) for child in children.get(process.pid, ()))
        has_ranks = any(is_own for *_, is_own in found)
        for process, rank, local_rank, is_own in found:
            if is_own or not has_ranks:
                self._members[process.pid] = process.start, rank, local_rank
                self._roots.setdefault(rank, process.pid)
                if is_own and leader.forks:
                    self.forked.setdefault(rank, (process.pid, process.start))

    def _look_for_peers(self) -> None:
        first = next((one for one in self._leaders() if one.rank == 0 and not one.forks and not one.may_launch), None)
        if first is None or self.is_alone is False:
            return
        if procs.variables_of(procs.read_environ(first.pid)).get(b"WORLD_SIZE", b"1") == b"1":
            return
        own = [pid for pid, (_, rank, _) in self._members.items() if rank == 0]
        found = connections.is_connected(own, set(self._members).difference(own))
        self.is_alone = None if found is None else not found

    @staticmethod
    def _age_s(process: procs.Stat) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME) - process.start / procs.TICKS_PER_S

    def _environment(self, process: procs.Stat) -> tuple[int | None, int | None]:
        """Return the variables that a launcher set for its child: (rank, local rank)."""
        if process.pid in self._reported:
            return self._reported[process.pid]
        environ = procs.read_environ(process.pid)
        reported = layout.rank_in(environ)
        if reported[0] is not None or self._age_s(process) > SETTLED_S:
            self._reported[process.pid] = reported
        return reported


class _Totals:
    """Total use of a rank's processes so far, including their ended children."""

    def __init__(self, at_s: float, boot_ticks: float) -> None:
        self.at_s = at_s
        self.boot_ticks = boot_ticks
        self.by_pid: dict[int, tuple[int, int | None, int | None]] = {}
        self.starts: dict[int, int] = {}

    def add(self, process: procs.Stat, io: tuple[int, int] | None) -> None:
        ticks = process.cpu_ticks + process.ended_ticks
        self.by_pid[process.pid] = ticks, io[0] if io else None, io[1] if io else None
        self.starts[process.pid] = process.start

    def since(self, before: _Totals | None) -> tuple[float | None, float | None, float | None]:
        """Return (percent of a core, bytes read per second, bytes written per second); None at the first sample."""
        if before is None or self.at_s <= before.at_s:
            return None, None, None
        passed_s = self.at_s - before.at_s
        grown = [self._grown(before, place) for place in range(3)]
        cpu = None if grown[0] is None else round(100.0 * grown[0] / procs.TICKS_PER_S / passed_s, 1)
        read_s, write_s = (None if value is None else round(value / passed_s, 1) for value in grown[1:])
        return cpu, read_s, write_s

    def _grown(self, before: _Totals, place: int) -> int | None:
        """Return the increase without earlier use of newly found old processes; None: no value can be read."""
        now = {pid: values[place] for pid, values in self.by_pid.items()}
        if all(value is None for value in now.values()):
            return None
        was = sum(values[place] or 0 for values in before.by_pid.values())
        found_late = sum(
            value or 0
            for pid, value in now.items()
            if pid not in before.by_pid and self.starts[pid] < before.boot_ticks
        )
        return max(0, sum(value or 0 for value in now.values()) - found_late - was)


def own_world(environ: bytes) -> int | None:
    """Return the world size of a process whose ranks are all on its node; None: others are elsewhere, or unknown.

    torchrun gives the ranks of a node in LOCAL_WORLD_SIZE, deepspeed in LOCAL_SIZE.
    """
    variables = procs.variables_of(environ)
    world = _number(variables.get(b"WORLD_SIZE"))
    local = _number(variables.get(b"LOCAL_SIZE") or variables.get(b"LOCAL_WORLD_SIZE"))
    return world if world is not None and local is not None and world <= local else None


def read_io(pid: int) -> tuple[int, int] | None:
    """Return (read, written) bytes of real input and output, not of the cache; None: not readable."""
    found = {}
    for line in procs.read_text("/proc/%d/io" % pid, 4096).split("\n"):
        name, _, value = line.partition(":")
        if name in ("read_bytes", "write_bytes"):
            found[name] = int(value)
    return (found["read_bytes"], found["write_bytes"]) if len(found) == 2 else None


def read_memory(pid: int) -> tuple[int, int] | None:
    """Return (resident, of that shared) bytes."""
    words = procs.read_text("/proc/%d/statm" % pid, 4096).split()
    return (int(words[1]) * PAGE_BYTES, int(words[2]) * PAGE_BYTES) if len(words) > 2 else None


def _number(word: bytes | None) -> int | None:
    return int(word) if word is not None and word.isdigit() else None
