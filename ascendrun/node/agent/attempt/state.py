"""State of an attempt on this node, by the files of its directory and its processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time

from ascendrun.node import layout, procs, reap
from ascendrun.node.agent.follow import file_sizes
from ascendrun.node.files import claim_json, exists, make_private_dir, read_claim, read_json, write_json
from ascendrun.node.layout import ENDED, IDENTITY, JOB, LOST, PREPARED, ROLL
from ascendrun.node.op_errors import OperationError, os_failure
from ascendrun.node.records import EVENTS, Records, read_events

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator


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


def listing(root: str) -> dict[str, Any]:
    found = []
    for run in layout.runs_of(root):
        for attempt in layout.attempts_of(root, run):
            tag = layout.make_tag(run, attempt)
            now = phase(root, tag)
            if now is not None:
                identity = read_claim(os.path.join(layout.attempt_dir(root, tag), IDENTITY)) or {}
                found.append(
                    {
                        "tag": tag,
                        "phase": now,
                        "supervisor_pid": identity.get("pid"),
                        "boot_id": identity.get("boot_id"),
                    }
                )
    return {"attempts": found}


def note_lost(root: str, tag: str) -> bool:
    """Write `supervisor_lost`, once, when the supervisor is gone and the attempt has not ended."""
    folder = layout.attempt_dir(root, tag)
    identity = read_claim(os.path.join(folder, IDENTITY)) or {}
    if "pid" not in identity or phase(root, tag) != "lost":
        return False
    reason = "node-rebooted" if identity.get("boot_id") != procs.boot_id() else "supervisor-killed"
    if not claim_json(os.path.join(folder, LOST), {"at_ns": time.time_ns(), "reason": reason}):
        return False
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
    return reap.find_attempt(
        tag,
        root=root,
        supervisor=supervisor,
        has_sampler=bool(supervisor),
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
