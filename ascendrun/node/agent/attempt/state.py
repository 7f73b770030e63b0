"""State of an attempt on this node, by the files of its directory and its processes; its fence; and its end.

The end is a request that the supervisor obeys, or the agent's work where the supervisor is gone or hangs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import time

from ascendrun.node import layout, procs, reap
from ascendrun.node.agent.follow import file_sizes
from ascendrun.node.failpoint import failpoint
from ascendrun.node.files import claim_json, exists, make_private_dir, read_claim, read_json, remove_tree, write_json
from ascendrun.node.layout import ENDED, IDENTITY, JOB, LOST, PREPARED, ROLL, STOP
from ascendrun.node.op_errors import OperationError, os_failure
from ascendrun.node.records import EVENTS, Records, free_reserve, read_events, write_end

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterator


NOTICE_S = 5.0
"""Seconds that a supervisor may take to exit after it has written the end."""


def phase(root: str, tag: str) -> str | None:
    """Return prepared, running, ended or lost; None: no such attempt here."""
    folder = layout.attempt_dir(root, tag)
    identity = read_claim(os.path.join(folder, IDENTITY))
    if exists(os.path.join(folder, ENDED)):
        return "ended"
    if identity is None:
        return "prepared" if exists(os.path.join(folder, PREPARED)) else None
    if procs.is_alive(identity):
        return "running"
    return "ended" if ended_in_events(folder) else "lost"


def note_lost(root: str, tag: str) -> bool:
    """Write `supervisor_lost`, once, when the supervisor is gone and the attempt has not ended."""
    folder = layout.attempt_dir(root, tag)
    identity = read_claim(os.path.join(folder, IDENTITY)) or {}
    if "pid" not in identity or phase(root, tag) != "lost":
        return False
    reason = "node-rebooted" if identity.get("boot_id") != procs.boot_id() else "supervisor-killed"
    if not claim_json(os.path.join(folder, LOST), {"at_ns": time.time_ns(), "reason": reason}):
        return False
    if reason == "node-rebooted":
        with contextlib.suppress(OSError):
            remove_tree(layout.short_dir(folder))
    records = open_records(folder)
    records.add("supervisor_lost", pid=identity["pid"], reason=reason)
    records.close()
    return True


def job_copy(root: str, tag: str) -> dict[str, Any] | None:
    """Return the copy of the attempt's job, None: it came without one."""
    return read_json(os.path.join(layout.attempt_dir(root, tag), JOB))


def processes(root: str, tag: str) -> dict[str, Any]:
    """Return the living processes of the attempt without its supervisor and sampler, whether the former lives, and
    the size of its records by generation.

    A supervisor that has recorded the end gets time to exit. The records are measured last: of an attempt without
    processes they have their final size. Raises OperationError when the folder of the attempt cannot be read: then
    nothing is known.
    """
    folder = layout.attempt_dir(root, tag)
    try:
        identity = read_claim(os.path.join(folder, IDENTITY)) or {}
        found = find(root, tag, identity)
        now = phase(root, tag)
        if now == "ended" and not found:
            wait_gone(identity)
            remove_container(root, tag)  # the command that should have done it may have been killed
        has_supervisor = "pid" in identity and procs.is_alive(identity)
        events = file_sizes(root, tag).get(EVENTS, {})
    except OSError as error:
        raise os_failure(error, "list-processes", attempt=tag, path=folder) from error
    return {"processes": procs.describe_all(found), "supervisor": has_supervisor, "phase": now, "events": events}


def rank_processes(root: str, tag: str) -> tuple[list[reap.Who], dict[int, int], str]:
    """Return the processes of an attempt, the ranks of those that the supervisor started, and its directory."""
    from ascendrun.node.stacks import has_own_rank

    folder = layout.attempt_dir(root, tag)
    prepared = read_json(os.path.join(folder, PREPARED)) or {"ranks": []}
    streams = layout.streams_dir(folder)
    found = find(root, tag, read_claim(os.path.join(folder, IDENTITY)) or {})
    forks = {int(plan["rank"]) for plan in prepared["ranks"] if layout.forks_ranks(plan)}
    ranks = {int(plan["rank"]) for plan in prepared["ranks"]} - (forks if has_own_rank(found) else set())
    started = [event for event in read_events(streams) if event.get("event") == "rank_started"]
    leaders = {int(event["pid"]): int(event["rank"]) for event in started if int(event["rank"]) in ranks}
    return found, leaders, streams


