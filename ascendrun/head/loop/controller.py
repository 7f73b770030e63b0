"""The controller's loop: requests, replies of nodes and timers, each handled in one thread."""

from __future__ import annotations

import os
import queue
import signal
import time
import traceback
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

from ascendrun.core.errors import AscendrunError, ConflictError
from ascendrun.core.events import Event
from ascendrun.head.agents.connections import Connections
from ascendrun.head.loop.live_jobs import Guard, LiveJobs
from ascendrun.head.loop.liveness import ReachabilityMonitor
from ascendrun.head.loop.operations import Operations
from ascendrun.head.notify.notifier import Notifier, NotifierMaker
from ascendrun.head.protocol import control_messages as messages
from ascendrun.head.protocol.agent_bootstrap import AgentImage
from ascendrun.head.protocol.agent_messages import ArtifactData
from ascendrun.head.protocol.control_socket import Answer, ControlServer
from ascendrun.head.protocol.messages import Done, Message, Request
from ascendrun.head.protocol.remote import AgentConnection, ConnectionListener
from ascendrun.head.spool.artifact_store import requests_dir
from ascendrun.head.ssh.transport import Backend
from ascendrun.head.state.store import LostLeaseError, Store
from ascendrun.node.failpoint import failpoint
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.head.loop.stragglers import StragglerMonitor
    from ascendrun.head.spool.artifact_fetch import ArtifactFetcher
    from ascendrun.head.spool.sample_ingest import SampleIngest

# Modules for jobs are imported with the first job: a controller started for `exec` replies 0.1 s earlier.

TICK_S = 0.25
RESTING_TICK_S = 1.0
"""Seconds between ticks without a live job, so that hundreds of open connections cost almost nothing."""
AWAY_S = 5.0
"""A longer time between two ticks means that this process was suspended, or that the clock was set."""
TOGETHER = 1000
"""Posted calls that run before their results are stored: a thousand ranks start in few commits."""
IDLE_S = 600.0
"""Seconds without a live job and a request after which the controller ends; connections stay open until then."""


