"""Runner of one job: executes its actions on its nodes, turns their replies into inputs of its lifecycle."""

from __future__ import annotations

import time
from functools import partial

from ascendrun.core.errors import AscendrunError
from ascendrun.core.jobs import inputs
from ascendrun.core.jobs.inputs import Action
from ascendrun.core.jobs.job import Job, Phase, State
from ascendrun.head.loop.job.copies import JobCopies
from ascendrun.head.loop.job.ending import Ending
from ascendrun.head.loop.job.leases import Leases
from ascendrun.head.loop.job.live_job import REPLY_S, JobContext, LiveJob
from ascendrun.head.loop.job.start import JobStart
from ascendrun.head.loop.job.survey import JobSurvey
from ascendrun.head.protocol import agent_messages as agent
from ascendrun.head.protocol.remote import AgentConnection
from ascendrun.head.survey.submission import Submission


class JobRunner(LiveJob):
    """One live job with the parts of its work. `leases` and `ending` are of the present attempt.

    Every method runs in the controller's thread, except those of `copies` that say otherwise.
    """

    def __init__(self, job: Job, submission: Submission, context: JobContext) -> None:
        super().__init__(job, submission, context)
        self.copies = JobCopies(self, lambda host, lines: self.ending.take_records(host, lines))
        self.survey = JobSurvey(self)
        self.start = JobStart(self, self.survey, self.copies)
        self.leases, self.ending = Leases(self), Ending(self, self.copies)

    def begin_attempt(self) -> None:
        """Begin with nothing after the record has moved to a new attempt; files of the old one are still copied."""
        self.copies.begin_attempt()
        self.leases, self.ending = Leases(self), Ending(self, self.copies)

    def perform(self, action: Action) -> None:
        self.do(partial(self._perform, action))

    def _perform(self, action: Action) -> None:
        if isinstance(action, inputs.QueryNodes):
            self.survey.start()
        elif isinstance(action, inputs.StageNodes):
            self.start.stage()
        elif isinstance(action, inputs.PrepareNodes):
            for host in self.job.hosts:
                self.start.prepare(host)
        elif isinstance(action, inputs.StartNodes):
            self.start.record_placement()
            for host in self.job.hosts:
                self.send_go(host)
        elif isinstance(action, inputs.AbortNodes):
            for host in action.hosts:
                if self.link(host).is_up:
                    abort = agent.Abort(action.run_id)
                    self.link(host).call(abort, deadline_s=REPLY_S, done=lambda reply: None)
        elif isinstance(action, inputs.StopNodes):
            for host in action.hosts:
                self.ending.stop(host)

    def send_go(self, host: str) -> None:
        self.start.go(host, self.leases)

    def tick(self) -> None:
        """Repeat due requests; called periodically."""
        now = time.monotonic()
        self.copies.tick()
        self.leases.renew_due(now)
        self.ending.tick(now)

    def on_up(self, host: str) -> None:
        """Handle an agent that responds (again), after the comparison of head/loop/machine/reconcile.py: resend what
        it may have missed."""
        self.survey.on_up()
        self.copies.on_up(host)
        node = next((node for node in self.job.nodes if node.host == host), None)
        if node is None or self.job.go_sent_at_s is None:
            return
        boot_id = self.link(host).info.boot_id
        if node.may_run_processes and node.boot_id and boot_id != node.boot_id:
            return  # nothing must be started there
        self.ending.on_up(host)
        if self.job.state is State.STARTING and node.phase is Phase.GO_SENT:
            self.send_go(host)
        elif node.may_run_processes and (self.job.state is State.STOPPING or host in self.job.unconfirmed):
            self.ending.stop(host)
        else:
            self.copies.present.follow(host)

    def on_down(self, host: str, link: AgentConnection, error: AscendrunError) -> None:
        """Handle a lost connection. Unreachable is not failed: only a job that is still CHECKING takes notice."""
        self.leases.forget(host)
        self.copies.on_down(host)
        self.survey.on_down(link, error)
