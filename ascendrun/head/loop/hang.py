"""Monitor that looks for hung jobs every 15 s: reads in a thread what the nodes sent, asks for stacks, decides."""

from __future__ import annotations

import os
import time
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from ascendrun.core.errors import AscendrunError
from ascendrun.core.events import Event
from ascendrun.core.jobs.draft import can_restart_without, fewest_hosts
from ascendrun.core.jobs.endings import Hung
from ascendrun.core.jobs.job import Job, State
from ascendrun.core.logs.log_lines import process_number
from ascendrun.head.state.state_dir import SPOOL_STACKS, make_spool_dir, spool_dir
from ascendrun.head.waiting import in_background
from ascendrun.node.files import write_json
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.core.jobfile.model import JobSpec
    from ascendrun.core.metrics import MetricsLine
    from ascendrun.core.samples import DeviceSample, Newest, RankSample
    from ascendrun.head.loop.context import Context
    from ascendrun.head.loop.job.runner import JobRunner
    from ascendrun.head.spool.metrics_reader import MetricsTail
    from ascendrun.health.hang import HangWatch, Look, RankLook, Verdict, Windows
    from ascendrun.health.stacks import RankStack

# Modules for a look are imported by the first look, in its thread: the controller has jobs to start.

DIVISOR_VARIABLE = "ASCENDRUN_HANG_DIVISOR"
"""Environment of the controller, for tests: every window is divided by it (docs/hangs.md)."""
LOOK_S = 15.0
RESTS = 30.0
"""The pause after a look, in CPU times of the look."""
FRESH_S, FRESH_SAMPLES = 30.0, 3.0
"""A sample is recent if it is younger, or than this many intervals of the sampling."""
STACKS_S = 25.0
GAPS = 64
WORLD_S = 3600.0
"""Seconds after the start in which the world size is looked for in the output."""
CUT_FACTOR = 24.0
"""How much longer silent hosts are waited for while no host responds: the network of this machine may be down."""
ALONE_S = 60.0
"""Seconds without a connection between ranks after which steps are those of separate trainings: a group is formed
before its first step, and nodes look for connections more often. With equal losses on all ranks, few looks are enough:
ranks that train together have different samples, or add up their losses over connections."""
EQUAL_STEPS = 3
REPORTED, RESOLVED = "hang", "hang-resolved"


