"""Requests about hosts rather than jobs: run a command, ask for reports, make a plan without starting it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Callable

from ascendrun.core.errors import AscendrunError, PreflightError, Problem
from ascendrun.core.hosts import Host
from ascendrun.core.node_messages import Failure
from ascendrun.head.agents.connections import Connections
from ascendrun.head.protocol import agent_messages as agent
from ascendrun.head.protocol import control_messages as messages
from ascendrun.head.protocol.control_socket import Answer
from ascendrun.head.protocol.remote import Link, Reply, is_permanent
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.core.reports import NodeReport
    from ascendrun.head.agents.node_query import NodeQuery
    from ascendrun.head.spool.sample_ingest import SampleKeeper
    from ascendrun.head.spool.sample_query import SampleOperation
    from ascendrun.head.survey.surveys import SurveyOperation

EXEC_BYTES = 1 << 20
"""How much output of one host is kept; more is cut and said to be cut."""
EXEC_CONNECT_TRIES = 2


class Operations:
    """Use from the controller's thread."""

    def __init__(self, links: Connections, post: Callable[[Callable[[], None]], None]) -> None:
        self._links, self._post = links, post
        self._askings: list[NodeQuery] = []
        self._execs: list[_Exec] = []
        self._surveys: list[SurveyOperation] = []
        self._samples: list[SampleOperation] = []

    @property
    def is_busy(self) -> bool:
        return bool(self._askings or self._execs or self._surveys or self._samples)

    def on_up(self) -> None:
        for asking in tuple(self._askings):
            asking.on_up()

    def on_down(self, link: Link, error: AscendrunError) -> None:
        for asking in tuple(self._askings):
            asking.on_down(link, error)
        for errand in tuple(self._execs):
            errand.on_down(link, error)
        for sampling in tuple(self._samples):
            sampling.on_down(link, error)
        self._sweep()

    def _sweep(self) -> None:
        self._askings = [asking for asking in self._askings if not asking.is_done]
        self._execs = [errand for errand in self._execs if errand.waiting]
        self._samples = [errand for errand in self._samples if errand.waiting]
        if not self._execs:
            self._links.start_agents()

    def execute(self, request: messages.Exec, answer: Answer) -> None:
        """Run the command on every host; one reply for each as it comes."""
        errand = _Exec(request, self._links, answer)
        self._execs.append(errand)
        errand.start(self._post, self._sweep)

    def query_nodes(self, request: messages.Nodes, answer: Answer) -> None:
        """The report of every host, or why there is none, as it comes."""
        from ascendrun.head.agents.node_query import NodeQuery

        waiting = {host.name for host in request.hosts}

        def reply(message: messages.NodeReply) -> None:
            waiting.discard(message.host)
            answer(message, b"", not waiting)
            self._post(self._sweep)

        for host in request.hosts:
            asking = NodeQuery(
                [host],
                self._links,
                self._post,
                reported=lambda report: reply(messages.NodeReply(report.host, report)),
                refused=lambda name, failure: reply(messages.NodeReply(name, refused=failure)),
            )
            self._askings.append(asking)
            asking.start()

    def survey(self, request: messages.Survey, answer: Answer) -> None:
        """The raw answers of every host; one reply for each."""
        from ascendrun.head.survey.surveys import SurveyOperation

        errand = SurveyOperation(request, self._links, self._post, answer, ended=lambda: self._post(self._sweep))
        self._surveys.append(errand)
        self._askings.append(errand.asking)
        errand.start()

    def sample(self, request: messages.Sample, answer: Answer, keeper: SampleKeeper) -> None:
        """A new sample of every host; one reply for each as it comes."""
        from ascendrun.head.spool.sample_query import SampleOperation

        if request.unless_asked:
            awaited = {name for errand in self._samples for name in errand.waiting}
            request = replace(request, hosts=tuple(host for host in request.hosts if host.name not in awaited))
            if not request.hosts:
                answer(None, b"", True)
                return
        errand = SampleOperation(
            request, self._links, self._post, answer, keeper, ended=lambda: self._post(self._sweep)
        )
        self._samples.append(errand)
        errand.start()

    def plan(self, request: messages.Plan, answer: Answer) -> None:
        """The plan that a submission would get, as `render_plan` shows it."""
        from ascendrun.core.jobs.plan import render_plan
        from ascendrun.head.agents.node_query import NodeQuery
        from ascendrun.head.survey.planning import build_plan
        from ascendrun.head.survey.submission import Submission, make_job

        submission = Submission.from_json(request.submission)
        job = make_job(submission, "j-new", "dry-run", time.time())
        reports: dict[str, NodeReport] = {}
        refusals: list[Problem] = []

        def say() -> None:
            if len(reports) + len(refusals) < len(submission.hosts):
                return
            self._post(self._sweep)
            try:
                if refusals:
                    raise PreflightError(
                        Text(
                            "preflight.failed",
                            "preflight failed on {hosts:hosts}; no process was started",
                            hosts=[problem.file for problem in refusals],
                        ),
                        problems=refusals,
                    )
                plan = build_plan(submission.spec, submission.hosts, reports, job, submission.trees)
            except AscendrunError as error:
                answer(error, b"", True)
                return
            answer(messages.Planned(render_plan(plan)), b"", True)

        def reported(report: NodeReport) -> None:
            reports[report.host] = report
            say()

        def refused(host: str, failure: Failure) -> None:
            refusals.append(Problem(host, None, None, failure.message, failure.hint))
            say()

        asking = NodeQuery(submission.hosts, self._links, self._post, reported=reported, refused=refused)
        self._askings.append(asking)
        asking.start()


class _Exec:
    """One command on several hosts; `waiting` are the hosts without an answer yet."""

    def __init__(self, request: messages.Exec, links: Connections, answer: Answer) -> None:
        self._request, self._links, self._answer = request, links, answer
        self._started_mono = time.monotonic()
        self.waiting: set[str] = {host.name for host in request.hosts}

    def start(self, post: Callable[[Callable[[], None]], None], sweep: Callable[[], None]) -> None:
        timeout_s = self._request.timeout_s
        request = agent.Exec(self._request.argv, timeout_s, EXEC_BYTES)

        def answered(host: Host, reply: Reply[agent.ExecReply]) -> None:
            self._say(host, reply)
            sweep()

        def done_of(host: Host) -> Callable[[Reply[agent.ExecReply]], None]:
            return lambda reply: post(lambda: answered(host, reply))

        deadline_s = timeout_s + 30.0
        for host in self._request.hosts:
            if not self._links.run_once(host, request, deadline_s=deadline_s, done=done_of(host)):
                self._links.get(host).call(request, deadline_s=deadline_s, done=done_of(host))

    def on_down(self, link: Link, error: AscendrunError) -> None:
        is_final = is_permanent(error) or link.failures >= EXEC_CONNECT_TRIES
        for host in self._request.hosts:
            if is_final and self._links.same(host, link.host):
                self._say(host, Reply(None, error=Failure.of(error)))

    def _say(self, host: Host, reply: Reply[agent.ExecReply]) -> None:
        if host.name not in self.waiting:
            return
        self.waiting.discard(host.name)
        reply_of = messages.ExecReply(host.name, time.monotonic() - self._started_mono, reply.error)
        if reply.error is None:
            end = reply.message
            reply_of = replace(
                reply_of, code=end.code, signal=end.signal, timed_out=end.timed_out, out_bytes=end.out_bytes
            )
        self._answer(reply_of, reply.body, not self.waiting)