def find(root: str, tag: str, identity: dict[str, Any]) -> list[reap.Who]:
    """Return (pid, start time) of the attempt's processes. `identity`: of its supervisor, {} if it has none.

    The sampler counts only when it has lost its supervisor, which would end it.
    """
    streams = layout.streams_dir(layout.attempt_dir(root, tag))
    roll = read_claim(os.path.join(streams, ROLL)) or {}
    is_same_boot = identity.get("boot_id") == procs.boot_id()
    started = [event for event in read_events(streams) if event.get("event") == "rank_started"]
    supervisor = identity["pid"] if "pid" in identity and procs.is_alive(identity) else 0
    return reap.find_marked(
        reap.marks_of(tag, root),
        supervisor=supervisor,
        aside=reap.SAMPLER if supervisor else None,
        ranks={event["pid"]: event.get("start") or -1 for event in started} if is_same_boot else {},
        seen=dict(roll["seen"]) if roll.get("boot_id") == procs.boot_id() else {},
        extra=reap.group_pids(identity.get("cgroup")),
    )


def wait_gone(identity: dict[str, Any]) -> None:
    deadline = time.monotonic() + NOTICE_S
    while procs.is_alive(identity) and time.monotonic() < deadline:
        time.sleep(0.01)


def ended_in_events(folder: str) -> bool:
    return any(event.get("event") == "ended" for event in read_events(layout.streams_dir(folder)))


def open_records(folder: str, *, known: dict[str, int] | None = None) -> Records:
    """Open an attempt's records, also where others removed their folder. Raises OSError, OperationError."""
    streams = layout.streams_dir(folder)
    make_private_dir(streams)
    return Records(streams, known=known)


class Fence:
    """One run's fence. Use within `locked()`."""

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, "fence.json")
        found = read_claim(self._path) or {}
        self.attempt = int(found.get("attempt", 0))
        self.is_stopped = bool(found.get("stopped", False))

    def check(self, attempt: int) -> None:
        """Raise OperationError("attempt-stale") for an attempt that must not start any more."""
        if attempt < self.attempt:
            raise OperationError("attempt-stale", "attempt-older", attempt=attempt, newest=self.attempt)
        if attempt == self.attempt and self.is_stopped:
            raise OperationError("attempt-stale", "attempt-stopped", attempt=attempt)

    def raise_to(self, attempt: int, *, stopped: bool) -> None:
        """Raise the fence; never lower it. Raises OSError."""
        if attempt < self.attempt or (attempt == self.attempt and (self.is_stopped or not stopped)):
            return
        write_json(self._path, {"attempt": attempt, "stopped": stopped})
        self.attempt, self.is_stopped = attempt, stopped