class JobReader:
    """What the metrics, logs and samples of one attempt say. Use from one thread at a time."""

    def __init__(self, state_dir: Path, job: Job) -> None:
        from ascendrun.head.spool.metrics_reader import MetricsTail

        self._state_dir, self._dir = state_dir, spool_dir(state_dir, job.id, job.attempt)
        self._tail: MetricsTail = MetricsTail(self._dir)
        self._steps: dict[int, int] = {}
        self._reported: dict[int, int] = {}
        self._phases: dict[int, frozenset[str]] = {}
        self._written_s: dict[int, float] = {}
        self._ended: set[int] = set()
        self._gaps_s: deque[float] = deque(maxlen=GAPS)
        self._has_phases = False
        self._losses: dict[int, tuple[array[float], array[float]]] = {}
        """Newest steps of each rank, and their losses; a dictionary would take five times the memory."""
        self._stated: tuple[int, int] | None = None
        self.world: tuple[str, int] | None = None
        """Host of a rank, and the world size that its framework prints or records; None: none yet."""

    def look(self, job: Job, base: Look, newest: Newest, *, since_s: float) -> Look:
        """Return the look at the job, whose `base` has what the controller knows. `newest`: samples of all hosts;
        `since_s`: UTC, the time of the oldest that counts."""
        from ascendrun.head.spool.output_progress import read_world_size
        from ascendrun.health.hang import DeviceLook, RankLook

        if self.world is None and base.age_s <= WORLD_S and job.rank_count > 1:
            self.world = read_world_size(self._dir)
        for rank, lines in self._tail.new_lines():
            self._reported[rank] = self._reported.get(rank, 0) + len(lines)
            for line in lines:
                self._note(rank, line)
        if self.world is None and self._stated is not None:
            first, size = self._stated
            self.world = next(((node.host, size) for node in job.nodes if first in node.ranks), None)
        samples, devices, network = self._find_samples(job, base.device_type, newest, since_s)
        output = self._output_bytes() if not self._reported else {}
        ranks: dict[int, RankLook] = {}
        for node in job.nodes:
            for rank in node.ranks:
                sample = samples.get(rank)
                ranks[rank] = RankLook(
                    node.host,
                    self._steps.get(rank),
                    self._reported.get(rank, 0),
                    output.get(rank, 0),
                    self._phases.get(rank, frozenset()),
                    has_ended=rank in self._ended or rank in node.exits,
                    cpu=None if sample is None else sample.cpu,
                    state=None if sample is None else sample.state,
                    writes_bytes_s=None if sample is None else sample.write_bytes_s,
                )
        return replace(
            base,
            at_s=time.monotonic(),
            ranks=ranks,
            interval_s=median(self._gaps_s) if self._gaps_s else None,
            tells_phases=self._has_phases or base.tells_phases,
            devices={
                key: DeviceLook(one.utilisation, one.memory_used_bytes, one.power_w) for key, one in devices.items()
            },
            network_bytes_s=network,
        )

    def trains(self, pattern: str | None) -> bool:
        """Return whether a rank has reported a step, in its metrics or output."""
        from ascendrun.head.spool.output_progress import newest_of_outputs

        return bool(self._steps) or newest_of_outputs(self._dir, pattern=pattern) is not None

    def has_equal_losses(self, pattern: str | None) -> bool:
        """Return whether all ranks that report losses, or the first and the last that print them, have the same, which
        change from step to step."""
        from ascendrun.head.spool.output_progress import TAIL_BYTES, find_outputs, read_rows

        losses: Mapping[int, Mapping[float, float]] = {rank: dict(zip(*each)) for rank, each in self._losses.items()}
        if len(losses) < 2:
            printed = {
                rank: read_rows(paths, pattern=pattern, last_bytes=TAIL_BYTES[0])
                for rank, paths in find_outputs(self._dir).items()
            }
            losses = {
                rank: {row["step"]: row["loss"] for row in rows if row.get("step") and "loss" in row}
                for rank, rows in printed.items()
            }
        common = set.intersection(*map(set, losses.values())) if len(losses) > 1 else ()
        found = [{each[step] for each in losses.values()} for step in common]
        is_equal = len(found) >= EQUAL_STEPS and all(len(each) == 1 for each in found)
        return is_equal and len(set.union(*found)) > 1

    def _note(self, rank: int, line: MetricsLine) -> None:
        if line.event == "phase" and line.phase is not None:
            self._has_phases = True
            before = self._phases.get(rank, frozenset())
            self._phases[rank] = before | {line.phase} if line.begins else before - {line.phase}
        elif line.event == "end":
            self._ended.add(rank)
        elif line.event == "start" and line.world_size:
            self._stated = rank, line.world_size
        elif line.event is None and line.step is not None:
            if line.loss is not None:
                steps, losses = self._losses.setdefault(rank, (array("d"), array("d")))
                steps.append(line.step)
                losses.append(line.loss)
                if len(steps) > GAPS:
                    del steps[0], losses[0]
            self._steps[rank] = max(line.step, self._steps.get(rank, 0))
            if line.at_s is not None:
                if rank in self._written_s and line.at_s > self._written_s[rank]:
                    self._gaps_s.append(line.at_s - self._written_s[rank])
                self._written_s[rank] = line.at_s

    @staticmethod
    def _find_samples(
        job: Job, device_type: str, newest: Newest, since_s: float
    ) -> tuple[dict[int, RankSample], dict[tuple[str, int], DeviceSample], float | None]:
        hosts = frozenset(job.hosts)
        ranks = {
            one.rank: one
            for one in newest.ranks
            if (one.job, one.attempt) == (job.id, job.attempt) and one.at_s >= since_s
        }
        own = {(one.host, one.device) for one in ranks.values() if one.device is not None}
        devices = {
            (one.host, one.device): one
            for one in (newest.devices if device_type != "cpu" else ())
            if (one.host, one.device) in own and one.at_s >= since_s
        }
        network = [
            one.net_rx_bytes_s + one.net_tx_bytes_s
            for one in newest.hosts
            if one.host in hosts
            and one.at_s >= since_s
            and one.net_rx_bytes_s is not None
            and one.net_tx_bytes_s is not None
        ]
        return ranks, devices, sum(network) if len(network) == len(hosts) else None

    def _output_bytes(self) -> dict[int, int]:
        from ascendrun.head.spool.spool_files import STREAM_FILE, find_files, size_of

        found: dict[int, int] = {}
        for path, match in find_files(self._dir, STREAM_FILE):
            number = process_number(match["process"])
            found[number] = found.get(number, 0) + size_of(path)
        if any(number >= 0 for number in found):
            return found
        return {-1 - number: size for number, size in found.items()}  # of processes that start the ranks of their nodes


