"""End of an attempt: a request that its supervisor obeys, or its work where the supervisor is gone or hangs."""

from __future__ import annotations

import errno
import os
import signal
import time

from ascendrun.node import layout, procs, reap
from ascendrun.node.agent.attempt import state as attempt_state
from ascendrun.node.agent.attempt.state import locked
from ascendrun.node.failpoint import failpoint
from ascendrun.node.files import claim_json, exists, make_private_dir, read_claim, remove_tree, write_json
from ascendrun.node.layout import IDENTITY, STOP
from ascendrun.node.op_errors import os_failure
from ascendrun.node.records import free_reserve, read_events, write_end
from ascendrun.node.stopping import UNKILLABLE_S

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

OBEY_S = 5.0
"""Seconds that a supervisor may take to read a request to stop immediately, before the agent kills it and takes over
its work."""


def stop(root: str, request: dict[str, Any]) -> dict[str, Any]:
    """Request the end; the event `ended` confirms it. Also for attempts that are unknown here: they can never start
    after this."""
    tag = str(request["tag"])
    folder = layout.attempt_dir(root, tag)
    order = {
        "now": bool(request.get("now")),
        "hung": bool(request.get("hung")),
        "grace_s": request.get("grace_s"),
        "reason": request.get("reason"),
        "at_ns": time.time_ns(),
    }
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
        _see_to_stop(root, tag, folder, request)
    except OSError as error:
        raise os_failure(error, "stop-attempt", attempt=tag, path=root) from error
    return {}


def _see_to_stop(root: str, tag: str, folder: str, request: dict[str, Any]) -> None:
    """Point the supervisor to the recorded request, or do its work if it is gone or does not obey."""
    known = request.get("events") or {}
    identity = read_claim(os.path.join(folder, IDENTITY)) or {}
    if "pid" in identity and procs.is_alive(identity):
        procs.send_signal(identity["pid"], identity["start"], signal.SIGUSR1)
        if request.get("now") and not _is_obeyed(root, tag, folder):
            procs.send_signal(identity["pid"], identity["start"], signal.SIGKILL)
            attempt_state.wait_gone(identity)
            _end_without_supervisor(root, tag, folder, identity, known)
    elif attempt_state.phase(root, tag) != "ended" or attempt_state.find(root, tag, identity):
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
        end_everything(lambda: reap.find_attempt(tag, root=root, supervisor=found["pid"], has_sampler=True))
    return True


def _record_stop(root: str, tag: str, folder: str, order: dict[str, Any]) -> None:
    with locked(root, tag) as (fence, attempt):
        fence.raise_to(attempt, stopped=True)
        make_private_dir(folder)
        write_json(os.path.join(folder, STOP), order)
        failpoint("stop.after_wish")
        claim_json(os.path.join(folder, IDENTITY), {"stopped": True})


def _is_obeyed(root: str, tag: str, folder: str) -> bool:
    """Return whether the supervisor took the request within OBEY_S; it may hang (dead disk, debugger) or die."""
    deadline = time.monotonic() + OBEY_S
    while exists(os.path.join(folder, STOP)) and attempt_state.phase(root, tag) == "running":
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return attempt_state.phase(root, tag) != "lost"


def _end_without_supervisor(root: str, tag: str, folder: str, identity: dict[str, Any], known: dict[str, int]) -> None:
    """Kill the remaining processes of an attempt without a supervisor and write its end. `known`: see Records."""
    if "pid" in identity:
        attempt_state.note_lost(root, tag)
    group = identity.get("cgroup")
    leftovers = end_everything(lambda: attempt_state.find(root, tag, identity))
    reap.remove_group(group)
    with locked(root, tag):
        if attempt_state.phase(root, tag) == "ended":
            remove_tree(layout.live_mark(folder))
            return
        records = attempt_state.open_records(folder, known=known)
        free_reserve(layout.streams_dir(folder))
        try:
            write_end(folder, records, leftovers=leftovers, codes=exit_codes(folder))
        except OSError as error:
            raise os_failure(error, "record-end", attempt=tag) from error
        finally:
            records.close()


def end_everything(find: Callable[[], list[Any]]) -> list[dict[str, Any]]:
    """Send KILL until two checks find nothing; return the processes that survive it (blocked in the kernel)."""
    deadline = time.monotonic() + UNKILLABLE_S
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
