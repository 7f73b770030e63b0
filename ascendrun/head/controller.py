"""The only loop: takes wishes, the nodes' answers and the time, advances jobs, stores, then acts."""

from __future__ import annotations

import os
import queue
import signal
import sys
import time
import traceback
from collections import deque
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Deque, Dict, List, Mapping, Optional, Sequence, Tuple

from ascendrun.core.errors import AscendrunError, Conflict, NotFound
from ascendrun.head.boot import AgentImage
from ascendrun.head.control import Answer, ControlServer
from ascendrun.head.errands import Errands
from ascendrun.head.gathered import wishes_dir
from ascendrun.head.links import Links
from ascendrun.head.listening import Listening
from ascendrun.head.notifier import Notifier, NotifierMaker
from ascendrun.head.remote import Link, LinkListener
from ascendrun.head.statedir import StoreUnusable
from ascendrun.head.store import LostLease, Store, StoredJob
from ascendrun.head.transport import Backend
from ascendrun.head.wishes import serve_wish
from ascendrun.node.failpoint import failpoint

if TYPE_CHECKING:
    from ascendrun.core.job import Event, Job
    from ascendrun.core.lifecycle import Step
    from ascendrun.core.schedule import Claim
    from ascendrun.head.gathering import Gatherer
    from ascendrun.head.jobrunner import JobRunner
    from ascendrun.head.samplekeeper import SampleKeeper
    from ascendrun.head.straggling import Straggling
    from ascendrun.head.submission import Submission

# What only jobs need is imported with the first job: a controller that was started for `exec` answers 0.1 s earlier.

TICK_S = 0.25
RESTING_TICK_S = 1.0
"""With nothing live the time matters less, and hundreds of open connections should cost next to nothing."""
AWAY_S = 5.0
"""Between two ticks: more, and this process stood still (SIGSTOP, a closed laptop), or somebody set the clock."""
SETTLING_S = 30.0
TOGETHER = 1000
"""So many posted calls are worked off before what they led to is stored: a thousand ranks start in few commits."""
IDLE_S = 600.0
"""With nothing live and nobody asking for so long, the controller ends; connections stay warm until then."""