def read_newest(state_dir: Path, *, since_s: float) -> Newest:
    """Return the newest samples of all hosts since then; samples that cannot be read count as none."""
    from ascendrun.core.samples import Newest
    from ascendrun.head.state.sample_store import SampleStore

    try:
        with SampleStore.open_for_reading(state_dir) as store:
            return store.newest(since_s=since_s)
    except AscendrunError:
        return Newest()


class _Watched:
    """One attempt: its reader, its watch, the question for stacks in progress, and whether its hang was reported."""

    def __init__(self, state_dir: Path, job: Job, windows: Windows, *, is_reported: bool) -> None:
        from ascendrun.health.hang import HangWatch

        self.attempt = job.attempt
        self.reader = JobReader(state_dir, job)
        self.watch: HangWatch = HangWatch(windows)
        self.windows = windows
        self.look: Look | None = None
        self.is_asking = False
        self.is_reported = is_reported
        self.quiet_s = 0.0
        self.equal_looks = 0


class HangMonitor:
    """Hang monitor of the controller's thread; a look reads in its own thread, one at a time."""

    def __init__(self, context: Context) -> None:
        self._state_dir, self._post, self._steps = context.state_dir, context.post, context.steps
        self._links = context.links
        self._divisor = float(os.environ.get(DIVISOR_VARIABLE) or 1.0)
        self._watched: dict[str, _Watched] = {}
        self._runners: dict[str, JobRunner] = {}
        self._due = time.monotonic() + LOOK_S / self._divisor
        self._is_looking = False
        self._took_s = 0.0

    def tick(self, runners: Iterable[JobRunner]) -> None:
        """Call periodically with all jobs of the controller."""
        if self._is_looking or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + max(LOOK_S / self._divisor, RESTS * self._took_s)
        self._runners = {runner.job.id: runner for runner in runners if runner.job.state is State.RUNNING}
        self._watched = {job_id: one for job_id, one in self._watched.items() if job_id in self._runners}
        if not self._runners:
            return
        questions = [(runner.job, self._base(runner), runner.spec) for runner in self._runners.values()]
        self._is_looking = True
        in_background(partial(self._look, questions), "hangs")

    def _base(self, runner: JobRunner) -> Look:
        """Return what a look needs of the controller's thread."""
        from ascendrun.health.hang import Look, Windows

        job, spec = runner.job, runner.spec
        watched = self._watched.get(job.id)
        if watched is None or watched.attempt != job.attempt:
            windows = Windows(spec.timeouts.hang_s, spec.timeouts.first_step_s, self._divisor)
            codes = [event.code for event in self._steps.events_of(job.id) if event.attempt == job.attempt]
            told = [code for code in codes if code in (REPORTED, RESOLVED)][-1:] == [REPORTED]
            self._watched[job.id] = _Watched(self._state_dir, job, windows, is_reported=told)
        links = [(node.host, runner.link(node.host)) for node in job.nodes if node.may_run_processes]
        silent = tuple(host for host, link in links if link.liveness() == "UNREACHABLE")
        return Look(
            0.0,
            time.time() - (job.started_at_s or time.time()),
            {},
            spec.devices.type,
            frozenset(silent),
            tells_phases=spec.program is not None,
            is_blind=runner.copies.limits.pause is not None,
            may_restart=can_restart_without(replace(job, unconfirmed=silent), silent, frozenset(silent)),
        )

    def _look(self, questions: Sequence[tuple[Job, Look, JobSpec]]) -> None:
        looks: list[tuple[str, Look, bool]] = []
        now_s = time.time()
        since_s = {job.id: now_s - max(FRESH_S, FRESH_SAMPLES * spec.sampling.interval_s) for job, _, spec in questions}
        try:
            newest = read_newest(self._state_dir, since_s=min(since_s.values()))
            for job, base, spec in questions:
                watched = self._watched.get(job.id)
                if watched is not None:
                    look = watched.reader.look(job, base, newest, since_s=since_s[job.id])
                    looks.append((job.id, look, self._is_apart(watched, job, spec)))
        finally:
            took_s = time.thread_time()
            self._post(partial(self._take, looks, took_s))

    def _take(self, looks: Sequence[tuple[str, Look, bool]], took_s: float) -> None:
        self._is_looking, self._took_s = False, took_s
        for job_id, look, is_apart in looks:
            watched, runner = self._watched.get(job_id), self._runners.get(job_id)
            if watched is None or runner is None or runner.job.attempt != watched.attempt:
                continue
            watched.look = look
            world = watched.reader.world
            if world is not None and world[1] < runner.job.rank_count:
                self._steps.note_separate(job_id, watched.attempt, *world)
            alone_on = self._steps.alone_on(job_id, watched.attempt, for_s=0.0)
            if alone_on is not None and is_apart:
                self._steps.note_separate(job_id, watched.attempt, alone_on, 1)
            self._judge(runner, watched, look)

    def _is_apart(self, watched: _Watched, job: Job, spec: JobSpec) -> bool:
        """Return whether rank 0 is connected to no other, and has steps of a separate training. Reads its output."""
        if self._steps.alone_on(job.id, watched.attempt, for_s=0.0) is None:
            return False
        pattern = spec.progress.pattern
        watched.equal_looks = watched.equal_looks + 1 if watched.reader.has_equal_losses(pattern) else 0
        is_long = self._steps.alone_on(job.id, watched.attempt, for_s=ALONE_S) is not None
        looks = 1 + spec.sampling.interval_s / LOOK_S  # with a sample between the first and the last
        return watched.equal_looks > looks or (is_long and watched.reader.trains(pattern))

    def _judge(self, runner: JobRunner, watched: _Watched, look: Look) -> None:
        job = runner.job
        verdict = watched.watch.observe(look)
        if job.state is not State.RUNNING:
            return
        self._end_without_hosts(runner, look, look.at_s - watched.watch.silent_since_s)
        if runner.job.state is not State.RUNNING:
            return
        now_s = time.time()
        if verdict is None:
            if watched.is_reported:
                values = {"quiet_s": round(watched.quiet_s)}
                self._steps.record(job.id, [Event(RESOLVED, values, attempt=job.attempt, at_s=now_s)])
                watched.is_reported = False
            return
        watched.quiet_s = verdict.quiet_s
        if verdict.wants_stacks and not watched.is_asking:
            self._ask(runner, watched)
        if verdict.is_hung and not watched.is_reported:
            self._steps.record(job.id, [make_event(verdict, job, watched.windows, now_s=now_s)])
            watched.is_reported = True
        if verdict.acts and job.policy.max_restarts > 0:
            hung = Hung(verdict.hosts, verdict.ranks, verdict.finding(), is_unreachable=verdict.is_unreachable)
            self._steps.feed(job.id, hung)

    def _end_without_hosts(self, runner: JobRunner, look: Look, silent_s: float) -> None:
        """Stop a job whose hosts have been silent for its limit: nothing else ends it."""
        limit_s = self._silence_limit_s(runner, look)
        is_due = limit_s is not None and silent_s * self._divisor > limit_s
        if is_due and (runner.job.policy.max_restarts <= 0 or self._has_others(runner, look)):
            what = "{hosts:hosts} does not respond for {quiet_s:duration}, and no rank elsewhere makes progress"
            hosts = tuple(sorted(look.unreachable))
            finding = Text("hang.silent", what, hosts=hosts, quiet_s=float(round(silent_s)))
            self._steps.feed(runner.job.id, Hung(hosts, (), finding, is_unreachable=True))

    def _silence_limit_s(self, runner: JobRunner, look: Look) -> float | None:
        """Return for how long hosts may be silent while no rank elsewhere makes progress; None: for ever.

        A job with restarts has a limit while none of its hosts responds, if it can start without them. As long as one
        responds, its ranks show whether they wait.
        """
        job, timeouts = runner.job, runner.spec.timeouts
        if job.policy.max_restarts > 0:
            is_alone = all(node.host in look.unreachable for node in job.nodes if node.may_run_processes)
            return timeouts.hang_s if is_alone and look.may_restart else None
        is_head_cut = not any(link.is_up for link in self._links)
        return timeouts.unreachable_s and timeouts.unreachable_s * (CUT_FACTOR if is_head_cut else 1)

    def _has_others(self, runner: JobRunner, look: Look) -> bool:
        """Return whether enough other hosts of a job respond to start it there: else this machine may be cut off."""
        others = [host.name for host in runner.hosts if host.name not in look.unreachable]
        return sum(runner.link(name).is_up for name in others) >= fewest_hosts(runner.job)

    # Stacks

    def _ask(self, runner: JobRunner, watched: _Watched) -> None:
        """Ask every connected host for the stacks of its ranks; the watch takes them when all have replied."""
        from ascendrun.head.protocol.agent_messages import Stacks, StacksReply
        from ascendrun.head.protocol.remote import Reply
        from ascendrun.health.stacks import Take, read_stack

        job = runner.job
        hosts = [node.host for node in job.nodes if runner.link(node.host).is_up]
        waiting = set(hosts)
        found: dict[int, RankStack] = {}
        if not hosts:
            return
        watched.is_asking = True

        def take(host: str, reply: Reply[StacksReply]) -> None:
            if host not in waiting:
                return
            waiting.discard(host)
            is_running = runner.job.state is State.RUNNING and runner.job.attempt == job.attempt
            if reply.error is None and is_running:  # else they may be of ranks that were told to abort
                keep_stacks(spool_dir(self._state_dir, job.id, job.attempt) / host, reply.message.ranks)
                for row in reply.message.ranks:
                    stack = read_stack(host, row)
                    found[stack.rank] = stack
            if not waiting:
                watched.is_asking = False
                now_s = time.monotonic()
                watched.watch.take(Take(now_s, found))
                if watched.look is not None and self._watched.get(job.id) is watched:
                    self._judge(runner, watched, replace(watched.look, at_s=now_s))

        def arrived(host: str, reply: Reply[StacksReply]) -> None:
            self._post(partial(take, host, reply))

        for host in hosts:
            runner.link(host).call(Stacks(job.run_id), deadline_s=STACKS_S, done=partial(arrived, host))


def keep_stacks(folder: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Keep the stacks of a host's ranks in its spool directory, for the time after the end. A full disk keeps none."""
    with suppress(OSError):
        make_spool_dir(folder)
        write_json(str(folder / SPOOL_STACKS), {"at_s": round(time.time(), 3), "ranks": list(rows)}, durable=False)


def make_event(verdict: Verdict, job: Job, windows: Windows, *, now_s: float) -> Event:
    """Return the event of a hang."""
    values: Mapping[str, object] = {
        "finding": verdict.finding(),
        "step": verdict.step,
        "since_s": round(now_s - verdict.quiet_s, 3),
        "signs": list(verdict.signs),
        "where": verdict.where,
        "others": verdict.others,
        "hang_s": windows.hang_s if job.policy.max_restarts > 0 else None,
    }
    return Event(REPORTED, values, verdict.hosts, verdict.ranks, job.attempt, now_s)
