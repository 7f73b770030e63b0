"""Search for every process of an attempt, including detached processes, and for no process of others.

Four traces, each sufficient: the attempt's tag in the environment, descent from the supervisor or from a found process
(the supervisor is a subreaper: a double-forked process becomes its child), the session of a rank that leads it, and the
roll of processes that the supervisor saw. A control
group, where there is one, is a fifth. A name or a command line is not a trace.
"""

from __future__ import annotations

import contextlib
import os

from ascendrun.node import layout, procs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterable, Mapping, Tuple

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