class Controller:
    """One for each state directory; the caller holds its lock. Use from `run`'s thread, except marked methods."""

    def __init__(
        self, state_dir: Path, backend: Backend, *, idle_s: float = IDLE_S, notifier: NotifierMaker = Notifier
    ) -> None:
        """Open the store and take its lease. Raises StoreUnusableError."""
        self._state_dir = state_dir
        self._idle_s = idle_s
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # signal handlers may write to it
        self._guard = Guard()
        self._is_over = False
        self._ticked = (time.monotonic(), time.time())
        self._busy_mono = time.monotonic()
        self._store = Store.open(state_dir)
        self._notifier = notifier(self._store)
        self._store.outbox = self._notifier.outbox
        image = AgentImage.make()
        listener = ConnectionListener(
            on_up=lambda link: self.post(lambda: self._on_up(link)),
            on_down=lambda link, error: self.post(lambda: self._on_down(link, error)),
            on_event=self._on_link_event,
        )
        self._links = Connections(backend, image, listener)
        self._operations = Operations(self._links, self.post)
        self._fetcher: ArtifactFetcher | None = None
        self._stragglers: StragglerMonitor | None = None
        self._samples: SampleIngest | None = None
        self._jobs = LiveJobs(
            state_dir,
            self._store,
            self._links,
            post=self.post,
            guard=self._guard,
            artifacts=self._artifacts,
            samples=self._keep_samples,
        )
        self._reachability = ReachabilityMonitor(events_of=self._jobs.events_of, record=self._jobs.record)
        self._server = ControlServer(state_dir, self._on_request)

    # From any thread

    def post(self, call: Callable[[], None]) -> None:
        """Run `call` in the controller's own thread, in order."""
        self._inbox.put(call)

    def _on_request(self, op: str, header: Mapping[str, Any], body: bytes, answer: Answer) -> None:
        self.post(lambda: self._serve(op, header, answer))

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
        for stored in self._store.live_jobs():
            self._guard(partial(self._jobs.adopt, stored))
        if requests_dir(self._state_dir).is_dir():
            self._guard(self._artifacts().resume)
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
                if self._is_busy():
                    next_tick = min(next_tick, time.monotonic() + TICK_S)
        except LostLeaseError as error:
            print(f"controller: {error.message}", flush=True)
        finally:
            self._server.close()
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
        self._links.tick()
        if self._jobs:
            self._jobs.tick(was_away=was_away)
            self._guard(lambda: self._reachability.tick(self._jobs))
            self._guard(self._check_stragglers)
        self._notifier.beat([(runner.job.name, runner.job.id) for runner in self._jobs if not runner.job.is_terminal])
        if self._is_busy():
            self._busy_mono = time.monotonic()
        elif time.monotonic() - self._busy_mono > self._idle_s:
            self._is_over = True

    def _check_stragglers(self) -> None:
        from ascendrun.head.loop.stragglers import StragglerMonitor

        if self._stragglers is None:
            self._stragglers = StragglerMonitor(
                self._state_dir, post=self.post, record=self._jobs.record, events_of=self._jobs.events_of
            )
        self._stragglers.tick(runner.job for runner in self._jobs)

    def _was_away(self) -> bool:
        """Return whether this process was suspended: missing messages then mean nothing about the nodes."""
        before, self._ticked = self._ticked, (time.monotonic(), time.time())
        return max(abs(now - then) for now, then in zip(self._ticked, before)) > AWAY_S

    def _is_busy(self) -> bool:
        """Return whether any work is in progress."""
        return self._operations.is_busy or self._notifier.is_waiting or self._jobs.is_busy(now_s=time.time())

    def _artifacts(self) -> ArtifactFetcher:
        if self._fetcher is None:
            from ascendrun.head.spool.artifact_fetch import ArtifactFetcher
            from ascendrun.head.survey.submission import load_subject

            self._fetcher = ArtifactFetcher(
                self._state_dir, self._links, self.post, lambda job_id: load_subject(self._store.find(job_id))
            )
        return self._fetcher

    def _keep_samples(self) -> SampleIngest:
        from ascendrun.head.spool.sample_ingest import SampleIngest

        if self._samples is None:
            self._samples = SampleIngest(self._state_dir)
            self._samples.start()
        return self._samples

    def _on_up(self, link: AgentConnection) -> None:
        self._jobs.on_up(link)
        self._operations.on_up()
        if self._fetcher is not None:
            self._fetcher.on_up(link)

    def _on_down(self, link: AgentConnection, error: AscendrunError) -> None:
        self._jobs.on_down(link, error)
        self._operations.on_down(link, error)

    # Requests

    def _serve(self, op: str, header: Mapping[str, Any], answer: Answer) -> None:
        self._busy_mono = time.monotonic()
        handlers: Handlers = {
            messages.Submit: self._submit,
            messages.Stop: self._stop,
            messages.Plan: self._operations.plan,
            messages.Exec: self._operations.execute,
            messages.Nodes: self._operations.query_nodes,
            messages.Survey: self._operations.survey,
            messages.Sample: self._sample,
            messages.Grep: self._grep,
            messages.Status: self._status,
            messages.Shutdown: self._shutdown,
            messages.Gather: lambda request, answer: self._artifacts().serve(request, answer),
        }
        handle_request(handlers, op, header, answer, log=self._state_dir / "controller.log")

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

        stored = self._store.find(request.job)
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

    def _grep(self, request: messages.Grep, answer: Answer) -> None:
        from ascendrun.head.spool.grep import relay
        from ascendrun.head.survey.submission import load_subject

        relay(self._links, load_subject(self._store.find(request.job)), request, answer, self.post)

    def _sample(self, request: messages.Sample, answer: Answer) -> None:
        self._operations.sample(request, answer, self._keep_samples())

    def _status(self, request: messages.Status, answer: Answer) -> None:
        live = [runner.job.id for runner in self._jobs if not runner.job.is_terminal]
        hosts = {
            runner.job.id: {host: runner.link(host).liveness() for host in runner.job.hosts}
            for runner in self._jobs
            if runner.job.state.value != "QUEUED"
        }
        silence_s = {
            runner.job.id: {host: runner.link(host).silence_s() for host in runner.job.hosts}
            for runner in self._jobs
            if runner.job.state.value == "RUNNING"
        }
        staged = {runner.job.id: runner.staged_bytes() for runner in self._jobs if runner.job.state.value == "STAGING"}
        answer(messages.ControllerStatus(os.getpid(), tuple(live), hosts, silence_s, staged), b"", True)

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
