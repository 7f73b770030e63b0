"""Wishes that concern hosts and no job: run a command, ask for reports, draw up a plan without starting it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Callable

from ascendrun.core.errors import (
    AscendrunError,
    AuthenticationError,
    HostKeyChangedError,
    HostKeyUnknownError,
    PreflightError,
    Problem,
)
from ascendrun.core.hosts import Host, load_hosts
from ascendrun.core.node_messages import Failure
from ascendrun.head.agents.connections import Connections
from ascendrun.head.protocol.control_socket import Answer, error_answer
from ascendrun.head.protocol.remote import Link, Reply
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

    def execute(self, header: Mapping[str, Any], answer: Answer) -> None:
        """argv on every host of `hosts`; one answer a host as it comes."""
        hosts = load_hosts(header["hosts"])
        errand = _Exec(hosts, header["argv"], float(header["timeout_s"]), self._links, answer)
        self._execs.append(errand)
        errand.start(self._post, self._sweep)

    def query_nodes(self, header: Mapping[str, Any], answer: Answer) -> None:
        """A report or a refusal of every host, as it comes."""
        from ascendrun.head.agents.node_query import NodeQuery
        from ascendrun.head.protocol.agent_events import report_values

        hosts = load_hosts(header["hosts"])
        waiting = {host.name for host in hosts}

        def say(host: str, values: Mapping[str, Any]) -> None:
            waiting.discard(host)
            answer({"ok": True, "host": host, **values}, b"", not waiting)
            self._post(self._sweep)

        for host in hosts:
            asking = NodeQuery(
                [host],
                self._links,
                self._post,
                reported=lambda report: say(report.host, {"report": report_values(report)}),
                refused=lambda name, failure: say(name, {"refused": failure.to_json()}),
            )
            self._askings.append(asking)
            asking.start()

    def survey(self, header: Mapping[str, Any], answer: Answer) -> None:
        """What every host says of itself, raw, for health to judge; one answer a host, the last one with `last`."""
        from ascendrun.head.survey.surveys import SurveyOperation

        errand = SurveyOperation(header, self._links, self._post, answer, ended=lambda: self._post(self._sweep))
        self._surveys.append(errand)
        self._askings.append(errand.asking)
        errand.start()

    def sample(self, header: Mapping[str, Any], answer: Answer, keeper: SampleKeeper) -> None:
        """How each host is now: {host, devices, hosts} or {host, refused}; one answer a host as it comes.

        With `unless_asked`, hosts of which an answer is awaited already are left out.
        """
        from ascendrun.head.spool.sample_query import SampleOperation

        if header.get("unless_asked"):
            awaited = {name for errand in self._samples for name in errand.waiting}
            header = {**header, "hosts": [host for host in header["hosts"] if host["name"] not in awaited]}
            if not header["hosts"]:
                answer({"ok": True, "empty": True}, b"", True)
                return
        errand = SampleOperation(header, self._links, self._post, answer, keeper, ended=lambda: self._post(self._sweep))
        self._samples.append(errand)
        errand.start()

    def plan(self, header: Mapping[str, Any], answer: Answer) -> None:
        """The plan that a submission would get, as `render_plan` shows it."""
        from ascendrun.core.jobs.plan import render_plan
        from ascendrun.head.agents.node_query import NodeQuery
        from ascendrun.head.survey.planning import build_plan
        from ascendrun.head.survey.submission import Submission, make_job

        submission = Submission.from_json(header["submission"])
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
                answer(error_answer(error), b"", True)
                return
            answer({"ok": True, "plan": render_plan(plan)}, b"", True)

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

    def __init__(
        self, hosts: Sequence[Host], argv: Sequence[str], timeout_s: float, links: Connections, answer: Answer
    ) -> None:
        self._hosts, self._argv, self._timeout_s = hosts, list(argv), timeout_s
        self._links, self._answer = links, answer
        self._started_mono = time.monotonic()
        self.waiting: set[str] = {host.name for host in hosts}

    def start(self, post: Callable[[Callable[[], None]], None], sweep: Callable[[], None]) -> None:
        fields = {"argv": self._argv, "timeout_s": self._timeout_s, "max_bytes": EXEC_BYTES}

        def answered(host: Host, reply: Reply) -> None:
            self._say(host, reply)
            sweep()

        def done_of(host: Host) -> Callable[[Reply], None]:
            return lambda reply: post(lambda: answered(host, reply))

        deadline_s = self._timeout_s + 30.0
        for host in self._hosts:
            if not self._links.run_once(host, fields, deadline_s=deadline_s, done=done_of(host)):
                self._links.get(host).call("exec", fields, deadline_s=deadline_s, done=done_of(host))

    def on_down(self, link: Link, error: AscendrunError) -> None:
        is_hopeless = isinstance(error, (AuthenticationError, HostKeyUnknownError, HostKeyChangedError))
        is_final = is_hopeless or link.failures >= EXEC_CONNECT_TRIES
        for host in self._hosts:
            if is_final and self._links.same(host, link.host):
                self._say(host, Reply({}, b"", Failure.of(error)))

    def _say(self, host: Host, reply: Reply) -> None:
        if host.name not in self.waiting:
            return
        self.waiting.discard(host.name)
        values = {
            name: reply.header.get(name)
            for name in ("code", "signal", "timed_out", "out_bytes", "err_bytes", "truncated")
        }
        self._answer(
            {
                "ok": True,
                "host": host.name,
                "failed": reply.error.to_json() if reply.error else None,
                **values,
                "wall_s": time.monotonic() - self._started_mono,
            },
            reply.body,
            not self.waiting,
        )
