"""The processes of an attempt on this node: each rank with its streams, its metrics and its end, and all others."""

from __future__ import annotations

import json
import os
import signal
import time

from ascendrun.node import layout, procs, reap, stacks
from ascendrun.node.failpoint import failpoint
from ascendrun.node.files import read_some
from ascendrun.node.layout import forks_ranks, process_name, process_number
from ascendrun.node.op_errors import message
from ascendrun.node.supervisor.sampler_process import SamplerProcess
from ascendrun.node.supervisor.spool import ROTATE_BYTES, Spool

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from typing import Any

    from ascendrun.node.op_errors import Message
    from ascendrun.node.records import Records


DRAIN_BYTES = 8 << 20
"""Bytes read from a dead rank's pipe before its end is recorded; a grandchild may keep writing."""
DROP_NOTE_S = 10.0
METRICS_STEP_BYTES = 1 << 20
METRICS_VARIABLE = "ASCENDRUN_METRICS_FILE"

EXIT_S = 10.0
"""Seconds that a rank may live after it wrote that it is done."""
LINGER_S = 60.0
"""Seconds after another rank's end until an inactive rank is reported."""
IDLE_CPU_S = 0.1

FINISHED = "finished"
"""It wrote "done": true into its metrics and still runs: it is killed, and its exit counts as 0."""
IDLE = "idle"
"""Another rank exited 0 and this rank has been inactive since: reported, not killed."""


class MetricsTail:
    """Reads new lines of a rank's metrics file and records whether the rank reported its end."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""

    def found_done(self, *, last: bool = False) -> bool:
        """Return whether a line read by this call reports it. An incomplete line is kept for the next call.

        `last`: the rank has exited. Read the end of the file, whatever is unread before it.
        """
        try:
            size = os.stat(self._path).st_size
            if size <= self._offset and not last:
                return False
            with open(self._path, "rb") as file:
                if last and size - self._offset > METRICS_STEP_BYTES:
                    self._offset, self._rest = size - METRICS_STEP_BYTES, b""
                file.seek(self._offset)
                new = file.read(METRICS_STEP_BYTES)
        except OSError:
            return False
        self._offset += len(new)
        lines = (self._rest + new).split(b"\n")
        self._rest = lines[-1] if last else lines.pop()[-METRICS_STEP_BYTES:]
        return any(is_done_line(line) for line in lines)


class Rank:
    """One rank, or the launcher of a node's ranks, with a number below 0. `code` and `signal` are None until it has
    ended; `spools` is by stream, "out" and "err"."""

    def __init__(self, plan: dict[str, Any], folder: str, *, limit: int, watch: ExitWatch, metrics: str) -> None:
        self.number = int(plan["rank"])
        self.stream_number = process_number(self.number) if forks_ranks(plan) else self.number
        """In the names of its output: what a process that starts ranks prints is not a rank's."""
        self.plan = plan
        self.spools = {
            stream: Spool(folder, "%s.%s" % (process_name(self.stream_number), stream), limit=limit)
            for stream in ("out", "err")
        }
        self.watch = watch
        self.metrics = MetricsTail(metrics)
        self.started: subprocess.Popen[bytes] | None = None
        self.status_fd: int | None = None
        self.start_ticks = -1
        self.setup_result = b""
        self.has_ended = False
        self.was_stopped = False
        self.stopped_by_launcher = False
        self.is_done = False
        self.code: int | None = None
        self.signal: int | None = None
        self.killed_as_finished = False
        self._reported_s: float | None = None

    @property
    def is_launcher(self) -> bool:
        return self.number < 0

    @property
    def runs(self) -> bool:
        return self.started is not None and not self.has_ended

    @property
    def result(self) -> int | None:
        """The exit code, a signal as a negative number, or None: never started or end not seen."""
        return self.code if self.signal is None else -self.signal

    def summary(self) -> dict[str, Any]:
        """Return {code, signal, stopped, done}."""
        return {"code": self.code, "signal": self.signal, "stopped": self.was_stopped, "done": self.is_done}

    @property
    def written_bytes(self) -> int:
        return sum(spool.total_bytes for spool in self.spools.values())

    def cpu_s(self) -> float:
        assert self.started is not None
        stat = procs.read_stat(self.started.pid)
        return stat.cpu_ticks / procs.TICKS_PER_S if stat else 0.0

    def check_done(self, *, last: bool = False) -> bool:
        """Return whether the rank's metrics say that its work is complete."""
        self.is_done = self.is_done or self.metrics.found_done(last=last)
        return self.is_done

    def end(self, status: int) -> None:
        """Record the wait status. A rank killed since it had finished counts as exited with 0."""
        assert self.started is not None
        self.has_ended = True
        if os.WIFSIGNALED(status):
            self.signal = os.WTERMSIG(status)
        else:
            self.code = os.WEXITSTATUS(status)
        self.started.returncode = self.result
        if self.killed_as_finished:
            self.code, self.signal = 0, None

    def send(self, signum: int) -> None:
        """Send a signal to the rank's own process only."""
        if self.runs and self.started is not None:
            procs.send_signal(self.started.pid, self.start_ticks, signum)

    def new_holes(self, now_s: float, *, last: bool) -> list[tuple[str, int, int, int]]:
        """Return lost ranges of the logs since the last call: (stream, generation, offset, bytes).

        They are returned at most every DROP_NOTE_S, and by the `last` call.
        """
        if not any(spool.holes for spool in self.spools.values()):
            return []
        if not last and self._reported_s is not None and now_s - self._reported_s < DROP_NOTE_S:
            return []
        self._reported_s = now_s
        found = []
        for stream, spool in self.spools.items():
            holes, spool.holes = spool.holes, []
            found += [(stream, generation, offset, count) for generation, offset, count in holes]
        return found


