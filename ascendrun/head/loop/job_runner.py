"""Runner of one job: executes its actions on its nodes, turns their replies into inputs of its lifecycle."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

from ascendrun.core.dataclass import dataclass
from ascendrun.core.errors import AscendrunError
from ascendrun.core.events import Event
from ascendrun.core.hosts import Host
from ascendrun.core.jobs import inputs
from ascendrun.core.jobs.checkpoints import Listings, OnlyCopy, ResumePoint, incomplete
from ascendrun.core.jobs.draft import stop_grace_s
from ascendrun.core.jobs.inputs import Action, JobInput
from ascendrun.core.jobs.job import Cause, Job, Phase, State
from ascendrun.core.jobs.plan import LaunchPlan, Tree
from ascendrun.core.jobs.reasons import internal_error
from ascendrun.core.jobs.restart import Kind
from ascendrun.core.node_messages import Failure
from ascendrun.core.reports import NodeReport, shared_homes
from ascendrun.core.retention import Retention
from ascendrun.head.agents.checkpoint_query import choose, query_checkpoints
from ascendrun.head.agents.connections import Connections, dialled
from ascendrun.head.agents.node_query import NodeQuery
from ascendrun.head.loop.attempt_files import AttemptFiles, AttemptName, FilesContext, incomplete_attempts
from ascendrun.head.protocol import agent_messages as agent
from ascendrun.head.protocol.agent_events import make_event
from ascendrun.head.protocol.messages import Done, R, Request
from ascendrun.head.protocol.remote import AgentConnection, Reply, boot_s
from ascendrun.head.spool.pull_limits import PullLimits
from ascendrun.head.spool.sample_ingest import SampleIngest
from ascendrun.head.state.job_files import copy_for_nodes
from ascendrun.head.state.state_dir import claim_spool_dir, write_placement
from ascendrun.head.survey.doctor import Examination, SurveyResults
from ascendrun.head.survey.preflight import evaluate_preflight, preflight_question
from ascendrun.head.survey.staging import TreePush, push_once_per_home, read_secret_env
from ascendrun.head.survey.submission import build_plan
from ascendrun.node.records import EVENTS
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.core.jobfile.spec import JobSpec

CHECK_S = 60.0
STAGE_S = 120.0
GO_S = 30.0
PASSING = frozenset(("held", "port-taken"))
"""Codes of a node's refusal because something else uses devices or ports: the job tries again later."""
AGAIN_S = 5.0
"""Seconds after an error reply until a request is repeated."""
END_AGAIN_S = 1.0
RENEW_S = 10.0
"""Interval in which leases are renewed."""
LEASE_MARGIN_S = 10.0
PROOF_S = 15.0
"""Seconds after the grace period within which the proof of the end must arrive; then the request is repeated."""


@dataclass(frozen=True)
class RunnerContext:
    """Context of a runner: `post` runs a call in the controller's own thread, `feed` gives an event to the lifecycle,
    `drained` reports that every byte of the job has arrived, `record` stores events that change nothing. `idle_memory`
    and `note_memory`: of head/loop/machines.Machines."""

    state_dir: Path
    links: Connections
    post: Callable[[Callable[[], None]], None]
    feed: Callable[[str, JobInput], None]
    drained: Callable[[str], None]
    samples: SampleIngest
    record: Callable[[str, Sequence[Event]], None]
    retention: Retention
    idle_memory: Callable[[Host], Mapping[int, int]]
    note_memory: Callable[[Host, Mapping[int, int], Text | None], None]