@contextlib.contextmanager
def locked(root: str, tag: str) -> Iterator[tuple[Fence, int]]:
    """Return (the run's fence, the tag's attempt number), with other agents of this user locked out.

    Makes the run's directory. Raises ValueError on an invalid tag, OperationError, OSError.
    """
    run, attempt = layout.split_tag(tag)
    folder = layout.run_dir(root, run)
    make_private_dir(folder)
    fd = os.open(os.path.join(folder, "lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):  # no locks on this file system: the claims of files.py still apply
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield Fence(folder), attempt
    finally:
        os.close(fd)


OBEY_S = 5.0
"""Seconds that a supervisor may take to read a request to stop immediately, or one that it did not read for its grace
period, before the agent kills it and takes over its work."""


def stop(root: str, request: dict[str, Any]) -> dict[str, Any]:
    """Request the end; the event `ended` confirms it. Also for attempts that are unknown here: they can never start
    after this."""
    tag = str(request["tag"])
    folder = layout.attempt_dir(root, tag)
    order: dict[str, Any] = {
        "now": bool(request.get("now")),
        "hung": bool(request.get("hung")),
        "grace_s": request.get("grace_s"),
        "why": request.get("why"),
        "by": request.get("by"),
        "at_ns": time.time_ns(),
        "first_ns": reap.since_boot_ns(),
    }
    _continue_supervisor(folder)
    try:
        try:
            _record_stop(root, tag, folder, order)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not free_reserve(layout.streams_dir(folder)):
                raise
            _record_stop(root, tag, folder, order)
    except OSError as error:
        if not _stop_by_signal(root, tag, folder, now=bool(order["now"])):
            raise os_failure(error, "stop-attempt", attempt=tag, path=root) from error
        return {}
    try:
        _see_to_stop(root, tag, folder, request, first_ns=order["first_ns"])
    except OSError as error:
        raise os_failure(error, "stop-attempt", attempt=tag, path=root) from error
    return {}


def _continue_supervisor(folder: str) -> None:
    """Let a supervisor that was stopped (SIGSTOP) read the request that follows."""
    with contextlib.suppress(OSError):  # recording the request fails, too
        identity = read_claim(os.path.join(folder, IDENTITY)) or {}
        if "pid" in identity:
            procs.send_signal(identity["pid"], identity["start"], signal.SIGCONT)


def _see_to_stop(root: str, tag: str, folder: str, request: dict[str, Any], *, first_ns: int) -> None:
    """Point the supervisor to the recorded request, or do its work if it is gone or does not obey.

    `first_ns`: clock since boot at the first of the requests that it has not read.
    """
    known = request.get("events") or {}
    waited_s = (reap.since_boot_ns() - first_ns) / 1e9
    must_obey = request.get("now") or waited_s > float(request.get("grace_s") or 0) + OBEY_S
    identity = read_claim(os.path.join(folder, IDENTITY)) or {}
    if "pid" in identity and procs.is_alive(identity):
        procs.send_signal(identity["pid"], identity["start"], signal.SIGUSR1)
        if must_obey and not _is_obeyed(root, tag, folder):
            procs.send_signal(identity["pid"], identity["start"], signal.SIGKILL)
            wait_gone(identity)
            _end_without_supervisor(root, tag, folder, identity, known)
    elif phase(root, tag) != "ended" or find(root, tag, identity):
        _end_without_supervisor(root, tag, folder, identity, known)


def _stop_by_signal(root: str, tag: str, folder: str, *, now: bool) -> bool:
    """Stop an attempt whose folder takes no request; False: it has no supervisor. See Supervisor._handle_signals.

    `now`: also kill its processes; the supervisor, which cannot read how, records their ends.
    """
    found = reap.find_supervisor(folder)
    if found is None:
        return False
    for number in (signal.SIGUSR1, signal.SIGTERM):
        procs.send_signal(found["pid"], found["start"], number)
    if now:
        marks = reap.marks_of(tag, root)
        end_everything(lambda: reap.find_marked(marks, supervisor=found["pid"], aside=reap.SAMPLER))
    return True


def _record_stop(root: str, tag: str, folder: str, order: dict[str, Any]) -> None:
    with locked(root, tag) as (fence, attempt):
        fence.raise_to(attempt, stopped=True)
        make_private_dir(folder)
        unread = read_claim(os.path.join(folder, STOP)) or {}
        order["first_ns"] = min(int(unread.get("first_ns", order["first_ns"])), order["first_ns"])
        write_json(os.path.join(folder, STOP), order)
        failpoint("stop.after_wish")
        claim_json(os.path.join(folder, IDENTITY), {"stopped": True})


def _is_obeyed(root: str, tag: str, folder: str) -> bool:
    """Return whether the supervisor took the request within OBEY_S; it may hang (dead disk, debugger) or die."""
    deadline = time.monotonic() + OBEY_S
    while exists(os.path.join(folder, STOP)) and phase(root, tag) == "running":
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return phase(root, tag) != "lost"


def _end_without_supervisor(root: str, tag: str, folder: str, identity: dict[str, Any], known: dict[str, int]) -> None:
    """Kill the remaining processes of an attempt without a supervisor and write its end. `known`: see Records."""
    if "pid" in identity:
        note_lost(root, tag)
    group = identity.get("cgroup")
    leftovers = end_everything(lambda: find(root, tag, identity))
    reap.remove_group(group)
    remove_container(root, tag)
    with locked(root, tag):
        if phase(root, tag) == "ended":
            remove_tree(layout.live_mark(folder))
            return
        records = open_records(folder, known=known)
        free_reserve(layout.streams_dir(folder))
        try:
            write_end(folder, records, leftovers=leftovers, codes=exit_codes(folder))
        except OSError as error:
            raise os_failure(error, "record-end", attempt=tag) from error
        finally:
            records.close()


def container_of(root: str, tag: str) -> dict[str, Any] | None:
    """Return the container of an attempt as it was prepared, None: it has none."""
    box: dict[str, Any] | None = (read_json(os.path.join(layout.attempt_dir(root, tag), PREPARED)) or {}).get(
        "container"
    )
    return box


def remove_container(root: str, tag: str) -> None:
    """Remove what is left of the attempt's container, if it has one."""
    box = container_of(root, tag)
    if box is not None:
        from ascendrun.node.agent import containers

        containers.remove(box, root=root, tag=tag)


def end_everything(find: Callable[[], list[Any]]) -> list[dict[str, Any]]:
    """Send KILL until two checks find nothing; return the processes that survive it (blocked in the kernel)."""
    deadline = time.monotonic() + reap.UNKILLABLE_S
    clean = 0
    found = find()
    while clean < 2 and time.monotonic() < deadline:
        for pid, start in found:
            procs.send_signal(pid, start, signal.SIGKILL)
        clean = 0 if found else clean + 1
        time.sleep(0.02)
        found = find()
    return procs.describe_all(found, since_ns=time.time_ns())


def exit_codes(folder: str) -> dict[str, int | None]:
    """Return the exit codes of the ranks by the events; None: started, end unknown."""
    codes: dict[str, int | None] = {}
    for event in read_events(layout.streams_dir(folder)):
        if event.get("event") == "rank_started":
            codes[str(event["rank"])] = None
        elif event.get("event") == "rank_exited":
            codes[str(event["rank"])] = event.get("code") if event.get("signal") is None else -event["signal"]
    return codes
