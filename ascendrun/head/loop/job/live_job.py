"""A live job with its hosts: the calls to them and the inputs of its lifecycle, for each part of its runner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Callable

from ascendrun.core.events import Event
from ascendrun.core.hosts import Host
from ascendrun.core.jobs import inputs
from ascendrun.core.jobs.inputs import JobInput
from ascendrun.core.jobs.job import Job
from ascendrun.core.jobs.reasons import because
from ascendrun.core.jobs.restart import Kind
from ascendrun.core.node_messages import Failure
from ascendrun.head.agents.connections import dialled
from ascendrun.head.protocol.messages import R, Request
from ascendrun.head.protocol.remote import AgentConnection, Reply
from ascendrun.head.survey.submission import Submission, claims_of

if TYPE_CHECKING:
    from ascendrun.head.loop.live_jobs import LiveJobs

REPLY_S = 30.0
AGAIN_S = 5.0
"""Seconds after an error reply until a request is repeated."""
PASSING = frozenset(("held", "port-taken"))
"""Codes of a node's refusal because something else uses devices or ports: the job tries again later."""


class LiveJob:
    """One live job; as Links, with its calls. `jobs`: all. `claims`: what it uses of each host of its pool."""

    def __init__(self, job: Job, submission: Submission, jobs: LiveJobs) -> None:
        self.job, self.jobs, self.context = job, jobs, jobs.context
        self._is_abandoned = False
        self.spec, self.trees = submission.spec, submission.trees
        self.set_hosts(submission)

    def set_hosts(self, submission: Submission) -> None:
        """Take the hosts of its pool, or all that an engine has granted."""
        self.submission, self.hosts = submission, submission.hosts
        self.claims = claims_of(self.spec, self.hosts)
        self._by_name = {host.name: host for host in self.hosts}
        # evaluated for every packet of the logs
        self._names = {dialled(host): host.name for host in reversed(self.hosts)}

    @property
    def placed(self) -> tuple[Host, ...]:
        """The hosts of the present attempt, in the order of their node ranks."""
        return tuple(self._by_name[host] for host in self.job.hosts)

    def get(self, host: Host) -> AgentConnection:
        return self.context.links.get(host)

    def link(self, host: str) -> AgentConnection:
        return self.context.links.get(self._by_name[host])

    def uses(self, link: AgentConnection) -> str | None:
        """Return the job's name of the host behind a connection, None: it is not a host of the job."""
        return self._names.get(dialled(link.host))

    def started_links(self) -> Iterator[AgentConnection]:
        """Yield the connections to hosts where processes of the job may live."""
        held = self.job.held_hosts
        return (self.link(node.host) for node in self.job.nodes if node.may_run_processes or node.host in held)

    def abandon(self) -> None:
        """Ignore whatever still arrives: another runner has the job."""
        self._is_abandoned = True

    def feed(self, event: JobInput) -> None:
        if not self._is_abandoned:
            self.context.steps.feed(self.job.id, event)

    def record(self, events: Sequence[Event]) -> None:
        """Store events that change nothing."""
        self.context.steps.record(self.job.id, events)

    def drained(self) -> None:
        """Report that every byte of the job has arrived."""
        if not self._is_abandoned:
            self.jobs.forget(self.job.id)

    def refuse(self, host: str | None, failure: Failure, *, is_away: bool = False) -> None:
        """Report that the attempt cannot start, or cannot start now. `host` None: no host is the reason."""
        if host is not None and (failure.code in PASSING or (failure.code == "disk-full" and self._awaits_space())):
            self.feed(inputs.Held(host, failure.message, failure.owner))
        else:
            self.feed(inputs.Refused(host, failure.line(), is_away=is_away))

    def _awaits_space(self) -> bool:
        """Return whether the attempt before failed for its storage: the restart waits until there is space again."""
        before = self.job.past[-1].failure if self.job.past else None
        return before is not None and before.kind is Kind.STORAGE

    def call(
        self,
        host: str,
        request: Request[R],
        body: bytes = b"",
        *,
        deadline_s: float = REPLY_S,
        then: Callable[[Reply[R]], None] = lambda reply: None,
    ) -> None:
        """Send a request; `then` runs in the controller's thread, unless the job has moved on to another attempt.

        Without `then` the reply changes nothing: an event is the proof, or the request is repeated.
        """
        attempt = self.job.attempt

        def take(reply: Reply[R]) -> None:
            if self.job.attempt == attempt:
                then(reply)

        self.link(host).call(request, body, deadline_s=deadline_s, done=lambda reply: self.post(partial(take, reply)))

    def post(self, call: Callable[[], None]) -> None:
        """Run a call for this job in the controller's thread."""
        self.context.links.post(lambda: self.do(call))

    def do(self, call: Callable[[], None]) -> None:
        """Run a call. An internal error before GO ends the job: without a reply it would wait indefinitely."""
        try:
            call()
        except Exception as error:  # the reason of the job; raised again for the log
            if self.job.go_sent_at_s is None and not self.job.is_terminal:
                log = str(self.context.state_dir / "controller.log")
                why = because("internal-error", why=f"{type(error).__name__}: {error}", log=log)
                self.feed(inputs.Refused(None, why))
            raise