@dataclass
class HeadLease:
    """What the head knows of the leases of an attempt (node/head_lease.py), by host. `made_s`, `renewed_s`: seconds
    since boot; an earlier controller may have renewed a lease until `made_s`. `clocks`: what the nodes reported last.
    `due`: when to renew, monotonic."""

    made_s: float = field(default_factory=boot_s)
    renewed_s: dict[str, float] = field(default_factory=dict)
    clocks: dict[str, int] = field(default_factory=dict)
    due: dict[str, float] = field(default_factory=dict)

    def forget(self, host: str) -> None:
        """Ask for the clock again: the host was away."""
        self.clocks.pop(host, None)
        self.due.pop(host, None)

    def has_expired(self, host: str, fence_s: float, now_s: float) -> bool:
        """Return whether the ranks have ended by the clock of the host, which may be slower by 2 %."""
        return now_s - self.renewed_s.get(host, self.made_s) > fence_s * 1.02 + LEASE_MARGIN_S


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
        self._copy = copy_for_nodes(context.state_dir, job.id)
        self._pushes: dict[str, TreePush] = {}
        self._stop_due: dict[str, float] = {}
        self._ends: dict[str, inputs.NodeEnded] = {}
        self._end_due: dict[str, float] = {}
        self._lease = HeadLease()
        self._limits = PullLimits(context.state_dir / "jobs" / job.id, context.retention)
        self._files_context = FilesContext(
            context.state_dir,
            context.post,
            self.link,
            context.samples,
            context.retention,
            self._limits,
            spec.sampling.interval_s,
            self._clock_offset_s,
        )
        self._files = self._files_of_attempt()
        earlier = incomplete_attempts(job.id, job.run, self._files_context, before=job.attempt, hosts=self._by_name)
        self._earlier = tuple(earlier)

    @property
    def placed(self) -> tuple[Host, ...]:
        """The hosts of the present attempt, in the order of their node ranks."""
        return tuple(self._by_name[host] for host in self.job.hosts)

    def link(self, host: str) -> AgentConnection:
        return self._context.links.get(self._by_name[host])

    @property
    def is_pull_paused(self) -> bool:
        """Whether metrics and logs of the job stay on the nodes."""
        return self._limits.pause is not None

    def uses(self, link: AgentConnection) -> str | None:
        """Return the job's name of the host behind a connection, None: it is not a host of the job."""
        return self._names.get(dialled(link.host))

    def follows(self, tag: str) -> bool:
        """Return whether files of this attempt are still copied. Any thread."""
        return any(files.name.tag == tag for files in (self._files, *self._earlier))

    def _files_of_attempt(self) -> AttemptFiles:
        name = AttemptName(self.job.id, self.job.run, self.job.attempt)
        return AttemptFiles(name, self._files_context, on_records=self._take_records)

    def _clock_offset_s(self, host: str) -> float:
        return next((node.clock_offset_s or 0.0 for node in self.job.nodes if node.host == host), 0.0)

    def started_links(self) -> Iterator[AgentConnection]:
        """Yield the connections to hosts where processes of the job may live."""
        held = self.job.held_hosts
        return (self.link(node.host) for node in self.job.nodes if node.may_run_processes or node.host in held)

    def abandon(self) -> None:
        """Ignore whatever still arrives: another runner has the job."""
        self._context = replace(self._context, feed=lambda job_id, event: None, drained=lambda job_id: None)

    def perform(self, action: Action) -> None:
        self._do(partial(self._perform, action))

    def _perform(self, action: Action) -> None:
        if isinstance(action, inputs.QueryNodes):
            self._query()
        elif isinstance(action, inputs.StageNodes):
            self._stage()
        elif isinstance(action, (inputs.PrepareNodes, inputs.StartNodes)):
            step = {inputs.PrepareNodes: self._prepare, inputs.StartNodes: self.send_go}[type(action)]
            if isinstance(action, inputs.StartNodes):
                self._record_placement()
            for host in self.job.hosts:
                step(host)
        elif isinstance(action, inputs.AbortNodes):
            for host in action.hosts:
                if self.link(host).is_up:
                    self.link(host).call(agent.Abort(action.run_id), deadline_s=GO_S, done=lambda reply: None)
        elif isinstance(action, inputs.StopNodes):
            for host in action.hosts:
                self._stop(host)

    def _record_placement(self) -> None:
        folder = self._files.name.spool_dir(self._context.state_dir)
        with suppress(OSError):  # no space: the record of the job has it
            claim_spool_dir(folder, self.job.run_id)
            write_placement(folder, self.job.hosts)

    # Queries and planning

    def _query(self) -> None:
        self._reports, self._plan = {}, None
        attempt = self.job.attempt

        def refused(host: str, failure: Failure) -> None:
            if self.job.attempt == attempt:
                self._refuse(host, failure, is_away=True)

        self._node_query = NodeQuery(
            self.placed, self._context.links, self._post, reported=partial(self._take_report, attempt), refused=refused
        )
        self._node_query.start()

    def _take_report(self, attempt: int, report: NodeReport) -> None:
        if self.job.state is not State.CHECKING or self.job.attempt != attempt:
            return
        self._reports[report.host] = report
        identity = {"machine_key": report.machine_key, "incarnation": report.incarnation}
        self._feed(inputs.NodeReported(report.host, report.boot_id, report.clock_offset_s, **identity))
        if len(self._reports) == len(self.job.hosts):
            query_checkpoints(
                self.spec,
                self.job,
                self.placed,
                self._reports,
                links=self._context.links,
                post=self._post,
                done=partial(self._take_checkpoints, self.job.run_id),
            )

    def _take_checkpoints(self, run_id: str, listings: Listings) -> None:
        """Choose what the attempt resumes from. Without the lists of all hosts the program decides by itself."""
        if self.job.state is not State.CHECKING or run_id != self.job.run_id:
            return
        chosen = choose(self.job, self.job.hosts, listings)
        if isinstance(chosen, OnlyCopy):
            self._feed(inputs.ResumeLost(chosen.step, chosen.hosts))
            return
        if chosen is not None:
            self._feed(inputs.ResumeChosen(chosen, tuple(incomplete(listings, chosen.step))))
        self._make_plan(chosen)

    def _make_plan(self, resume: ResumePoint | None) -> None:
        try:
            resumed = replace(self.job, resume=resume)
            plan = build_plan(self.spec, self.placed, self._reports, resumed, self.trees)
        except AscendrunError as error:
            self._refuse(None, Failure.of(error))
            return
        Examination(
            self.placed,
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

        known = {host.name: self._context.idle_memory(host) for host in self.placed}
        result = evaluate_preflight(
            answers, self._reports, spec=self.spec, plan=plan, now_s=time.time(), idle_memory=known
        )
        for host in self.placed:
            taken = result.not_released.get(host.name)
            memory = result.idle_memory.get(host.name, {})
            self._context.note_memory(host, memory, None if taken is None else taken.message)
        self._feed(inputs.Checked(result.warnings))
        if result.held is not None:
            self._feed(inputs.Held(result.hosts[0], result.held.message, result.held.values.get("run")))
            return
        if result.refusal is not None:
            self._feed(inputs.Refused(None, result.refusal, result.hosts))
            return
        self._plan = plan
        ranks = {node.host: tuple(rank.rank for rank in node.ranks) for node in plan.nodes}
        self._feed(inputs.Planned(ranks, plan.world_size))

    # Staging, readiness, GO

    def _stage(self) -> None:
        self._pushes = {}
        push_once_per_home(self.job.hosts, shared_homes(self._reports), self._make_push)

    def _make_push(self, host: str, then: Callable[[], None]) -> None:
        attempt = self.job.attempt

        def staged() -> None:
            if self.job.attempt == attempt:
                self._feed(inputs.NodeStaged(host))
                then()

        push = self._pushes[host] = TreePush(
            self._context.state_dir,
            self.trees,
            query=lambda request, body, then: self._call(host, request, body, deadline_s=STAGE_S, then=then),
            refused=lambda failure: self._refuse(host, failure),
            finished=staged,
        )
        push.send_next()

    def stage_spare(self, host: str, done: Callable[[Failure | None], None]) -> None:
        """Send the job's directories to a spare; `done` gets why that failed, None: they are there."""
        TreePush(
            self._context.state_dir,
            self.trees,
            query=lambda request, body, then: self._call(host, request, body, deadline_s=STAGE_S, then=then),
            refused=done,
            finished=partial(done, None),
        ).send_next()

    def staged_bytes(self) -> dict[str, tuple[int, int]]:
        """Return, by host, the bytes of the job's directories that are there, and their total."""
        return {host: (push.done_bytes, push.total_bytes) for host, push in self._pushes.items()}

    def _prepare(self, host: str) -> None:
        from ascendrun.core.jobs.plan import prepare_request

        assert self._plan is not None, "PrepareNodes before the plan"
        node = next(node for node in self._plan.nodes if node.host == host)

        def prepared(reply: Reply[agent.PrepareReply]) -> None:
            if reply.error is None:
                self._note_pointer(host, reply.message.pointer)
                hccl = reply.message.hccl if self._plan is not None and self._plan.hccl_bases else None
                self._feed(inputs.NodeReady(host, reply.message.master_port, hccl))
            elif reply.error.code == "stage-files-missing":
                self._feed(inputs.StageFilesMissing(host))
            else:
                self._refuse(host, reply.error)

        copy = None if self._copy is None else {**self._copy, "placement": list(self.job.hosts)}
        files, may_lack = self.job.node(host).replaces, self.job.request.may_lack_files
        more = {} if files is None else {"work_of": files.machine_key, "may_lack_work": may_lack}
        request = agent.Prepare.from_header({**prepare_request(node, self._plan), **more, "job": copy})
        self._call(host, request, deadline_s=CHECK_S, then=prepared)

    def _note_pointer(self, host: str, pointer: Mapping[str, Any] | None) -> None:
        if pointer is not None:
            values = {"path": pointer["path"], "before": pointer["before"], "step": pointer["step"]}
            event = Event("checkpoint-pointer-repaired", values, (host,), attempt=self.job.attempt, at_s=time.time())
            self._context.record(self.job.id, [event])

    def send_go(self, host: str) -> None:
        try:
            secret_env = read_secret_env(self.spec)
        except AscendrunError as error:
            self._refuse(host, Failure.of(error))
            return

        def started(reply: Reply[agent.GoReply]) -> None:
            if reply.error is None:
                self._files.follow(host)
            elif reply.error.code not in (
                "connection-lost",
                "deadline",
            ):  # else repeated: the host may have received it
                self._refuse(host, reply.error)

        self._lease.renewed_s[host] = boot_s()
        request = agent.Go(self.job.run_id, self.job.master_port, secret_env, self.job.hccl_base)
        self._call(host, request, then=started)

    def _refuse(self, host: str | None, failure: Failure, *, is_away: bool = False) -> None:
        if host is not None and (failure.code in PASSING or (failure.code == "disk-full" and self._awaits_space())):
            owner = failure.message.values.get("tag") if isinstance(failure.message, Text) else None
            self._feed(inputs.Held(host, failure.message, owner))
        else:
            self._feed(inputs.Refused(host, failure.line(), is_away=is_away))

    def _awaits_space(self) -> bool:
        """Return whether the attempt before failed for its storage: the restart waits until there is space again."""
        before = self.job.past[-1].failure if self.job.past else None
        return before is not None and before.kind is Kind.STORAGE

    # Stopping

    def _stop(self, host: str) -> None:
        """Request the stop. The proof is the event `ended`, also if the host never started anything: follow it."""
        now, grace_s, hung = self.job.stop_now, stop_grace_s(self.job), self.job.cause is Cause.HUNG
        self._files.follow(host)
        self._stop_due[host] = time.monotonic() + grace_s + PROOF_S

        def replied(reply: Reply[Done]) -> None:
            if reply.error is not None:
                self._stop_due[host] = time.monotonic() + AGAIN_S

        events = self._files.spool(host).offsets().get(EVENTS, {})
        self._call(host, agent.Stop(self.job.run_id, now, grace_s, events, hung), then=replied)

    # Requests that are repeated

    def tick(self) -> None:
        """Repeat due requests; called periodically."""
        now = time.monotonic()
        for host in self._ends:
            if self._end_due[host] <= now and self.link(host).is_up:
                self._confirm_end(host)
        for files in (self._files, *self._earlier):
            files.tick()
        self._earlier = tuple(files for files in self._earlier if not files.is_complete(files.hosts))
        self._check_limits()
        self._renew_leases(now)
        if self.job.state is not State.STOPPING and not self.job.held_hosts:
            return
        for host in [host for host, due in self._stop_due.items() if due <= now]:
            if self.job.node(host).may_run_processes and self.link(host).is_up:
                self._stop(host)

    def _check_limits(self) -> None:
        """Pause or resume the copying when the job has used its share of the disk, or the disk is nearly full."""
        if self.job.go_sent_at_s is None or not self._limits.look():
            return
        pause, attempt = self._limits.pause, self.job.attempt
        code, values = ("pull-resumed", {}) if pause is None else ("pull-paused", {"cause": pause.value})
        self._context.record(self.job.id, [Event(code, values, attempt=attempt, at_s=time.time())])
        for files in (self._files, *self._earlier):
            files.follow_again()

    def _renew_leases(self, now: float) -> None:
        """Renew the leases of the nodes that end their ranks without the head; not of a job that is being stopped."""
        if self.job.policy.on_unreachable_node != "fence" or self.job.state not in (State.STARTING, State.RUNNING):
            return
        for node in self.job.nodes:
            if node.may_run_processes and self._lease.due.get(node.host, 0.0) <= now and self.link(node.host).is_up:
                self._renew(node.host, now)

    def _renew(self, host: str, now: float) -> None:
        at_ns = self._lease.clocks.get(host)
        self._lease.due[host] = now + RENEW_S
        if at_ns is not None:
            self._lease.renewed_s[host] = boot_s()

        def replied(reply: Reply[agent.RenewReply]) -> None:
            if reply.error is None:
                self._lease.clocks[host] = reply.message.at_ns
                if at_ns is None:
                    self._lease.due[host] = 0.0

        self._call(host, agent.Renew(self.job.run_id, at_ns), deadline_s=RENEW_S, then=replied)

    def fenced(self) -> frozenset[str]:
        """Return the hosts whose leases have expired: no process of the attempt is left there."""
        policy, now_s = self.job.policy, boot_s()
        if policy.on_unreachable_node != "fence":
            return frozenset()
        hosts = (node.host for node in self.job.nodes if node.may_run_processes)
        return frozenset(host for host in hosts if self._lease.has_expired(host, policy.fence_after_s, now_s))

    def follow_soon(self, host: str) -> None:
        self._files.follow_later(host, wait_s=0.0)

    # Connections and data of nodes

    def on_up(self, host: str) -> None:
        """Handle an agent that responds (again), after the comparison of head/loop/machines.py: resend what it may have
        missed."""
        if self.job.state is State.CHECKING and self._node_query is not None:
            self._node_query.on_up()
        for files in self._earlier:
            if host in files.hosts:
                files.follow(host)
        node = next((node for node in self.job.nodes if node.host == host), None)
        if node is None or self.job.go_sent_at_s is None:
            return
        boot_id = self.link(host).info.boot_id
        if node.may_run_processes and node.boot_id and boot_id != node.boot_id:
            return  # nothing must be started there
        if host in self._ends:
            self._confirm_end(host)
        if self.job.state is State.STARTING and node.phase is Phase.GO_SENT:
            self.send_go(host)
            return
        if node.may_run_processes and (self.job.state is State.STOPPING or host in self.job.unconfirmed):
            self._stop(host)
        else:
            self._files.follow(host)

    def on_down(self, host: str, link: AgentConnection, error: AscendrunError) -> None:
        """Handle a lost connection. Unreachable is not failed: only a job that is still CHECKING takes notice."""
        self._lease.forget(host)
        for files in (self._files, *self._earlier):
            files.on_down(host)
        if self.job.state is State.CHECKING and self._node_query is not None:
            self._node_query.on_down(link, error)

    def take_data(self, host: str, data: agent.FileData, body: bytes) -> None:
        """Store bytes of a followed file; called in the connection's thread, the only writer of this host's spool."""
        for files in (self._files, *self._earlier):
            if files.name.tag == data.tag:
                files.take_data(host, data, body)

    def read_records(self, host: str) -> None:
        """Handle the node's records that are on the head already."""
        self._files.take_records(host)

    def _take_records(self, host: str, lines: Sequence[Mapping[str, Any]]) -> None:
        for line in lines:
            event = make_event(host, line)
            if isinstance(event, inputs.NodeEnded):
                self._ends[host] = event
                self._confirm_end(host)
            elif isinstance(event, inputs.LeftoversGone) and host in self._ends:
                self._ends[host] = replace(self._ends[host], leftovers=())
            elif event is not None:
                self._feed(event)

    def _confirm_end(self, host: str) -> None:
        """Ask the node whether the attempt has ended: a rank can write the record too. Repeated until it is so and
        every record is here, since the last ones correct what a rank wrote."""
        self._end_due[host] = time.monotonic() + GO_S

        def replied(reply: Reply[agent.ProcessesReply]) -> None:
            self._end_due[host] = time.monotonic() + AGAIN_S
            if reply.error is not None:
                return
            left = [process for process in reply.message.processes if not process.killed]
            if not left and (reply.message.processes or not reply.message.supervisor):
                if self._files.spool(host).differs_from({EVENTS: reply.message.events}):
                    self._end_due[host] = time.monotonic() + END_AGAIN_S
                else:
                    self.read_records(host)
                    self.take_end(host)
            elif reply.message.supervisor:
                self._end_due[host] = time.monotonic() + END_AGAIN_S
            else:
                self._call(host, agent.Stop(self.job.run_id, True, 0.0))

        self._call(host, agent.Processes(self.job.run_id), then=replied)

    def take_end(self, host: str) -> None:
        """Believe the newest record of the end, if there is one: the node has no process of the attempt."""
        if host in self._ends:
            self._feed(self._ends.pop(host))

    # The end: every byte, then the completion marker

    def drain(self) -> None:
        """Compare with the sizes of the nodes' files until all bytes are here; called periodically after the end."""
        is_started = self.job.go_sent_at_s is not None
        if is_started and not self._files.is_complete(self.job.hosts, growing=self.job.held_hosts):
            return
        if not self._earlier:
            self._context.drained(self.job.id)

    def has_all_files(self, *, but: Collection[str]) -> bool:
        """Return whether every byte of the ended attempt is here, whatever the hosts `but` still have; else request
        what is missing."""
        is_complete = self._files.is_complete(self.job.hosts, growing=self.job.held_hosts)
        return is_complete or self._files.has_all_of(set(self.job.hosts) - set(but))

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
        """Begin with nothing after the record has moved to a new attempt; files of the old one are still copied."""
        if self._files.hosts:
            self._earlier += (self._files,)
        self._files = self._files_of_attempt()
        self._stop_due, self._ends, self._end_due = {}, {}, {}
        self._lease = HeadLease()
