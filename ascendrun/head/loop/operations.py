"""Requests about hosts instead of jobs: run a command, query reports, take samples, plan without a start."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Union

from ascendrun.core.errors import AscendrunError, ConflictError, PreflightError, Problem, UnreachableError
from ascendrun.core.hosts import Host
from ascendrun.core.node_messages import Failure
from ascendrun.head.agents.connections import Connections, ask, dialled, post_later
from ascendrun.head.protocol import agent_messages as agent
from ascendrun.head.protocol import control_messages as messages
from ascendrun.head.protocol.agent_bootstrap import is_permanent
from ascendrun.head.protocol.control_socket import Answer
from ascendrun.head.protocol.messages import Request
from ascendrun.head.protocol.remote import AgentConnection, Reply
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.core.jobs.checkpoints import Listings
    from ascendrun.core.reports import NodeReport
    from ascendrun.head.agents.node_query import NodeQuery
    from ascendrun.head.spool.sample_ingest import SampleIngest
    from ascendrun.head.survey.doctor import SurveyOperation
    from ascendrun.head.survey.submission import Submission

EXEC_BYTES = 1 << 20
"""Output bytes of one host that are kept; the rest is dropped and reported as dropped."""
STACKS_S = 25.0
PROCESS_S = 15.0
USAGE_S = 60.0
"""Seconds in which a node adds up its files; after that they are unknown."""
TOOL_S = 8.0
"""Seconds that a tool may take on a sampled host; the agent replies a moment later."""
MARGIN_S = 2.0

Operation = Union["HostOperation", "NodeQuery", "SurveyOperation"]


class Operations:
    """Operations on hosts. Use from the controller's thread."""

    def __init__(self, links: Connections) -> None:
        self.links = links
        self._running: list[Operation] = []

    @property
    def is_busy(self) -> bool:
        return bool(self._running)

    def on_up(self) -> None:
        for operation in tuple(self._running):
            operation.on_up()

    def on_down(self, link: AgentConnection, error: AscendrunError) -> None:
        for operation in tuple(self._running):
            operation.on_down(link, error)
        self.sweep()

    def run(self, operation: Operation) -> None:
        """Run an operation; it calls `sweep_later` after each reply."""
        self._running.append(operation)
        operation.start()

    def sweep_later(self) -> None:
        self.links.post(self.sweep)

    def sweep(self) -> None:
        self._running = [operation for operation in self._running if not operation.is_done]
        if not any(isinstance(operation, _Exec) for operation in self._running):
            self.links.start_agents()

    def execute(self, request: messages.Exec, answer: Answer) -> None:
        """Run the command on every host; send one reply for each, in order of arrival."""
        self.run(_Exec(request, self, answer))

    def query_nodes(self, request: messages.Nodes, answer: Answer) -> None:
        """Send the report of every host, or the reason of its absence, in order of arrival."""
        from ascendrun.head.agents.node_query import NodeQuery

        waiting = {host.name for host in request.hosts}

        def reply(message: messages.NodeReply) -> None:
            waiting.discard(message.host)
            answer(message, b"", not waiting)
            self.sweep_later()

        hosts = {host.name: host for host in request.hosts}

        def reported(report: NodeReport) -> None:
            message = messages.NodeReply(report.host, report)
            if not request.with_usage:
                reply(message)
                return

            def used(found: Reply[agent.UsageReply]) -> None:
                used_bytes = None if found.error is not None else found.message.total_bytes
                reply(replace(message, used_bytes=used_bytes))

            ask(self.links, hosts[report.host], agent.Usage(), deadline_s=USAGE_S, then=used)

        for host in request.hosts:
            query = NodeQuery(
                [host],
                self.links,
                reported=reported,
                refused=lambda name, failure: reply(messages.NodeReply(name, refused=failure)),
            )
            self.run(query)

    def survey(self, request: messages.Survey, answer: Answer) -> None:
        """Send the data of every host for the checks; one reply for each."""
        from ascendrun.head.survey.doctor import SurveyOperation

        self.run(SurveyOperation(request, self.links, answer, ended=self.sweep_later))

    def examine(self, request: messages.Survey, then: Callable[[Sequence[messages.SurveyReply]], None]) -> None:
        """Survey for the controller itself; `then` gets all replies, in its thread."""
        replies: list[messages.SurveyReply] = []

        def answer(reply: object, body: bytes, is_last: bool) -> None:
            replies.extend([reply] if isinstance(reply, messages.SurveyReply) else [])
            if is_last:
                self.links.post(partial(then, replies))

        self.survey(request, answer)

    def sample(self, request: messages.Sample, answer: Answer, ingest: SampleIngest) -> None:
        """Send a new sample of every host; one reply for each, in order of arrival."""
        if request.unless_pending:
            awaited = {name for running in self._running if isinstance(running, _Sampling) for name in running.waiting}
            request = replace(request, hosts=tuple(host for host in request.hosts if host.name not in awaited))
            if not request.hosts:
                answer(None, b"", True)
                return
        self.run(_Sampling(request, self, answer, ingest))

    def plan(self, request: messages.Plan, answer: Answer, place: Callable[[Submission], tuple[Host, ...]]) -> None:
        """Send the plan that a submission would get, as `render_plan` shows it. `place` chooses its hosts."""
        from ascendrun.core.jobs.checkpoints import ResumePoint
        from ascendrun.core.jobs.plan_text import render_plan
        from ascendrun.head.agents.node_query import NodeQuery, choose, query_checkpoints
        from ascendrun.head.survey.submission import Submission, build_plan, make_job

        submission = Submission.from_json(request.submission)
        job = make_job(submission, "j-new", "dry-run", time.time())
        hosts = place(submission)
        reports: dict[str, NodeReport] = {}
        problems: list[Problem] = []

        def reply_when_complete() -> None:
            if len(reports) + len(problems) < len(hosts):
                return
            self.sweep_later()
            if problems:
                names = [problem.file for problem in problems]
                what = Text(
                    "preflight.failed", "preflight failed on {hosts:hosts}; no process was started", hosts=names
                )
                answer(PreflightError(what, problems=problems), b"", True)
                return
            query_checkpoints(submission.spec, job, hosts, links=self.links, done=reply)

        def reply(listings: Listings) -> None:
            chosen = choose(job, [host.name for host in hosts], listings)
            resumed = replace(job, resume=chosen if isinstance(chosen, ResumePoint) else None)
            try:
                plan = build_plan(submission.spec, hosts, reports, resumed, submission.trees)
            except AscendrunError as error:
                answer(error, b"", True)
                return
            answer(messages.Planned(render_plan(plan)), b"", True)

        def reported(report: NodeReport) -> None:
            reports[report.host] = report
            reply_when_complete()

        def refused(host: str, failure: Failure) -> None:
            problems.append(failure.problem_of(host))
            reply_when_complete()

        self.run(NodeQuery(hosts, self.links, reported=reported, refused=refused))


