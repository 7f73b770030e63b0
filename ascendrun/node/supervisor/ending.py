"""The end of an attempt: steps from the first signal to SIGKILL, until no process is left."""

from __future__ import annotations

import signal
import time

from ascendrun.node import procs, stacks, stopping
from ascendrun.node.failpoint import failpoint
from ascendrun.node.op_errors import message

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ascendrun.node.op_errors import Message
    from ascendrun.node.records import Records
    from ascendrun.node.supervisor.processes import Processes

SWEEP_S = 0.02
PATIENT_SWEEP_S = 0.2
CLEAN_CHECKS = 2


class Ending:
    """`stopping_by`: who or what ends the attempt, None: it runs. `is_over`: no process is left but `leftovers`.

    `plan`: {signal, grace_s} of the job.
    """

    def __init__(self, plan: dict[str, Any], processes: Processes, records: Records) -> None:
        self._plan, self._processes, self._records = plan, processes, records
        self._ladder = stopping.Ladder()
        self._killed_s: float | None = None
        self._clean_checks = 0
        self.stopping_by: str | None = None
        self.leftovers: list[dict[str, Any]] = []
        self.is_over = False

    def stop(self, by: str, reason: Message, *, now: bool = False, grace_s: float | None = None) -> None:
        """Set the steps to the end; steps slower than the current ones change nothing."""
        plan = self._plan
        at = time.monotonic()
        grace_s = 0.0 if now else float(plan["grace_s"] if grace_s is None else grace_s)
        steps = (
            stopping.kill_now(at) if now else stopping.steps_for(by, now_s=at, signal=plan["signal"], grace_s=grace_s)
        )
        if not self._ladder.set(steps):
            return
        self.stopping_by = self.stopping_by or by
        fields = {"done": True} if all(rank.check_done() for rank in self._processes.ranks) else {}
        self._records.add("stopping", reason=reason, by=by, signal=steps[0].signal, grace_s=grace_s, **fields)
        failpoint("stop.after_mark")
        self.climb(at)

    def climb(self, now: float) -> None:
        """Send the signals that are due."""
        for step in self._ladder.due(now):
            number = getattr(signal, "SIG" + step.signal)
            if step.signal == "KILL":
                failpoint("stop.before_kill")
                self._killed_s = self._killed_s or now
            if step.signal == "ABRT":
                stacks.abort(self._processes.find())
                continue
            if not step.everything:
                running = [rank for rank in self._processes.ranks if rank.runs]
                for process in running or self._processes.all:  # a launcher would kill ranks that save for long
                    process.send(number)
                continue
            for pid, start in self._processes.find():
                procs.send_signal(pid, start, number)
            failpoint("stop.after_kill_before_confirm" if step.signal == "KILL" else "stop.after_term")

    def is_sweeping(self) -> bool:
        return self._killed_s is not None or not self._processes.has_running()

    def wait_s(self, now: float, until: float) -> float:
        """Return the seconds until the next step or sweep, or `until`, whichever comes first."""
        if self.is_sweeping():
            is_patient = self._killed_s is not None and now - self._killed_s > 1.0
            return PATIENT_SWEEP_S if is_patient else SWEEP_S
        step = self._ladder.next_s()
        return max(0.0, (until if step is None else min(until, step)) - now)

    def sweep(self, now: float) -> None:
        """Check, twice, that no process is left after the ranks' end and KILL: a process may fork during a check."""
        found = self._processes.find()
        if not found and not self._processes.has_running():
            self._clean_checks += 1
            self.is_over = self._clean_checks >= CLEAN_CHECKS
            return
        self._clean_checks = 0
        if self._killed_s is None:
            self._end_remaining(len(found), now)
            return
        for pid, start in found:
            procs.send_signal(pid, start, signal.SIGKILL)
        if now - self._killed_s >= stopping.UNKILLABLE_S:
            self.leftovers = procs.describe_all(found, since_ns=time.time_ns() - int((now - self._killed_s) * 1e9))
            self.is_over = True

    def _end_remaining(self, count: int, now: float) -> None:
        if not self._ladder.set(stopping.steps_for("finished", now_s=now, signal="TERM", grace_s=0.0)):
            return
        if self.stopping_by is None:
            self.stopping_by = "finished"
            self._records.add(
                "stopping",
                reason=message("processes-remain", count=count),
                by="finished",
                signal="TERM",
                grace_s=stopping.REMAINING_GRACE_S,
            )
        self.climb(now)
