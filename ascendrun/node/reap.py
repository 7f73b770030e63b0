"""The processes of an attempt: search for every one of them and for none of others; when they are ended.

Four traces, each sufficient: the attempt's tag in the environment, descent from the supervisor or from a found process
(the supervisor is a subreaper: a double-forked process becomes its child), the session of a rank that leads it, and the
roll of processes that the supervisor saw. A control group, where there is one, is a fifth. A name or a command line is
not a trace.
"""

from __future__ import annotations

import collections
import contextlib
import os
import time

from ascendrun.node import layout, procs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterable, Mapping, Sequence, Tuple

    Who = Tuple[int, int]


SAMPLER = {layout.SAMPLER_VARIABLE: "1"}


def marks_of(tag: str, root: str = "") -> dict[str, str]:
    """Return the marks of an attempt's processes, for find_marked. `root`: only those of the node with this root, since
    one machine may be several nodes; "": of all of them. Its sampler, and the tools of that, also have SAMPLER."""
    return {layout.TAG_VARIABLE: tag, layout.ROOT_VARIABLE: root} if root else {layout.TAG_VARIABLE: tag}


def find_marked(
    marks: Mapping[str, str],
    *,
    supervisor: int = 0,
    ranks: Mapping[int, int] = {},
    extra: Iterable[int] = (),
    seen: Mapping[int, int] = {},
    aside: Mapping[str, str] | None = None,
) -> list[Who]:
    """Return (pid, start time) of every living process with these variables in its environment, and of what else
    belongs to it, oldest first, without the supervisor itself.

    `supervisor`: its pid while it lives, 0: none. `ranks`: {pid: start time} of the ranks, each a session's leader.
    `extra`: pids known from elsewhere (a control group). `seen`: {pid: start time} of processes that its supervisor
    saw: they count as long as they are the same. `aside`: more variables; processes that also have them are skipped.
    """
    table = procs.snapshot()
    wanted = _pairs(marks)
    unwanted = _pairs(aside) if aside else None
    marked = set()
    for pid in list(table):
        found = set(procs.read_environ(pid).split(b"\0"))
        if wanted <= found:
            marked.add(pid)
            if unwanted is not None and unwanted <= found:
                del table[pid]
    spared = {os.getpid(), supervisor}
    same = {pid for pid, start in seen.items() if pid in table and table[pid].start == start}
    seeds = (marked | set(extra) | same | in_sessions(table, ranks)) - spared
    members = descendants(table, seeds | ({supervisor} if supervisor else set())) - spared
    return [
        (pid, table[pid].start) for pid in sorted(members, key=lambda pid: table[pid].start) if not table[pid].is_dead
    ]


def find_supervisor(folder: str) -> dict[str, Any] | None:
    """Return the identity of this user's supervisor of an attempt by its command line; None: there is none.

    For an attempt's folder that cannot be read.
    """
    command = [b"supervise", os.fsencode(folder), b""]
    for stat in procs.snapshot().values():
        with contextlib.suppress(OSError):
            is_supervisor = procs.read_cmdline(stat.pid).split(b"\0")[-3:] == command
            if is_supervisor and os.stat("/proc/%d" % stat.pid).st_uid == os.geteuid():
                return {"pid": stat.pid, "start": stat.start, "boot_id": procs.boot_id()}
    return None


def _pairs(marks: Mapping[str, str]) -> set[bytes]:
    return {os.fsencode("{}={}".format(*mark)) for mark in marks.items()}


def in_sessions(table: Mapping[int, procs.Stat], leaders: Mapping[int, int]) -> set[int]:
    """Return the members of the sessions whose leader is still the recorded process.

    A session without its leader is not trusted: its number could have been reused since.
    """
    mine = {pid for pid, start in leaders.items() if pid in table and table[pid].start == start}
    return {stat.pid for stat in table.values() if stat.session in mine}


def descendants(table: Mapping[int, procs.Stat], roots: Iterable[int]) -> set[int]:
    """Return the living roots and all their descendants."""
    children: dict[int, list[int]] = {}
    for stat in table.values():
        children.setdefault(stat.ppid, []).append(stat.pid)
    found: set[int] = set()
    todo = [pid for pid in roots if pid in table]
    while todo:
        pid = todo.pop()
        if pid not in found:
            found.add(pid)
            todo.extend(children.get(pid, ()))
    return found


# --- a control group of version 2 for the attempt, where the system permits it ---
#
# It finds processes without any other trace (own session, cleared environment, dead supervisor).


def parse_mount(mountinfo: str) -> str | None:
    """Return the mount point of the version 2 hierarchy; None: not mounted."""
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        if separator and after.split(" ", 1)[0] == "cgroup2":
            return before.split(" ")[4].replace("\\040", " ")
    return None


def parse_own(text: str) -> str | None:
    """Return the path of this process's group within the hierarchy, from /proc/self/cgroup."""
    for line in text.splitlines():
        if line.startswith("0::/"):
            return line[3:]
    return None