class HostOperation:
    """One call to each of several hosts. `waiting`: hosts without a reply yet. `CONNECT_TRIES`: failed attempts to
    connect after which a host is not waited for."""

    CONNECT_TRIES = 2

    def __init__(
        self, hosts: Sequence[Host], operations: Operations, answer: Answer, request: Request[Any], deadline_s: float
    ) -> None:
        self._hosts, self._links, self._post = hosts, operations.links, operations.links.post
        self._message, self._deadline_s = request, deadline_s
        self._answer, self._ended = answer, operations.sweep_later
        self.waiting: set[str] = {host.name for host in hosts}

    @property
    def is_done(self) -> bool:
        return not self.waiting

    def start(self) -> None:
        for host in self._hosts:
            link = self._links.get(host)
            if not link.is_up:
                link.connect()
            link.call(self._message, deadline_s=self._deadline_s, done=self._done_of(host))

    def on_up(self) -> None:
        """Nothing to do: the calls wait in the connection."""

    def on_down(self, link: AgentConnection, error: AscendrunError) -> None:
        is_final = is_permanent(error) or link.failures >= self.CONNECT_TRIES
        for host in self._hosts:
            if is_final and dialled(host) == dialled(link.host):
                self._take(host.name, Reply(None, error=Failure.of(error)), time.time())

    def _done_of(self, host: Host) -> Callable[[Reply[Any]], None]:
        def done(reply: Reply[Any]) -> None:
            received_s = time.time()
            self._post(lambda: self._take(host.name, reply, received_s))

        return done

    def _take(self, host: str, reply: Reply[Any], received_s: float) -> None:
        raise NotImplementedError

    def _reply(self, message: Any, body: bytes = b"") -> None:
        if message.host in self.waiting:
            self.waiting.discard(message.host)
            self._answer(message, body, self.is_done)
            self._ended()


