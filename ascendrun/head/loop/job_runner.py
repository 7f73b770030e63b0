"""Runner of one job: executes its actions on its nodes, turns their replies into inputs of its lifecycle."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Callable

from ascendrun.core.errors import AscendrunError
from ascendrun.core.hosts import Host
from ascendrun.core.jobs import inputs
from ascendrun.core.jobs.inputs import Action, JobInput
from ascendrun.core.jobs.job import Job, Phase, State
from ascendrun.core.jobs.lifecycle import stop_grace_s
from ascendrun.core.jobs.plan import LaunchPlan, Tree
from ascendrun.core.jobs.reasons import internal_error
from ascendrun.core.node_messages import Failure
from ascendrun.core.reports import NodeReport
from ascendrun.head.agents.connections import Connections, dialled
from ascendrun.head.agents.node_query import NodeQuery
from ascendrun.head.protocol import agent_messages as agent
from ascendrun.head.protocol.agent_events import make_event
from ascendrun.head.protocol.messages import Done, R, Request
from ascendrun.head.protocol.remote import AgentConnection, Reply
from ascendrun.head.spool.clocks import PING_DEADLINE_S, ClockFiles, ClockTracker, Reading
from ascendrun.head.spool.collector import KEEP_BYTES, LogPruner, NodeSpool, SpoolGapError
from ascendrun.head.spool.sample_ingest import SampleIngest, Source
from ascendrun.head.state.state_dir import SPOOL_COMPLETE, make_spool_dir, spool_dir
from ascendrun.head.survey.doctor import Examination, SurveyResults
from ascendrun.head.survey.preflight import evaluate_preflight, preflight_question
from ascendrun.head.survey.staging import TreePush, read_secret_env
from ascendrun.head.survey.submission import build_plan

if TYPE_CHECKING:
    from ascendrun.core.jobfile.spec import JobSpec

CHECK_S = 60.0
STAGE_S = 120.0
GO_S = 30.0
AGAIN_S = 5.0
"""Seconds after an error reply until a request is repeated."""
PROOF_S = 15.0
"""Seconds after the grace period within which the proof of the end must arrive; then the request is repeated."""


@dataclass(frozen=True)
class RunnerContext:
    """Context of a runner: `post` runs a call in the controller's own thread, `feed` gives an event to the lifecycle,
    `drained` reports that every byte of the job has arrived."""

    state_dir: Path
    links: Connections
    post: Callable[[Callable[[], None]], None]
    feed: Callable[[str, JobInput], None]
    drained: Callable[[str], None]
    samples: SampleIngest


class JobRunner:
    """One live job. Every method runs in the controller's thread, except `take_data`."""

    def __init__(
        self, job: Job, *, spec: JobSpec, hosts: tuple[Host, ...], trees: tuple[Tree, ...], context: RunnerContext
    ) -> None:
        self.job = job
        self.spec, self.hosts, self.trees = spec, hosts, trees
        self._by_name = {host.name: host for host in hosts}
        self._names = {dialled(host): host.name for host in reversed(hosts)}  # evaluated for every packet of the logs
        self._context = context
        self._reports: dict[str, NodeReport] = {}
        self._node_query: NodeQuery | None = None
        self._plan: LaunchPlan | None = None
        self._spools: dict[str, NodeSpool] = {}
        self._drained: set[str] = set()
        self._sizes_requested: set[str] = set()
        self._pushes: dict[str, TreePush] = {}
        self._follow_due: dict[str, float] = {}
        self._stop_due: dict[str, float] = {}
        self._clocks, self._clock_files = ClockTracker(self._ping, self._keep_clock), ClockFiles()
        self._pruner = LogPruner(partial(self._release, self.job.run_id))
        self._ahead_s: dict[str, float] = {}

    def link(self, host: str) -> AgentConnection:
        return self._context.links.get(self._by_name[host])

    def uses(self, link: AgentConnection) -> str | None:
        """Return the job's name of the host behind a connection, None: it is not a host of the job."""
        return self._names.get(dialled(link.host))

    def perform(self, action: Action) -> None:
        self._do(partial(self._perform, action))

    def _perform(self, action: Action) -> None:
        if isinstance(action, inputs.QueryNodes):
            self._query()
        elif isinstance(action, (inputs.StageNodes, inputs.PrepareNodes, inputs.StartNodes)):
            steps = {inputs.StageNodes: self._stage, inputs.PrepareNodes: self._prepare, inputs.StartNodes: self._go}
            for host in self.job.hosts:
                steps[type(action)](host)
        elif isinstance(action, inputs.AbortNodes):
            for host in self.job.hosts:
                if self.link(host).is_up:
                    self.link(host).call(agent.Abort(action.run_id), deadline_s=GO_S, done=lambda reply: None)
        elif isinstance(action, inputs.StopNodes):
            for host in action.hosts:
                self._stop(host, now=action.now, grace_s=action.grace_s)

    # Queries and planning

    def _query(self) -> None:
        self._reports, self._plan = {}, None
        self._node_query = NodeQuery(
            self.hosts, self._context.links, self._post, reported=self._take_report, refused=self._refuse
        )
        self._node_query.start()

    def _take_report(self, report: NodeReport) -> None:
        if self.job.state is not State.CHECKING:
            return
        self._reports[report.host] = report
        self._feed(inputs.NodeReported(report.host, report.boot_id, report.clock_offset_s))
        if len(self._reports) == len(self.hosts):
            self._make_plan()

    def _make_plan(self) -> None:
        try:
            plan = build_plan(self.spec, self.hosts, self._reports, self.job, self.trees)
        except AscendrunError as error:
            self._refuse(None, Failure.of(error))
            return
        Examination(
            self.hosts,
            self._reports,
            preflight_question(self.spec),
            plan,
            links=self._context.links,
            post=self._post,
            done=lambda answers: self._judge(plan, answers),
        ).start()

    def _judge(self, plan: LaunchPlan, answers: SurveyResults) -> None:
        """Start the job only if no check failed."""
        if self.job.state is not State.CHECKING or plan.run_id != self.job.run_id:
            return
        result = evaluate_preflight(answers, self._reports, spec=self.spec, plan=plan, now_s=time.time())
        self._feed(inputs.Checked(result.warnings))
        if result.refusal is not None:
            self._feed(inputs.Refused(None, result.refusal, result.hosts))
            return
        self._plan = plan
        ranks = {node.host: tuple(rank.rank for rank in node.ranks) for node in plan.nodes}
        self._feed(inputs.Planned(ranks, plan.world_size))

    # Staging, readiness, GO

    def _stage(self, host: str) -> None:
        push = self._pushes[host] = TreePush(
            self._context.state_dir,
            self.trees,
            query=lambda request, body, then: self._call(host, request, body, deadline_s=STAGE_S, then=then),
            refused=lambda failure: self._refuse(host, failure),
            finished=lambda: self._feed(inputs.NodeStaged(host)),
        )
        push.send_next()

    def staged_bytes(self) -> dict[str, tuple[int, int]]:
        """Return, by host, the bytes of the job's directories that are there, and their total."""
        return {host: (push.done_bytes, push.total_bytes) for host, push in self._pushes.items()}

    def _prepare(self, host: str) -> None:
        from ascendrun.core.jobs.plan import prepare_request

        assert self._plan is not None, "PrepareNodes before the plan"
        node = next(node for node in self._plan.nodes if node.host == host)

        def prepared(reply: Reply[agent.PrepareReply]) -> None:
            if reply.error is None:
                self._feed(inputs.NodeReady(host, reply.message.master_port))
            else:
                self._refuse(host, reply.error)

        request = agent.Prepare.from_header(prepare_request(node, self._plan))
        self._call(host, request, deadline_s=CHECK_S, then=prepared)

    def _go(self, host: str) -> None:
        try:
            secret_env = read_secret_env(self.spec)
        except AscendrunError as error:
            self._refuse(host, Failure.of(error))
            return

        def started(reply: Reply[agent.GoReply]) -> None:
            if reply.error is None:
                self._follow(host)
            elif reply.error.code not in (
                "connection-lost",
                "deadline",
            ):  # else repeated: the host may have received it
                self._refuse(host, reply.error)

        self._call(host, agent.Go(self.job.run_id, self.job.master_port, secret_env), then=started)

    def _refuse(self, host: str | None, failure: Failure) -> None:
        self._feed(inputs.Refused(host, failure.line()))

    # Stopping

    def _stop(self, host: str, *, now: bool, grace_s: float) -> None:
        """Request the stop. The proof is the event `ended`, also if the host never started anything: follow it."""
        self._follow(host)
        self._stop_due[host] = time.monotonic() + grace_s + PROOF_S

        def replied(reply: Reply[Done]) -> None:
            if reply.error is not None:
                self._stop_due[host] = time.monotonic() + AGAIN_S

        self._call(host, agent.Stop(self.job.run_id, now, grace_s), then=replied)

    # Requests that are repeated

    def tick(self) -> None:
        """Repeat due requests; called periodically."""
        now = time.monotonic()
        for host in [host for host, due in self._follow_due.items() if due <= now]:
            del self._follow_due[host]
            if self.link(host).is_up:
                self._follow(host)
        up = [host for host in self._spools if self.link(host).is_up]
        self._clocks.tick(up)
        self._pruner.tick((host, self._spools[host]) for host in up)
        if self.job.state is not State.STOPPING and not self.job.unconfirmed:
            return
        for host in [host for host, due in self._stop_due.items() if due <= now]:
            if self.job.node(host).may_run_processes and self.link(host).is_up:
                self._stop(host, now=self.job.stop_now, grace_s=stop_grace_s(self.job))

    def follow_later(self, host: str, *, wait_s: float = AGAIN_S) -> None:
        self._follow_due.setdefault(host, time.monotonic() + wait_s)

    # Connections and data of nodes

    def on_up(self, host: str) -> None:
        """Handle an agent that responds (again): compare facts first, then resend what it may have missed."""
        if self.job.state is State.CHECKING and self._node_query is not None:
            self._node_query.on_up()
        node = next((node for node in self.job.nodes if node.host == host), None)
        if node is None or self.job.go_sent_at_s is None:
            return
        boot_id = self.link(host).info.boot_id
        if node.may_run_processes and node.boot_id and boot_id != node.boot_id:
            self._feed(inputs.NodeRebooted(host))
            self._follow(host)  # its disk may have survived, with the last lines of the logs
            return
        if self.job.state is State.STARTING and node.phase is Phase.GO_SENT:
            self._go(host)
            return
        if node.may_run_processes and (self.job.state is State.STOPPING or host in self.job.unconfirmed):
            self._stop(host, now=self.job.stop_now, grace_s=stop_grace_s(self.job))
        else:
            self._follow(host)

    def on_down(self, host: str, link: AgentConnection, error: AscendrunError) -> None:
        """Handle a lost connection. Unreachable is not failed: only a job that is still CHECKING takes notice."""
        self._sizes_requested.discard(host)
        if self.job.state is State.CHECKING and self._node_query is not None:
            self._node_query.on_down(link, error)

    def _follow(self, host: str) -> None:
        def replied(reply: Reply[Done]) -> None:
            if reply.error is not None and reply.error.code != "connection-lost":
                self.follow_later(host)

        offsets = {**self.spool(host).offsets(), "samples": self._context.samples.offsets(self._source(host))}
        self._call(host, agent.Follow(self.job.run_id, offsets), then=replied)
        self._clocks.measure(host)
        self.take_events(host)

    def spool(self, host: str) -> NodeSpool:
        if host not in self._spools:
            self._spools[host] = NodeSpool(spool_dir(self._context.state_dir, self.job.id, self.job.attempt) / host)
        return self._spools[host]

    def take_data(self, host: str, data: agent.FileData, body: bytes) -> None:
        """Store bytes of a followed file; called in the connection's thread, the only writer of this host's spool."""
        if data.tag != self.job.run_id:
            return
        if data.file == "samples":
            self._take_samples(host, data, body)
            return
        try:
            self.spool(host).write(data.file, data.generation, data.offset, body)
        except SpoolGapError:
            self._context.post(lambda: self.follow_later(host, wait_s=0.0))
            return
        except OSError:  # the head's disk is full: nothing is lost, the node has it
            self._context.post(lambda: self.follow_later(host))
            return
        if data.file == "events":
            self._context.post(lambda: self.take_events(host))

    def _take_samples(self, host: str, data: agent.FileData, body: bytes) -> None:
        ahead_s = self._ahead_s.get(host) or self.job.node(host).clock_offset_s or 0.0
        if not self._context.samples.take(self._source(host), data.generation, data.offset, body, ahead_s=ahead_s):
            self._context.post(lambda: self.follow_later(host))

    def _source(self, host: str) -> Source:
        return Source(self.job.run_id, host, self.job.id, self.job.attempt, self.spec.sampling.interval_s)

    def take_events(self, host: str) -> None:
        for line in self.spool(host).new_events():
            event = make_event(host, line)
            if event is not None:
                self._feed(event)

    def _ping(self, host: str, on_reply: Callable[[int | None], None]) -> None:
        self.link(host).call(
            agent.Ping(),
            deadline_s=PING_DEADLINE_S,
            done=lambda reply: on_reply(reply.message.at_ns if reply.error is None else None),
        )

    def _release(self, tag: str, host: str, have: Mapping[str, Mapping[str, int]]) -> None:
        """Request the deletion. Called in a thread of the log pruner of attempt `tag`, which may have ended by then."""
        self._context.post(lambda: self._call(host, agent.Release(tag, have, KEEP_BYTES)))

    def _keep_clock(self, host: str, reading: Reading) -> None:
        self._ahead_s[host] = reading.offset_s
        try:
            self._clock_files.keep(self.spool(host).folder, reading)
        except OSError:  # the head's disk is full: the next reading may find space
            return

    # The end: every byte, then the completion marker

    def drain(self) -> None:
        """Compare with the sizes of the nodes' files until all bytes are here; called periodically after the end."""
        if self.job.go_sent_at_s is None:
            self._context.drained(self.job.id)
            return
        for host in self.job.hosts:
            if host not in self._drained and host not in self._sizes_requested and self.link(host).is_up:
                self._sizes_requested.add(host)
                self._call(host, agent.Files(self.job.run_id), then=partial(self._compare, host))
        if self._drained == set(self.job.hosts):
            self._clocks.tick(())
            folder = spool_dir(self._context.state_dir, self.job.id, self.job.attempt)
            make_spool_dir(folder / self.job.hosts[0])
            (folder / SPOOL_COMPLETE).touch(0o600)
            self._context.drained(self.job.id)

    def _compare(self, host: str, reply: Reply[agent.FilesReply]) -> None:
        self._sizes_requested.discard(host)
        if reply.error is not None:
            return
        sizes = dict(reply.message.files)
        lacks_samples = self._context.samples.lacks(self._source(host), sizes.pop("samples", {}))
        if lacks_samples or self.spool(host).differs_from(sizes):
            self.follow_later(host)
            return
        self._drained.add(host)
        self._context.samples.finish(self._source(host))
        self._call(host, agent.Unfollow(self.job.run_id))

    # Helpers

    def _post(self, call: Callable[[], None]) -> None:
        self._context.post(lambda: self._do(call))

    def _do(self, call: Callable[[], None]) -> None:
        """Run a call. An internal error before GO ends the job: without a reply it would wait indefinitely."""
        try:
            call()
        except Exception as error:  # the reason of the job; raised again for the log
            if self.job.go_sent_at_s is None and not self.job.is_terminal:
                log = str(self._context.state_dir / "controller.log")
                self._feed(inputs.Refused(None, internal_error(f"{type(error).__name__}: {error}", log)))
            raise

    def _feed(self, event: JobInput) -> None:
        self._context.feed(self.job.id, event)

    def _call(
        self,
        host: str,
        request: Request[R],
        body: bytes = b"",
        *,
        deadline_s: float = GO_S,
        then: Callable[[Reply[R]], None] = lambda reply: None,
    ) -> None:
        """Send a request; `then` runs in the controller's thread, unless the job has moved on to another attempt.

        Without `then` the reply changes nothing: an event is the proof, or the request is repeated.
        """
        attempt = self.job.attempt

        def take(reply: Reply[R]) -> None:
            if self.job.attempt == attempt:
                then(reply)

        def done(reply: Reply[R]) -> None:
            self._post(partial(take, reply))

        self.link(host).call(request, body, deadline_s=deadline_s, done=done)

    def begin_attempt(self) -> None:
        """Forget the data of the old attempt after the record has moved to a new attempt."""
        self._spools, self._drained, self._sizes_requested = {}, set(), set()
        self._follow_due, self._stop_due = {}, {}
        self._clocks, self._clock_files = ClockTracker(self._ping, self._keep_clock), ClockFiles()
        self._pruner = LogPruner(partial(self._release, self.job.run_id))
