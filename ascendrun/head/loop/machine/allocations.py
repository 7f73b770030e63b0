"""Allocations of the live jobs: requested, watched and released, by one query of each engine at a time."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Callable

from ascendrun.core import allocations as engines
from ascendrun.core.dataclass import dataclass
from ascendrun.core.events import Event
from ascendrun.core.hosts import Host
from ascendrun.core.jobs import allocated
from ascendrun.core.jobs.job import Job, State
from ascendrun.core.jobs.reasons import because
from ascendrun.core.jobs.restart import excluded_hosts
from ascendrun.core.jobs.roles import parts_of
from ascendrun.core.jobs.schedule import check_dependency
from ascendrun.head.agents.connections import post_later
from ascendrun.head.loop.steps import JobSteps
from ascendrun.head.waiting import in_background
from ascendrun.node.layout import make_run, split_tag

if TYPE_CHECKING:
    from ascendrun.head.loop.context import Context
    from ascendrun.head.loop.job.runner import JobRunner
    from ascendrun.head.loop.machine.machines import Machines

INTERVAL_S = 5.0
FIRST_S, SOON_S = 0.05, 0.3
"""Seconds between queries while an allocation was requested less than EAGER_S ago: the first, and later ones."""
EAGER_S = 10.0
KEPT_S = 60.0
"""Seconds after the end of a job for which its allocation is kept at most, while files of its nodes are fetched."""
FORGOTTEN_S = 30.0
"""Seconds for which an engine must answer without an allocation that it granted, before that has ended: while it
restarts, it may not know all its jobs yet."""


@dataclass(frozen=True)
class _Work:
    """What one query of an engine does, by key."""

    keys: engines.Options
    requests: Mapping[str, engines.AllocationRequest]
    releases: engines.Options


class Allocations:
    """Use from the controller's thread. `drained`: ids of ended jobs of which every byte is here. `changed()`: called
    after every answer of an engine."""

    def __init__(self, jobs: JobSteps, context: Context, machines: Machines, *, changed: Callable[[], None]) -> None:
        self._jobs, self._context, self._machines, self._changed = jobs, context, machines, changed
        self.drained: set[str] = set()
        self._due: dict[str, float] = defaultdict(float)
        self._last: dict[str, _Work] = {}
        self._busy: set[str] = set()
        self._silent: set[str] = set()
        self._ends: dict[str, float] = {}
        self._missing_since: dict[str, float] = {}
        self._of_lost: dict[str, engines.Granted] = {}
        self._is_searching = False

    # After a loss of records

    def search(self) -> None:
        """Look for the allocations of this head, and connect to their hosts, which tell of the jobs in them."""
        if not self._is_searching:
            self._is_searching = True
            in_background(self._search, "engine-search")

    def of_lost(self, run: str) -> tuple[str, Sequence[Host]] | None:
        """Return the allocation of a run of which the records are lost: its key and hosts; None: not found yet."""
        keys = [key for key in self._of_lost if split_tag(key)[0] == run]
        if not keys:
            self.search()
        return (keys[-1], self._of_lost[keys[-1]].hosts) if keys else None

    def drop_empty(self, host: Host) -> None:
        """Close the connection to a host of a lost job where nothing runs any more: its allocation then ends."""
        if any(host in granted.hosts for granted in self._of_lost.values()):
            self._context.links.forget(host)

    def _search(self) -> None:
        found: dict[str, engines.AllocationState] = {}
        is_silent = False
        try:
            for allocator in self._context.links.backend.allocators():
                try:
                    found.update(allocator.all_of(make_run(self._context.store.head_id, "")))
                except engines.EngineError as error:
                    print(f"controller: {error.reason}", flush=True)
                    is_silent = True
        finally:  # also after a bug, whose traceback is in the log
            self._context.post(partial(self._take_found, found, is_silent))

    def _take_found(self, found: Mapping[str, engines.AllocationState], is_silent: bool) -> None:
        self._is_searching = False
        granted = {key: state for key, state in found.items() if isinstance(state, engines.Granted)}
        self._of_lost.update(granted)
        for host in chain.from_iterable(state.hosts for state in granted.values()):
            self._context.links.get(host)
        if is_silent:
            post_later(self._context.links, INTERVAL_S, self.search)

    # While jobs use engines

    def look_soon(self) -> None:
        """Query every engine at the next tick."""
        self._due.clear()

    def tick(self) -> None:
        """Query the engines that are due, or for which there is something new to do. May be called at any rate."""
        runners: dict[str, list[JobRunner]] = defaultdict(list)
        for runner in self._jobs:
            if runner.job.engine is not None:
                runners[runner.job.engine].append(runner)
        for runner in chain.from_iterable(runners.values()):
            self._advance(runner)
        self._jobs.work_off()  # a request is stored before it is made
        for engine, its in runners.items():
            work = self._work(its)
            is_due = time.monotonic() >= self._due[engine] or work != self._last.get(engine)
            if work.keys and is_due and engine not in self._busy:
                self._busy.add(engine)
                self._last[engine] = work
                in_background(partial(self._query, engine, work), f"engine-{engine}")

    def _advance(self, runner: JobRunner) -> None:
        """Note that an allocation is to be requested, or that it ends soon."""
        job = runner.job
        is_free = job.held_by is None and (not job.needs or check_dependency(job, self._jobs.find(job.needs)) is None)
        if job.state is State.QUEUED and job.allocation is None and is_free:
            self._jobs.feed(job.id, allocated.AllocationRequested(job.run_id))
        if self._is_ending(job):
            self._jobs.feed(job.id, allocated.AllocationEnding(self._ends[str(job.allocation)]))

    def _is_ending(self, job: Job) -> bool:
        """Return whether an attempt that starts now could only save."""
        ends_at_s = self._ends.get(job.allocation or "", math.inf)
        return time.time() > ends_at_s - job.grace_s - allocated.MARGIN_S

    def _work(self, runners: Sequence[JobRunner]) -> _Work:
        keys: dict[str, Mapping[str, Any]] = {}
        requests, releases = {}, {}
        for runner in runners:
            job = runner.job
            if job.allocation is None:
                continue
            assert isinstance(runner.spec.engine, dict)
            keys[job.allocation] = runner.spec.engine
            if self._is_over(runner):
                releases[job.allocation] = runner.spec.engine
            elif job.state is State.QUEUED and not job.pool:
                requests[job.allocation] = self._request(runner)
        return _Work(keys, requests, releases)

    def _is_over(self, runner: JobRunner) -> bool:
        """Return whether the allocation is of no use to the job any more."""
        job = runner.job
        if job.is_terminal:
            is_fetched = job.id in self.drained and not self._context.is_fetching
            return is_fetched or time.time() - (job.ended_at_s or 0.0) > KEPT_S
        if job.state is not State.QUEUED:
            return False
        has_few = len(set(job.pool) - set(self._closed(runner))) < job.request.nodes
        return self._is_ending(job) or (bool(job.pool) and has_few)

    def _closed(self, runner: JobRunner) -> Iterator[str]:
        """Yield the hosts that the job must not use: excluded by its policy, or closed here."""
        yield from sorted(excluded_hosts(runner.job.policy, runner.job.past))
        for host in runner.hosts:
            if any(record.closures(time.time()) for record in self._machines.records.at(host)):
                yield host.name

    def _request(self, runner: JobRunner) -> engines.AllocationRequest:
        job, spec = runner.job, runner.spec
        assert isinstance(spec.engine, dict) and job.allocation is not None
        wanted = [part.spec.devices for part in parts_of(spec)]
        before = self._jobs.find(job.request.same_as) if job.request.same_as else None
        return engines.AllocationRequest(
            key=job.allocation,
            name=job.name,
            options=spec.engine,
            nodes=job.request.nodes + job.request.spares,
            devices=max(0 if one.type == "cpu" else one.per_node or 1 for one in wanted),
            grace_s=job.grace_s,
            hosts=() if before is None else before.hosts,
            exclude=tuple(dict.fromkeys(self._closed(runner))),
        )

    def _query(self, engine: str, work: _Work) -> None:
        """Query the engine in a thread of its own, then do what is to be done."""
        refused: dict[str, engines.EngineError] = {}
        states: dict[str, engines.AllocationState] = {}
        silence: engines.EngineError | None = engines.EngineError(because("engine-silent", why="internal error"))
        try:
            allocator = self._context.links.backend.allocator(engine)
            states.update(allocator.poll(work.keys))
            ended = {key for key in work.keys if isinstance(states.get(key), (engines.Gone, type(None)))}
            allocator.release({key: options for key, options in work.releases.items() if key not in ended})
            for key, wanted in work.requests.items():
                if key not in states:
                    try:
                        held = allocator.request(wanted)
                        states.update({} if held is None else {key: held})
                    except engines.EngineError as error:
                        if not error.is_final:
                            raise
                        refused[key] = error
            silence = None
        except engines.EngineError as error:
            silence = error
        finally:  # also after a bug, whose traceback is in the log
            self._context.post(partial(self._take, engine, work, states, refused, silence))

    def _take(
        self,
        engine: str,
        work: _Work,
        states: Mapping[str, engines.AllocationState],
        refused: Mapping[str, engines.EngineError],
        silence: engines.EngineError | None,
    ) -> None:
        self._busy.discard(engine)
        runners = [
            runner for runner in self._jobs if runner.job.allocation in work.keys and runner.job.engine == engine
        ]
        new = [runner.job.since_s for runner in runners if not runner.job.pool or runner.job.state is State.STOPPING]
        age_s, pause_s = time.time() - max(new, default=0.0), INTERVAL_S
        if age_s < EAGER_S and silence is None:
            pause_s = min(SOON_S, max(FIRST_S, age_s / 4))
            post_later(self._context.links, pause_s, self.tick)  # ticks are farther apart
        self._due[engine] = time.monotonic() + pause_s
        self._note_silence(engine, runners, silence)
        if silence is not None:
            self._missing_since.clear()  # the answers before and after it are not one time without the allocation
        for runner in runners if silence is None else ():
            key = str(runner.job.allocation)
            if key in refused:
                self._jobs.feed(runner.job.id, allocated.AllocationRefused(refused[key].reason))
            else:
                self._take_state(runner, states.get(key), is_ours=key in work.releases)
        self.drained &= {runner.job.id for runner in self._jobs}
        self._jobs.work_off()
        self._changed()

    def _take_state(self, runner: JobRunner, state: engines.AllocationState | None, *, is_ours: bool) -> None:
        job = runner.job
        key, now_mono = str(job.allocation), time.monotonic()
        if state is not None:
            self._missing_since.pop(key, None)
        elif (job.pool or is_ours) and now_mono - self._missing_since.setdefault(key, now_mono) > FORGOTTEN_S:
            state = engines.Gone("unknown", because("allocation-unknown"))
        if isinstance(state, engines.Waiting):
            self._jobs.feed(job.id, allocated.AllocationWaiting(state.reason, state.will_start))
        elif isinstance(state, engines.Granted):
            for host in () if is_ours else state.hosts:
                self._context.links.get(host)  # also of spares: without connections the engine ends the allocation
            if not job.pool and not self._is_ending(job):
                self._jobs.feed(job.id, allocated.AllocationGranted(state.hosts, state.length_s))
            self._ends[key] = state.ends_at_s or math.inf  # after it: one that is too short is the job's end
        elif state is not None:
            self._ends.pop(key, None)
            self._missing_since.pop(key, None)
            gone = allocated.AllocationGone(state.cause, state.reason, state.hosts, is_ours=is_ours)
            self._jobs.feed(job.id, gone)
            for host in runner.hosts:
                self._context.links.forget(host)

    def _note_silence(self, engine: str, runners: Sequence[JobRunner], silence: engines.EngineError | None) -> None:
        """Record that an engine does not answer, or answers again; that ends no job."""
        if (silence is not None) == (engine in self._silent):
            return
        self._silent ^= {engine}
        code, reason = ("engine-answers", None) if silence is None else ("engine-silent", silence.reason)
        values = {"engine": engine, "reason": reason}
        for runner in runners:
            if reason is not None:
                self._jobs.feed(runner.job.id, allocated.AllocationWaiting(reason))
            self._jobs.record(runner.job.id, [Event(code, values, attempt=runner.job.attempt, at_s=time.time())])