def drain(fd: int, spool: Spool) -> bool:
    """Move available bytes of the pipe to the spool; True when the stream has ended."""
    moved = 0
    while moved < DRAIN_BYTES:
        chunk = read_some(fd)
        if chunk is None:
            return False
        if not chunk:
            return True
        spool.write(chunk, time.time_ns())
        moved += len(chunk)
    return False


def is_done_line(line: bytes) -> bool:
    """Whether a line of the metrics file reports that the program has finished."""
    if b'"done"' not in line:
        return False
    try:
        record = json.loads(line.decode("utf-8"))
    except ValueError:
        return False
    return isinstance(record, dict) and record.get("done") is True


class ExitWatch:
    """Exit state of one rank. `exit_s`, `linger_s`: the limits, in seconds."""

    def __init__(self, *, exit_s: float = EXIT_S, linger_s: float = LINGER_S) -> None:
        self.limits_s = {FINISHED: exit_s, IDLE: linger_s}
        self._done_s: float | None = None
        self._idle_s: float | None = None
        self._idle_cpu_s = 0.0
        self._idle_bytes = 0
        self._last_report: str | None = None

    def see_done(self, now_s: float) -> None:
        if self._done_s is None:
            self._done_s = now_s

    def check(self, now_s: float, *, cpu_s: float, written_bytes: int, other_exited_s: float | None) -> str | None:
        """Return FINISHED or IDLE, each once; None: nothing to report. `other_exited_s`: first exit 0 of another."""
        if self._done_s is not None and now_s - self._done_s >= self.limits_s[FINISHED]:
            return self._report(FINISHED)
        if other_exited_s is None:
            return None
        moved = cpu_s - self._idle_cpu_s >= IDLE_CPU_S or written_bytes != self._idle_bytes
        if self._idle_s is None or moved:
            self._idle_s, self._idle_cpu_s, self._idle_bytes = now_s, cpu_s, written_bytes
        if now_s - self._idle_s >= self.limits_s[IDLE] and self._last_report is None:
            return self._report(IDLE)
        return None

    def _report(self, why: str) -> str | None:
        if self._last_report == why:
            return None
        self._last_report = why
        return why