class _Exec(HostOperation):
    """A command on several hosts."""

    def __init__(self, request: messages.Exec, operations: Operations, answer: Answer) -> None:
        self._exec, self._started_mono = agent.Exec(request.argv, request.timeout_s, EXEC_BYTES), time.monotonic()
        super().__init__(request.hosts, operations, answer, self._exec, request.timeout_s + 30.0)
        self._ended = operations.sweep

    def start(self) -> None:
        for host in self._hosts:
            done = self._done_of(host)
            if not self._links.run_once(host, self._exec, deadline_s=self._deadline_s, done=done):
                link = self._links.get(host)
                link.connect()  # the other command may run for long
                link.call(self._exec, deadline_s=self._deadline_s, done=done)

    def _take(self, host: str, reply: Reply[agent.ExecReply], received_s: float) -> None:
        message = messages.ExecReply(host, time.monotonic() - self._started_mono, reply.error)
        if reply.error is None:
            end = reply.message
            message = replace(
                message, code=end.code, signal=end.signal, timed_out=end.timed_out, out_bytes=end.out_bytes
            )
        self._reply(message, reply.body)


class Stacks(HostOperation):
    """The stacks of an attempt's ranks."""

    def _take(self, host: str, reply: Reply[agent.StacksReply], received_s: float) -> None:
        ranks = tuple(reply.message.ranks) if reply.error is None else ()
        self._reply(messages.StacksReply(host, ranks, reply.error))


class RankProcess(HostOperation):
    """The process of a running rank on its host."""

    def _take(self, host: str, reply: Reply[agent.RankProcessReply], received_s: float) -> None:
        error = reply.error
        if host not in self.waiting:
            return
        if error is None:
            self._reply(messages.RankProcessReply(host, reply.message.argv))
            return
        self.waiting.discard(host)
        what = Text("shell.not-found", "{host}: {why}", host=host, why=error.message)
        kind = ConflictError if error.code == "rank-not-running" else UnreachableError
        self._answer(kind(what, hint=error.hint), b"", True)
        self._ended()


class _Sampling(HostOperation):
    """A sample of several hosts. Every host gets a reply within timeout_s, `refused` if it took no sample."""

    def __init__(self, request: messages.Sample, operations: Operations, answer: Answer, ingest: SampleIngest) -> None:
        from ascendrun.health.samples.device_samples import sampling_items

        self._ingest = ingest
        tool_s = max(0.5, min(TOOL_S, request.timeout_s - MARGIN_S))
        items: list[Mapping[str, Any]] = [{**item, "timeout_s": tool_s} for item in sampling_items(request.device_type)]
        super().__init__(request.hosts, operations, answer, agent.Sample(items, tool_s), request.timeout_s)

    def start(self) -> None:
        post_later(self._links, self._deadline_s, self._give_up)
        super().start()

    def _take(self, host: str, reply: Reply[agent.SampleReply], received_s: float) -> None:
        if reply.error is not None:
            self._reply(messages.SampleReply(host, refused=reply.error))
        elif host in self.waiting:
            self._ingest.take_lines(
                host,
                reply.message.lines,
                ahead_s=reply.message.at_ns / 1e9 - received_s,
                done=lambda newest: self._post(
                    lambda: self._reply(messages.SampleReply(host, newest.devices, newest.hosts))
                ),
            )

    def _give_up(self) -> None:
        late = Text("agent.no-samples", "no samples within {limit_s:g} s", limit_s=self._deadline_s)
        for host in sorted(self.waiting):
            self._reply(messages.SampleReply(host, refused=Failure("deadline", late)))
