"""The controller's loop: requests, replies of nodes and timers, each handled in one thread."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

from ascendrun.core.errors import AscendrunError, ConflictError, ControllerReplacedError, NotFoundError
from ascendrun.core.events import SEPARATE, Event
from ascendrun.core.pulse import Clock
from ascendrun.core.retention import DAY_S, Retention
from ascendrun.head.agents.connections import Connections
from ascendrun.head.loop.guard import guard_pid
from ascendrun.head.loop.live_jobs import Guard, LiveJobs
from ascendrun.head.loop.liveness import ReachabilityMonitor
from ascendrun.head.loop.operations import Operations
from ascendrun.head.loop.pulse_writer import PulseWriter
from ascendrun.head.notify.notifier import Notifier, NotifierMaker
from ascendrun.head.protocol import control_messages as messages
from ascendrun.head.protocol.agent_bootstrap import AgentImage
from ascendrun.head.protocol.agent_messages import ArtifactData
from ascendrun.head.protocol.control_socket import RESTARTS, RESTARTS_HINT, Answer, ControlServer
from ascendrun.head.protocol.messages import Done, Message, Request
from ascendrun.head.protocol.release import import_everything, own_release, release_on_disk
from ascendrun.head.protocol.remote import AgentConnection, ConnectionListener
from ascendrun.head.spool.artifact_store import requests_dir
from ascendrun.head.ssh.transport import Backend
from ascendrun.head.state.job_files import pruned_at_s
from ascendrun.head.state.outputs import waiting_jobs
from ascendrun.head.state.state_dir import StoreDamagedError
from ascendrun.head.state.store import LostLeaseError, Store, StoredJob
from ascendrun.node.failpoint import failpoint
from ascendrun.node.pack import read_sources
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.head.loop.examiner import Examiner
    from ascendrun.head.loop.hang import HangMonitor
    from ascendrun.head.loop.stragglers import StragglerMonitor
    from ascendrun.head.spool.artifact_fetch import ArtifactFetcher
    from ascendrun.head.spool.output_fetch import OutputFetcher
    from ascendrun.head.spool.sample_ingest import SampleIngest

# Modules for jobs are imported with the first job: a controller started for `exec` replies 0.1 s earlier.

TICK_S = 0.25
PRELOAD_AFTER_S = 10.0
"""Seconds from the first job until the modules for later are imported: its start has the processor for itself."""
RESTING_TICK_S = 1.0
"""Seconds between ticks without a live job, so that hundreds of open connections cost almost nothing."""
AWAY_S = 5.0
"""A longer time between two ticks means that this process was suspended, or that the clock was set."""
TOGETHER = 1000
"""Posted calls that run before their results are stored: a thousand ranks start in few commits."""
PRUNE_LOOK_S = 3600.0
PRUNE_FIRST_S = 300.0
"""Seconds after the start until old data is looked for; later every PRUNE_LOOK_S."""
IDLE_S = 600.0
"""Seconds without a live job and a request after which the controller ends; connections stay open until then."""


class Controller:
    """One for each state directory; the caller holds its lock. Use from `run`'s thread, except marked methods."""

    def __init__(
        self,
        state_dir: Path,
        backend: Backend,
        *,
        idle_s: float = IDLE_S,
        notifier: NotifierMaker = Notifier,
        retention: Retention | None = None,
        idle_check_s: float | None = None,
    ) -> None:
        """Open the store and take its lease. Raises StoreUnusableError."""
        own_release()  # before anything can replace the files
        self._state_dir = state_dir
        self._retention = retention or Retention()
        self._idle_s = idle_s
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # signal handlers may write to it
        self._guard = Guard()
        self._prune_due_mono = time.monotonic() + PRUNE_FIRST_S
        self._is_over = False
        self._ticked = (time.monotonic(), time.time())
        self._busy_mono = time.monotonic()
        self._store = Store.open(state_dir)
        if self._store.needs_restore():
            self._restore()
        self._notifier = notifier(self._store)
        self._store.outbox = self._notifier.outbox
        image = AgentImage(read_sources())
        listener = ConnectionListener(
            on_up=lambda link: self.post(lambda: self._on_up(link)),
            on_down=lambda link, error: self.post(lambda: self._on_down(link, error)),
            on_event=self._on_link_event,
        )
        self._links = Connections(backend, image, listener)
        self._operations = Operations(self._links, self.post)
        self._fetcher: ArtifactFetcher | None = None
        self._output_fetcher: OutputFetcher | None = None
        self._stragglers: StragglerMonitor | None = None
        self._hangs: HangMonitor | None = None
        self._samples: SampleIngest | None = None
        self._jobs = LiveJobs(
            state_dir,
            self._store,
            self._links,
            post=self.post,
            guard=self._guard,
            artifacts=self._artifacts,
            outputs=self._fetch_outputs,
            samples=self._keep_samples,
            retention=self._retention,
        )
        self._reachability = ReachabilityMonitor(events_of=self._jobs.events_of, record=self._jobs.record)
        self._idle_check_s = idle_check_s
        self._examiner: Examiner | None = None
        self._pulse = PulseWriter(state_dir, own_release())
        self._open_requests = 0
        self._has_preloaded = False
        self._has_ended = threading.Event()
        self._is_replaced = False  # on disk, by another release
        self.restarts = False
        """Whether this process is to become the release on disk when `run` has returned."""
        self._server = ControlServer(state_dir, self._on_request, will_restart=self._will_restart)

    # From any thread

    def post(self, call: Callable[[], None]) -> None:
        """Run `call` in the controller's own thread, in order."""
        self._inbox.put(call)

    def _on_request(self, op: str, header: Mapping[str, Any], body: bytes, answer: Answer) -> None:
        def answer_open(reply: Message | AscendrunError | None, body: bytes, is_last: bool) -> None:
            answer(reply, body, is_last)
            if is_last:
                self.post(self._close_request)

        self.post(lambda: self._serve(op, header, answer_open))

    def _close_request(self) -> None:
        self._open_requests -= 1

    def _will_restart(self, release: object) -> bool:
        """Return whether this process restarts soon: its files are of another release, which a command noticed."""
        if not self._is_replaced and release not in (None, own_release()):
            self._is_replaced = release_on_disk() != own_release()
        return self._is_replaced

    def _on_link_event(self, link: AgentConnection, event: Message, body: bytes) -> None:
        if not isinstance(event, ArtifactData):
            self._jobs.handle_message(link, event, body)
        elif self._fetcher is not None:
            self._fetcher.take(link, event, body)

    # The loop

    def run(self) -> None:
        """Run until stopped, idle, or the lease is lost."""
        signal.signal(signal.SIGTERM, lambda *_: self.post(self._end))
        signal.signal(signal.SIGINT, lambda *_: self.post(self._end))
        self._jobs.adopt_missing()
        if requests_dir(self._state_dir).is_dir():
            self._guard(self._artifacts().resume)
        if waiting_jobs(self._state_dir):
            self._guard(self._fetch_outputs().resume)
        self._guard(self._notifier.start)
        self._server.start()
        next_tick = time.monotonic()
        try:
            while not self._is_over:
                calls = self._next_calls(max(0.0, next_tick - time.monotonic()))
                for call in calls:
                    self._guard(call)
                if time.monotonic() >= next_tick:
                    self._guard(self._tick)
                    next_tick = time.monotonic() + (TICK_S if self._is_busy() else RESTING_TICK_S)
                self._guard(self._jobs.work_off_events)
                if self._guard.store_is_damaged:
                    self._guard(self._heal)
                if self._is_busy():
                    next_tick = min(next_tick, time.monotonic() + TICK_S)
        except LostLeaseError as error:
            print(f"controller: {error.message}", flush=True)
        finally:
            self._has_ended.set()
            self._server.close()
            if self.restarts:
                for call in self._next_calls(0.0):
                    self._guard(call)  # requests that came too late have a reply
            self._guard(self._notifier.close)
            self._links.close()
            self._store.close()
            if self._samples is not None:
                self._samples.close()

    def _next_calls(self, timeout_s: float) -> list[Callable[[], None]]:
        """Return the posted calls when there are any; [] after `timeout_s`. Calls of one batch are stored together."""
        calls: list[Callable[[], None]] = []
        try:
            calls.append(self._inbox.get(timeout=timeout_s))
            while len(calls) < TOGETHER:
                calls.append(self._inbox.get_nowait())
        except queue.Empty:
            pass
        return calls

    def _end(self) -> None:
        self._is_over = True

    def _tick(self) -> None:
        was_away = self._was_away()
        if not self._store.is_in_place():
            self._heal()
        self._links.tick()
        self._pulse.tick(self._jobs)
        if self._jobs:
            self._preload()
            self._jobs.tick(was_away=was_away)
            self._guard(lambda: self._reachability.tick(self._jobs))
            self._guard(self._check_stragglers)
            self._guard(self._check_hangs)
        self._guard(self._examine)
        self._notifier.beat([(runner.job.name, runner.job.id) for runner in self._jobs if not runner.job.is_terminal])
        self._guard(self._prune_daily)
        if self._is_replaced and not self._is_over and self._is_quiet():
            self._is_over = self.restarts = True
        if self._is_busy() or self._idle_check_s is not None:
            self._busy_mono = time.monotonic()
        elif time.monotonic() - self._busy_mono > self._idle_s:
            self._is_over = True

    def _prune_daily(self) -> None:
        """Remove old data once a day, on this machine and on the nodes that are connected."""
        if time.monotonic() < self._prune_due_mono:
            return
        self._prune_due_mono = time.monotonic() + PRUNE_LOOK_S
        if time.time() - (pruned_at_s(self._state_dir) or 0.0) > DAY_S:
            self._start_prune(messages.Prune(), lambda reply, body, is_last: None, hosts_up_only=True)

    def _prune(self, request: messages.Prune, answer: Answer) -> None:
        self._start_prune(request, answer, hosts_up_only=False)

    def _start_prune(self, request: messages.Prune, answer: Answer, *, hosts_up_only: bool) -> None:
        from ascendrun.head.loop.pruning import PruneOperation

        def reply(message: Any, body: bytes, is_last: bool) -> None:
            answer(message, body, is_last)
            self._operations.sweep_later()

        live = {runner.job.id for runner in self._jobs}
        operation = PruneOperation(
            request,
            self._store,
            self._links,
            self._retention,
            live=live,
            post=self.post,
            answer=reply,
            hosts_up_only=hosts_up_only,
        )
        self._operations.run(operation)

    def _remove(self, request: messages.Remove, answer: Answer) -> None:
        from ascendrun.head.loop.removal import RemoveOperation

        fetcher = self._fetch_outputs()
        operation = RemoveOperation(
            request,
            self._store,
            self._links,
            live={runner.job.id for runner in self._jobs},
            fetching=fetcher.jobs_now(),
            cancel=fetcher.cancel,
            post=self.post,
            answer=answer,
            ended=self._operations.sweep_later,
        )
        self._operations.run(operation)

    def _check_stragglers(self) -> None:
        from ascendrun.head.loop.stragglers import StragglerMonitor

        if self._stragglers is None:
            self._stragglers = StragglerMonitor(
                self._state_dir, post=self.post, record=self._jobs.record, events_of=self._jobs.events_of
            )
        self._stragglers.tick(runner.job for runner in self._jobs)

    def _check_hangs(self) -> None:
        from ascendrun.head.loop.hang import HangMonitor

        if self._hangs is None:
            self._hangs = HangMonitor(
                self._state_dir,
                post=self.post,
                record=self._jobs.record,
                events_of=self._jobs.events_of,
                feed=self._jobs.feed,
                separate=lambda job, host, world: self._note_separate(job.id, job.attempt, host, world),
            )
        self._hangs.tick(self._jobs)

    def _examine(self) -> None:
        has_spares = any(runner.job.spares and runner.job.state.value == "RUNNING" for runner in self._jobs)
        if self._examiner is None and (has_spares or self._idle_check_s is not None):
            from ascendrun.head.loop.examiner import Examiner

            self._examiner = Examiner(
                self._jobs, self._links, self._operations, post=self.post, idle_every_s=self._idle_check_s
            )
        if self._examiner is not None:
            self._examiner.tick()

    def _was_away(self) -> bool:
        """Return whether this process was suspended: missing messages then mean nothing about the nodes."""
        before, self._ticked = self._ticked, (time.monotonic(), time.time())
        return max(abs(now - then) for now, then in zip(self._ticked, before)) > AWAY_S

    def _is_busy(self) -> bool:
        """Return whether any work is in progress."""
        is_fetching = self._output_fetcher is not None and self._output_fetcher.is_busy
        is_working = self._operations.is_busy or self._notifier.is_waiting or is_fetching
        return is_working or self._jobs.is_busy(now_s=time.time())

    def _is_quiet(self) -> bool:
        """Return whether nothing is in progress that an immediate restart would repeat or refuse."""
        is_starting = any(runner.job.state.value in ("CHECKING", "STAGING", "STARTING") for runner in self._jobs)
        return not (self._open_requests or self._operations.is_busy or is_starting)

    def _preload(self) -> None:
        if not self._has_preloaded:
            self._has_preloaded = True
            threading.Thread(target=import_everything, args=(PRELOAD_AFTER_S, self._has_ended)).start()

    def _artifacts(self) -> ArtifactFetcher:
        if self._fetcher is None:
            from ascendrun.head.spool.artifact_fetch import ArtifactFetcher
            from ascendrun.head.survey.submission import load_subject

            self._fetcher = ArtifactFetcher(
                self._state_dir, self._links, self.post, lambda job_id: load_subject(self._store.find(job_id))
            )
        return self._fetcher

    def _fetch_outputs(self) -> OutputFetcher:
        if self._output_fetcher is None:
            from ascendrun.head.spool.output_fetch import OutputFetcher
            from ascendrun.head.survey.submission import load_outputs

            self._output_fetcher = OutputFetcher(
                self._state_dir,
                self._links,
                self.post,
                lambda job_id: load_outputs(self._store.find(job_id)),
                self._jobs.record,
                self._retention,
            )
        return self._output_fetcher

    def _keep_samples(self) -> SampleIngest:
        from ascendrun.head.spool.sample_ingest import SampleIngest

        if self._samples is None:
            self._samples = SampleIngest(
                self._state_dir,
                separate=lambda source, world: self.post(
                    lambda: self._note_separate(source.job, source.attempt, source.host, world)
                ),
            )
            self._samples.start()
        return self._samples

    def _note_separate(self, job: str, attempt: int, host: str, world_size: int) -> None:
        """Record once for each attempt that ranks train without the others, and end the job; an earlier controller may
        have done so. The job continues if its `checks.skip` names the event."""
        from ascendrun.core.jobs.inputs import TrainsSeparately

        events = [one for one in self._jobs.events_of(job) if one.attempt == attempt]
        if not any(one.code == SEPARATE for one in events):
            values = {"world_size": world_size}
            event = Event(SEPARATE, values, (host,), attempt=attempt, at_s=time.time())
            self._jobs.record(job, [event])
            skipped = (self._store.find(job).spec.get("checks") or {}).get("skip") or ()
            if SEPARATE not in skipped:
                self._jobs.feed(job, TrainsSeparately(attempt, host, world_size))

    def _on_up(self, link: AgentConnection) -> None:
        self._jobs.on_up(link)
        self._operations.on_up()
        for fetcher in (self._fetcher, self._output_fetcher):
            if fetcher is not None:
                fetcher.on_up(link)

    def _on_down(self, link: AgentConnection, error: AscendrunError) -> None:
        self._jobs.on_down(link, error)
        self._operations.on_down(link, error)

    # Requests

    def _serve(self, op: str, header: Mapping[str, Any], answer: Answer) -> None:
        if self.restarts:
            answer(ControllerReplacedError(RESTARTS, hint=RESTARTS_HINT), b"", True)
            return
        self._busy_mono = time.monotonic()
        self._open_requests += 1
        handlers: Handlers = {
            messages.Submit: self._submit,
            messages.Stop: self._stop,
            messages.Retry: self._retry,
            messages.Prune: self._prune,
            messages.Remove: self._remove,
            messages.Release: self._release,
            messages.ChangeMachines: self._change_machines,
            messages.HoldJob: self._hold,
            messages.Plan: lambda request, answer: self._operations.plan(request, answer, self._jobs.placement),
            messages.Exec: self._operations.execute,
            messages.Nodes: self._operations.query_nodes,
            messages.Survey: self._operations.survey,
            messages.Sample: self._sample,
            messages.Grep: self._grep,
            messages.Stacks: self._stacks,
            messages.Put: lambda request, answer: self._fetch_outputs().serve_put(request, answer),
            messages.RankProcess: self._rank_process,
            messages.Status: self._status,
            messages.Shutdown: self._shutdown,
            messages.CheckStore: self._check_store,
            messages.Gather: lambda request, answer: self._artifacts().serve(request, answer),
            messages.Fetch: lambda request, answer: self._fetch_outputs().serve(request, answer),
        }
        again = {kind: partial(self._with_sound_store, handler) for kind, handler in handlers.items()}
        handle_request(again, op, header, answer, log=self._state_dir / "controller.log")

    def _with_sound_store(self, handler: Callable[[Any, Answer], None], request: Any, answer: Answer) -> None:
        """Call the handler again if it finds that the store is damaged: it has not replied, and nothing was stored."""
        try:
            handler(request, answer)
        except StoreDamagedError:
            self._heal()
            handler(request, answer)

    def _heal(self) -> None:
        """Check the store; replace it and rebuild rows if it is damaged. Jobs keep running."""
        self._guard.store_is_damaged = False
        self._store.replace_if_damaged()
        self._restore(self._jobs.stored())
        self._jobs.adopt_missing()

    def _restore(self, known: Sequence[StoredJob] = ()) -> None:
        from ascendrun.head.loop.rescue import restore_rows

        restore_rows(self._store, known)

    def _check_store(self, request: messages.CheckStore, answer: Answer) -> None:
        self._heal()
        answer(Done(), b"", True)

    def _submit(self, request: messages.Submit, answer: Answer) -> None:
        from ascendrun.head.survey.submission import add_jobs

        failpoint("submit.before_txn")
        added = add_jobs(self._store, request, now_s=time.time())
        failpoint("submit.after_commit_before_ack")
        for job, submission in added:
            if not job.is_terminal:
                self._jobs.add(job, submission)
        self._jobs.schedule()
        answer(messages.Submitted(added[0][0].pipeline or added[0][0].id), b"", True)

    def _stop(self, request: messages.Stop, answer: Answer) -> None:
        from ascendrun.core.jobs.inputs import StopRequested

        try:
            stored = self._store.find(request.job)
        except NotFoundError:
            if not self._jobs.machines.stop_found(request.job, now=request.now):
                raise
            answer(Done(), b"", True)
            return
        if stored.job.is_terminal:
            raise ConflictError(
                Text(
                    "job.already-ended",
                    "{job} has already ended: {state}",
                    job=stored.job.id,
                    state=stored.job.state.value,
                )
            )
        job, now_s = stored.job, time.time()
        values = {"grace_s": 0.0 if request.now else job.grace_s}
        self._store.save(job, [Event("stop-requested", values, attempt=job.attempt, at_s=now_s)], now_s=now_s)
        self._jobs.feed(stored.job.id, StopRequested(now=request.now))
        self._jobs.work_off_events()
        answer(Done(), b"", True)

    def _retry(self, request: messages.Retry, answer: Answer) -> None:
        from ascendrun.core.jobs.inputs import RetryRequested

        stored = self._store.find(request.job)
        job = stored.job
        if job.attempt == request.attempt:
            if not job.is_terminal or job.state.value == "SUCCEEDED":
                what = Text(
                    "retry.not-failed",
                    "{job} is {state}; only a job that failed or was stopped is retried",
                    job=job.id,
                    state=job.state.value,
                )
                raise ConflictError(what)
            self._jobs.adopt(stored)
            self._jobs.feed(job.id, RetryRequested())
            self._jobs.work_off_events()
            self._jobs.schedule()
        answer(Done(), b"", True)

    def _release(self, request: messages.Release, answer: Answer) -> None:
        self._jobs.machines.release(request.host, request.by, lambda error: answer(error or Done(), b"", True))

    def _change_machines(self, request: messages.ChangeMachines, answer: Answer) -> None:
        self._jobs.machines.change(request)
        self._jobs.work_off_events()
        answer(Done(), b"", True)

    def _hold(self, request: messages.HoldJob, answer: Answer) -> None:
        from ascendrun.core.jobs.inputs import HoldChanged

        job = self._store.find(request.job).job
        if request.by is not None and job.state.value not in ("QUEUED", "BACKOFF"):
            raise ConflictError(
                Text("job.not-queued", "{job} is not in the queue: {state}", job=job.id, state=job.state.value),
                hint=f"ascendrun stop {job.id}",
            )
        self._jobs.feed(job.id, HoldChanged(request.by))
        self._jobs.work_off_events()
        answer(Done(), b"", True)

    def _stacks(self, request: messages.Stacks, answer: Answer) -> None:
        job = self._store.find(request.job).job
        runner = next((one for one in self._jobs if one.job.id == job.id), None)
        nodes = {node.host for node in job.nodes if node.may_run_processes}
        if runner is None or not nodes:
            what = Text("stacks.not-running", "{job} has no running ranks ({state})", job=job.id, state=job.state.value)
            raise ConflictError(what)
        self._operations.stacks([host for host in runner.hosts if host.name in nodes], job.run_id, answer)

    def _rank_process(self, request: messages.RankProcess, answer: Answer) -> None:
        job = self._store.find(request.job).job
        node = next((node for node in job.nodes if request.rank in node.ranks), None)
        if node is not None and request.rank in node.exits:
            what = Text("shell.rank-ended", "rank {rank} of {job} has ended", rank=request.rank, job=job.id)
            raise ConflictError(what, hint=f"ascendrun show {job.id}")
        runner = next((one for one in self._jobs if one.job.id == job.id), None)
        if runner is None or node is None or not node.may_run_processes:
            what = Text("stacks.not-running", "{job} has no running ranks ({state})", job=job.id, state=job.state.value)
            raise ConflictError(what)
        host = next(host for host in runner.hosts if host.name == node.host)
        self._operations.rank_process(host, job.run_id, request.rank, answer)

    def _grep(self, request: messages.Grep, answer: Answer) -> None:
        from ascendrun.head.spool.grep import relay
        from ascendrun.head.survey.submission import load_subject

        relay(self._links, load_subject(self._store.find(request.job)), request, answer, self.post)

    def _sample(self, request: messages.Sample, answer: Answer) -> None:
        self._operations.sample(request, answer, self._keep_samples())

    def _status(self, request: messages.Status, answer: Answer) -> None:
        live = [runner.job.id for runner in self._jobs if not runner.job.is_terminal]
        pulse = self._pulse.make(self._jobs, Clock.now())
        answer(messages.ControllerStatus(os.getpid(), tuple(live), pulse, guard_pid()), b"", True)

    def _shutdown(self, request: messages.Shutdown, answer: Answer) -> None:
        answer(Done(), b"", True)
        self._is_over = True


Handlers = Mapping[type[Request[Any]], Callable[[Any, Answer], None]]
"""Handler for each kind of request."""


def handle_request(handlers: Handlers, op: str, header: Mapping[str, Any], answer: Answer, *, log: Path) -> None:
    """Call the handler of a request, and reply with its error if it fails; the controller keeps running.

    Raises LostLeaseError only. `log`: the file with the traceback of an internal error.
    """
    kind = next((kind for kind in handlers if kind.OP == op), None)
    if kind is None:
        error = ConflictError(
            Text("control.unknown-request", "the controller does not support {op}", op=op),
            hint=Text("control.unknown-request.hint", "run `ascendrun controller stop`"),
        )
        answer(error, b"", True)
        return
    try:
        handlers[kind](kind.from_header(header), answer)
    except LostLeaseError:
        raise
    except AscendrunError as error:
        answer(error, b"", True)
    except Exception as error:  # a bug: the log has the traceback, the caller gets the error
        traceback.print_exc()
        what = f"{type(error).__name__}: {error}"
        failure = AscendrunError(
            Text("control.internal", "internal error of the controller: {error}", error=what),
            hint=Text("control.internal.hint", "report this with the traceback in {log}", log=str(log)),
        )
        answer(failure, b"", True)