class Processes:
    """`ranks`: those of this node; `launcher`: the process that starts them, with a number below 0, None: none does.

    `path`, `streams`: see Folder. `group`: their cgroup, None: they have none.
    """

    def __init__(self, prepared: dict[str, Any], path: str, streams: str, group: str | None) -> None:
        self._prepared, self._streams, self.group = prepared, streams, group
        self.tag = str(prepared["tag"])
        self.root = layout.root_of(path)
        self.sampler = SamplerProcess(self.tag, path)
        limits = {name: float(prepared[name]) for name in ("exit_s", "linger_s") if name in prepared}
        self.ranks = [
            self._make(plan, {**self.own_files(int(plan["rank"])), **plan["env"]}[METRICS_VARIABLE], **limits)
            for plan in prepared["ranks"]
        ]
        self.all = list(self.ranks)
        self.launcher: Rank | None = None
        if prepared.get("launcher"):
            number = layout.process_number(int(prepared["node_rank"]))
            self.launcher = self._make(dict(prepared["launcher"], rank=number, local_rank=0), "")
            self.all.insert(0, self.launcher)

    def has_running(self) -> bool:
        return any(process.runs for process in self.all)

    def find(self) -> list[reap.Who]:
        """Return (pid, start time) of every living process of the attempt but supervisor and sampler."""
        leaders = {one.started.pid: one.start_ticks for one in self.all if one.started is not None}
        return reap.find_marked(
            reap.marks_of(self.tag, self.root),
            supervisor=os.getpid(),
            ranks=leaders,
            extra=reap.group_pids(self.group),
            aside=reap.SAMPLER if self.sampler.is_on else None,
        )

    def own_files(self, number: int) -> dict[str, str]:
        """Return the variables that name a rank's own files."""
        stem = os.path.join(self._streams, layout.process_name(number))
        return {METRICS_VARIABLE: stem + ".metrics.0", "TORCHELASTIC_ERROR_FILE": stem + ".error.0"}

    def _make(self, plan: dict[str, Any], metrics: str, *, exit_s: float = EXIT_S, linger_s: float = LINGER_S) -> Rank:
        limit = int(self._prepared.get("rotate_bytes", ROTATE_BYTES))
        watch = ExitWatch(exit_s=exit_s, linger_s=linger_s)
        return Rank(plan, self._streams, limit=limit, watch=watch, metrics=metrics)


SWEEP_S = 0.02
PATIENT_SWEEP_S = 0.2
CLEAN_CHECKS = 2


class Ending:
    """`stopping_by`: who or what ends the attempt, None: it runs. `is_over`: no process is left but `leftovers`.

    `plan`: {signal, grace_s} of the job.
    """

    def __init__(self, plan: dict[str, Any], processes: Processes, records: Records) -> None:
        self._plan, self._processes, self._records = plan, processes, records
        self._ladder = reap.Ladder()
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
        steps = reap.steps_for(by, now_s=at, signal=plan["signal"], grace_s=grace_s)
        if now:
            steps = [reap.Step(at, "KILL", True)]
        if not self._ladder.set(steps):
            return
        self.stopping_by = self.stopping_by or by
        ranks = self._processes.ranks
        fields = {"done": True} if ranks and all(rank.check_done() for rank in ranks) else {}
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
        if now - self._killed_s >= reap.UNKILLABLE_S:
            self.leftovers = procs.describe_all(found, since_ns=time.time_ns() - int((now - self._killed_s) * 1e9))
            self.is_over = True

    def _end_remaining(self, count: int, now: float) -> None:
        if not self._ladder.set(reap.steps_for("finished", now_s=now, signal="TERM", grace_s=0.0)):
            return
        if self.stopping_by is None:
            self.stopping_by = "finished"
            self._records.add(
                "stopping",
                reason=message("processes-remain", count=count),
                by="finished",
                signal="TERM",
                grace_s=reap.REMAINING_GRACE_S,
            )
        self.climb(now)