class Controller:
    """One per state folder; the caller holds its lock. Everything but the marked methods runs in `run`'s thread."""

    def __init__(self, state_dir: Path, backend: Backend, *, idle_s: float = IDLE_S, notifier: NotifierMaker = Notifier
                 ) -> None:
        """Opens the store and takes its lease. Raises StoreUnusable."""
        self._state_dir = state_dir
        self._idle_s = idle_s
        self._inbox: "queue.SimpleQueue[Callable[[], None]]" = queue.SimpleQueue()  # signal handlers may put into it
        self._events: Deque[Tuple[str, "Event"]] = deque()
        self._unsaved: Dict[str, "Step"] = {}
        self._last_fault = ""
        self._is_over = False
        self._ticked = (time.monotonic(), time.time())
        self._busy_mono = time.monotonic()
        self._store = Store.open(state_dir)
        self._notifier = notifier(self._store)
        self._store.outbox = self._notifier.outbox
        image = AgentImage.make()
        listener = LinkListener(on_up=lambda link: self.post(lambda: self._on_up(link)),
                                on_down=lambda link, error: self.post(lambda: self._on_down(link, error)),
                                on_event=self._on_link_event)
        self._links = Links(backend, image, listener)
        self._errands = Errands(self._links, self.post)
        self._gatherer: Optional["Gatherer"] = None
        self._straggling: Optional["Straggling"] = None
        self._runners: Dict[str, "JobRunner"] = {}
        self._claims: Dict[str, Tuple["Claim", ...]] = {}
        self._samples: Optional["SampleKeeper"] = None
        self._listening = Listening(story=self._story, tell=self._tell)
        self._server = ControlServer(state_dir, self._on_request)

    # From any thread

    def post(self, call: Callable[[], None]) -> None:
        """Has `call` run in the controller's own thread, in order."""
        self._inbox.put(call)

    def _on_request(self, op: str, header: Mapping[str, Any], body: bytes, answer: Answer) -> None:
        self.post(lambda: self._serve(op, header, answer))

    def _on_link_event(self, link: Link, header: Mapping[str, Any], body: bytes) -> None:
        if header.get("event") == "gathered" and self._gatherer is not None:
            self._gatherer.take(link, header, body)
        if header.get("event") not in ("data", "follow_failed"):
            return
        for runner in tuple(self._runners.values()):
            host = runner.uses(link) if runner.job.tag == header.get("tag") else None
            if host is None:
                continue
            if header["event"] == "data":
                runner.take_data(host, header, body)
            else:
                self.post(partial(runner.follow_later, host))

    # The loop

    def run(self) -> None:
        """Until stopped, idle, or the lease is lost."""
        signal.signal(signal.SIGTERM, lambda *_: self.post(self._end))
        signal.signal(signal.SIGINT, lambda *_: self.post(self._end))
        for stored in self._store.live_jobs():
            self._guard(partial(self._adopt, stored))
        if wishes_dir(self._state_dir).is_dir():
            self._guard(self._gathering().resume)
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
                self._guard(self._work_off_events)
                if self._is_busy():
                    next_tick = min(next_tick, time.monotonic() + TICK_S)
        except LostLease as error:
            print(f"controller: {error.message}", flush=True)
        finally:
            self._server.close()
            self._guard(self._notifier.close)
            self._links.close()
            self._store.close()
            if self._samples is not None:
                self._samples.close()

    def _next_calls(self, timeout_s: float) -> List[Callable[[], None]]:
        """What was posted, once there is something; [] after `timeout_s`. What comes together is stored together."""
        calls: List[Callable[[], None]] = []
        try:
            calls.append(self._inbox.get(timeout=timeout_s))
            while len(calls) < TOGETHER:
                calls.append(self._inbox.get_nowait())
        except queue.Empty:
            pass
        return calls

    def _guard(self, call: Callable[[], None]) -> None:
        """Runs a call; a fault of ours in one matter must not end the keeper of all jobs. The log keeps the trace."""
        try:
            call()
        except LostLease:
            raise
        except Exception:
            self._tell_fault()

    def _tell_fault(self) -> None:
        """Once while it comes again and again; the log's own disk may be full."""
        text = traceback.format_exc()
        if text != self._last_fault:
            self._last_fault = text
            with suppress(OSError):
                print(text, file=sys.stderr, flush=True)

    def _end(self) -> None:
        self._is_over = True

    def _tick(self) -> None:
        was_away = self._was_away()
        self._links.tick()
        if self._runners:
            self._tick_jobs(was_away=was_away)
        self._notifier.beat([(runner.job.name, job_id) for job_id, runner in self._runners.items()
                             if not runner.job.is_over])
        if self._is_busy():
            self._busy_mono = time.monotonic()
        elif time.monotonic() - self._busy_mono > self._idle_s:
            self._is_over = True

    def _tick_jobs(self, *, was_away: bool) -> None:
        from ascendrun.core.job import Tick
        from ascendrun.core.lifecycle import Step, look_again
        reachable = frozenset(link.host.name for link in self._links if link.is_up)
        for job_id, runner in tuple(self._runners.items()):
            self._guard(runner.tick)
            if runner.job.is_over:
                self._guard(runner.drain)
                continue
            if was_away:
                self._settle(job_id, Step(look_again(runner.job, now_s=time.time())))
            self.feed(job_id, Tick(reachable))
        self._schedule()
        self._guard(lambda: self._listening.tick(self._runners.values()))
        self._guard(self._watch_pace)

    def _watch_pace(self) -> None:
        from ascendrun.head.straggling import Straggling
        if self._straggling is None:
            self._straggling = Straggling(self._state_dir, post=self.post, tell=self._tell, story=self._story)
        self._straggling.tick(runner.job for runner in self._runners.values())

    def _story(self, job_id: str) -> List[Tuple[str, str]]:
        return [(event.kind, event.text) for event in self._store.events(job_id)]

    def _tell(self, job_id: str, lines: Sequence[Tuple[str, str]]) -> None:
        """Lines for a job's story that change nothing else."""
        if job_id in self._runners:
            self._store.save(self._runners[job_id].job, lines, now_s=time.time())

    def _was_away(self) -> bool:
        """What was not heard meanwhile says nothing about the nodes."""
        before, self._ticked = self._ticked, (time.monotonic(), time.time())
        return max(abs(now - then) for now, then in zip(self._ticked, before)) > AWAY_S

    def _is_busy(self) -> bool:
        """Something is under way. A job that is over is, for as long as its last bytes may still be coming."""
        now_s = time.time()
        return self._errands.is_busy or self._notifier.is_waiting or any(
            runner.job.ended_at_s is None or now_s - runner.job.ended_at_s < SETTLING_S
            for runner in self._runners.values())

    def _schedule(self) -> None:
        from ascendrun.core.schedule import judge_all
        jobs = [(runner.job, self._claims[job_id]) for job_id, runner in self._runners.items()]
        for job_id, verdict in judge_all(jobs, self._job).items():
            self.feed(job_id, verdict)

    def _job(self, job_id: str) -> "Optional[Job]":
        runner = self._runners.get(job_id)
        if runner is not None:
            return runner.job
        try:
            found = self._store.find(job_id).job
        except (NotFound, Conflict):
            return None
        return found if found.id == job_id else None  # a name or a longer id may begin like it

    # Jobs

    def feed(self, job_id: str, event: "Event") -> None:
        """Gives an event to a job's lifecycle; taken up before anything else that arrives."""
        self._events.append((job_id, event))

    def _work_off_events(self) -> None:
        if not self._events:
            return
        from ascendrun.core.lifecycle import Step
        while self._events:
            steps, self._unsaved = self._unsaved, {}
            while self._events:
                job_id, event = self._events.popleft()
                if job_id in self._runners:
                    before = steps.get(job_id) or Step(self._runners[job_id].job)
                    steps[job_id] = before.then(self._advance(before.job, event))
            for job_id, step in steps.items():
                self._guard(partial(self._settle, job_id, step))

    def _advance(self, job: "Job", event: "Event") -> "Step":
        from ascendrun.core.lifecycle import IllegalMove, Step, advance

        def story() -> List[str]:
            return [f"{past.kind}: {past.text}" for past in self._store.events(job.id)[-20:]]
        try:
            return advance(job, event, now_s=time.time(), story=story)
        except IllegalMove:
            self._tell_fault()  # the job stays as it was; the others must not suffer
            return Step(job)

    def _settle(self, job_id: str, step: "Step") -> None:
        """Takes the step, or keeps it for the next turn while the store takes nothing (a full disk, a long lock)."""
        if step.job == self._runners[job_id].job and not step.actions:
            return
        try:
            self._take(self._runners[job_id], step)
        except StoreUnusable:
            self._unsaved[job_id] = step
            self._tell_fault()

    def _take(self, runner: "JobRunner", step: "Step") -> None:
        """Stores what was decided, then does it: after a crash between the two the new controller does it again."""
        before = runner.job
        if step.job != runner.job:
            lines = [("state", f"{move.target.value}: {move.reason}") for move in step.moves]
            lines += [("note", note) for note in step.notes]
            failpoint("controller.before_save")
            self._store.save(step.job, lines, now_s=time.time())
            failpoint("controller.after_save")
            is_new_attempt = step.job.attempt != runner.job.attempt
            runner.job = step.job
            if is_new_attempt:
                runner.begin_attempt()
        for action in step.actions:
            runner.perform(action)
        failpoint("controller.after_actions")
        if step.moves:
            self._gather_after(before, step)
        if step.moves and step.job.is_over:
            runner.drain()

    def _gather_after(self, before: "Job", step: "Step") -> None:
        """What may explain a failure is asked for at once: logs rotate, and devices recover."""
        from ascendrun.head.gathering import failed_attempt
        attempt = failed_attempt(before, step.job, step.moves)
        if attempt is not None:
            self._guard(partial(self._gathering().gather, before.id, attempt))

    def _gathering(self) -> "Gatherer":
        if self._gatherer is None:
            from ascendrun.head.gathering import Gatherer
            from ascendrun.head.submission import load_subject
            self._gatherer = Gatherer(self._state_dir, self._links, self.post,
                                      lambda job_id: load_subject(self._store.find(job_id)))
        return self._gatherer

    def _adopt(self, stored: StoredJob) -> None:
        from ascendrun.core.lifecycle import resume
        from ascendrun.head.submission import Submission
        submission = Submission.from_stored(stored)
        self._add_runner(stored.job, submission)
        runner = self._runners[stored.job.id]
        self._settle(stored.job.id, resume(stored.job, now_s=time.time()))
        if stored.job.is_over:
            from ascendrun.head.gathering import left_unasked
            attempt = left_unasked(stored.job, now_s=time.time())
            if attempt is not None:
                self._guard(partial(self._gathering().gather_missing, stored.job.id, attempt))
        if runner.job.told_at_s is not None:
            for host in runner.job.hosts:
                runner.take_events(host)
                runner.link(host)

    def _add_runner(self, job: "Job", submission: "Submission") -> "JobRunner":
        from ascendrun.head.jobrunner import Desk, JobRunner
        from ascendrun.head.submission import claims_of
        desk = Desk(self._state_dir, self._links, post=self.post, feed=self.feed, drained=self._forget,
                    samples=self._keep_samples())
        runner = JobRunner(job, spec=submission.spec, hosts=submission.hosts, trees=submission.trees, desk=desk)
        self._runners[job.id] = runner
        self._claims[job.id] = claims_of(submission.spec, submission.hosts)
        return runner

    def _keep_samples(self) -> "SampleKeeper":
        from ascendrun.head.samplekeeper import SampleKeeper
        if self._samples is None:
            self._samples = SampleKeeper(self._state_dir)
            self._samples.start()
        return self._samples

    def _forget(self, job_id: str) -> None:
        runner = self._runners[job_id]
        if runner.job.unconfirmed:
            return
        self._store.mark_drained(job_id)
        del self._runners[job_id], self._claims[job_id]

    def _on_up(self, link: Link) -> None:
        for runner in tuple(self._runners.values()):
            host = runner.uses(link)
            if host is not None:
                runner.on_up(host)
        self._errands.on_up()
        if self._gatherer is not None:
            self._gatherer.on_up(link)

    def _on_down(self, link: Link, error: AscendrunError) -> None:
        for runner in tuple(self._runners.values()):
            host = runner.uses(link)
            if host is not None:
                runner.on_down(host, link, error)
        self._errands.on_down(link, error)

    # Wishes

    def _serve(self, op: str, header: Mapping[str, Any], answer: Answer) -> None:
        self._busy_mono = time.monotonic()
        serve_wish({"submit": self._submit, "stop": self._stop, "plan": self._errands.plan,
                    "exec": self._errands.execute, "nodes": self._errands.ask_nodes, "survey": self._errands.survey,
                    "sample": self._sample, "grep": self._grep, "status": self._status, "shutdown": self._shutdown,
                    "gather": lambda header, answer: self._gathering().serve(header, answer)},
                   op, header, answer, log=self._state_dir / "controller.log")

    def _submit(self, header: Mapping[str, Any], answer: Answer) -> None:
        from ascendrun.head.submission import add_jobs
        failpoint("submit.before_txn")
        added = add_jobs(self._store, header, now_s=time.time())
        failpoint("submit.after_commit_before_ack")
        for job, submission in added:
            if job.id not in self._runners and not job.is_over:
                self._add_runner(job, submission)
        self._schedule()
        answer({"ok": True, "job": added[0][0].pipeline or added[0][0].id}, b"", True)

    def _stop(self, header: Mapping[str, Any], answer: Answer) -> None:
        from ascendrun.core.job import StopRequested
        stored = self._store.find(str(header["job"]))
        if stored.job.is_over:
            raise Conflict(f"{stored.job.id} has already ended: {stored.job.state.value}")
        self._store.save(stored.job, [("asked", "stop --now" if header["now"] else "stop")], now_s=time.time())
        self.feed(stored.job.id, StopRequested(now=bool(header["now"])))
        self._work_off_events()
        answer({"ok": True, "job": stored.job.id}, b"", True)

    def _grep(self, header: Mapping[str, Any], answer: Answer) -> None:
        from ascendrun.head.grepping import relay
        from ascendrun.head.submission import load_subject
        relay(self._links, load_subject(self._store.find(str(header["job"]))), header, answer, self.post)

    def _sample(self, header: Mapping[str, Any], answer: Answer) -> None:
        self._errands.sample(header, answer, self._keep_samples())

    def _status(self, header: Mapping[str, Any], answer: Answer) -> None:
        live: List[str] = [job_id for job_id, runner in self._runners.items() if not runner.job.is_over]
        hosts = {job_id: {host: runner.link(host).liveness() for host in runner.job.hosts}
                 for job_id, runner in self._runners.items() if runner.job.state.value != "QUEUED"}
        answer({"ok": True, "pid": os.getpid(), "jobs": live, "liveness": hosts}, b"", True)

    def _shutdown(self, header: Mapping[str, Any], answer: Answer) -> None:
        answer({"ok": True}, b"", True)
        self._is_over = True