def make_group(tag: str) -> str | None:
    """Return the new group's directory; None: not permitted."""
    try:
        with open("/proc/self/mountinfo") as file:
            mount = parse_mount(file.read())
        with open("/proc/self/cgroup") as file:
            own = parse_own(file.read())
        if mount is None or own is None:
            return None
        folder = os.path.join(mount, own.lstrip("/"), "ascendrun-" + tag)
        os.mkdir(folder)
    except FileExistsError:
        return folder
    except OSError:
        return None
    return folder


def enter_group(folder: str | None) -> None:
    """Add the calling process; do nothing if there is no group or the kernel rejects it."""
    if folder is not None:
        with contextlib.suppress(OSError), open(os.path.join(folder, "cgroup.procs"), "wb", buffering=0) as file:
            file.write(b"0")


def group_pids(folder: str | None) -> list[int]:
    """Return the pids of the group; [] without a group."""
    if folder is None:
        return []
    try:
        with open(os.path.join(folder, "cgroup.procs"), "rb") as file:
            return [int(line) for line in file.read().split()]
    except (OSError, ValueError):
        return []


def remove_group(folder: str | None) -> None:
    """Remove the group if it is empty."""
    if folder is not None:
        with contextlib.suppress(OSError):
            os.rmdir(folder)


# --- the schedule of the end: signals, targets and times; pure ---
#
# The checkpoint signal goes to each rank's own process only (its data loaders would die of it); TERM and KILL go to all
# processes of the attempt. ABRT, at which Python prints all stacks, goes to the processes of ranks that handle it.

Step = collections.namedtuple("Step", "at_s signal everything")
"""At `at_s` (monotonic) send `signal` to everything, or to the ranks' own processes only."""

FAILURE_GRACE_S = 5.0
"""Seconds. The other ranks hang in a collective with the failed rank: a longer wait is useless."""
TERM_GRACE_S = 2.0
REMAINING_GRACE_S = 1.0
UNKILLABLE_S = 30.0
"""Seconds after SIGKILL until a living process (blocked in the kernel) is reported as remaining."""


def steps_for(by: str, *, now_s: float, signal: str, grace_s: float) -> list[Step]:
    """Return the steps. `by`: head, limit and node let the program save first; failure, finished and hung do not."""
    if by == "failure":
        return [Step(now_s, "TERM", True), Step(now_s + min(grace_s, FAILURE_GRACE_S), "KILL", True)]
    if by == "finished":
        return [Step(now_s, "TERM", True), Step(now_s + REMAINING_GRACE_S, "KILL", True)]
    return [
        Step(now_s, "ABRT" if by == "hung" else signal, False),
        Step(now_s + grace_s, "TERM", True),
        Step(now_s + grace_s + TERM_GRACE_S, "KILL", True),
    ]


class Ladder:
    """The remaining steps. New steps replace the old only when they kill sooner."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self.reached_kill = False

    def set(self, steps: Sequence[Step]) -> bool:
        """Set the steps. False when the current steps are at least as fast."""
        if self.reached_kill or (self._steps and self._steps[-1].at_s <= steps[-1].at_s):
            return False
        self._steps = list(steps)
        return True

    def due(self, now_s: float) -> list[Step]:
        """Return the due steps, each once."""
        due = [step for step in self._steps if step.at_s <= now_s]
        self._steps = self._steps[len(due) :]
        self.reached_kill = self.reached_kill or any(step.signal == "KILL" for step in due)
        return due

    def next_s(self) -> float | None:
        """Return the time of the next step; None: no step is left."""
        return self._steps[0].at_s if self._steps else None


# --- the lease of an attempt whose ranks must not run without the head (`restart.on_unreachable_node: fence`) ---
#
# The head sends a time that the node reported before: the lease counts from that time, so that delayed or repeated
# messages cannot make it longer. It is the modification time of an empty file, which can be set on a full disk.

MARGIN_S = 35.0
"""Seconds before the end of the lease by which the ranks have ended, apart from their grace period."""


def since_boot_ns() -> int:
    """Return the clock since boot: it runs on while the machine is suspended, and nobody sets it."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def begin_lease(path: str, at_ns: int) -> None:
    """Let the lease count from `at_ns`; an earlier time than the present one changes nothing. Raises OSError."""
    open(path, "ab").close()
    if at_ns > lease_began_ns(path):
        os.utime(path, ns=(at_ns, at_ns))


def lease_began_ns(path: str) -> int:
    """Return when the lease began, 0: never. Raises OSError when the file cannot be read."""
    at_ns = os.stat(path).st_mtime_ns
    return at_ns if at_ns <= since_boot_ns() else 0  # a new file has the time of day until `begin_lease` has set it


def is_lease_over(began: int, *, fence_s: float, grace_s: float) -> bool:
    """Return whether the ranks must be ended now, so that SIGKILL was sent `fence_s` after the lease began."""
    return since_boot_ns() - began >= (fence_s - grace_s - MARGIN_S) * 1e9
