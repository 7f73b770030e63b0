"""Serve one survey request: connect, probe, plan the given job, examine, and reply for each host."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Callable

from ascendrun.core.hosts import Host
from ascendrun.core.node_messages import Failure
from ascendrun.core.reports import NodeReport, report_values
from ascendrun.head.agents.connections import Connections
from ascendrun.head.agents.node_query import NodeQuery
from ascendrun.head.protocol.control_messages import Survey, SurveyReply
from ascendrun.head.protocol.control_socket import Answer
from ascendrun.head.survey.doctor import Examination, Question, SurveyResults
from ascendrun.head.survey.submission import Submission
from ascendrun.text import Text

if TYPE_CHECKING:
    pass

CONNECT_S = 20.0
"""Seconds after which a host without a running agent fails; the others do not wait longer for it."""


class SurveyOperation:
    """Survey of several hosts. Use from the controller's thread."""

    def __init__(
        self,
        request: Survey,
        links: Connections,
        post: Callable[[Callable[[], None]], None],
        answer: Answer,
        *,
        ended: Callable[[], None],
    ) -> None:
        self._hosts = request.hosts
        self._submission = None if request.submission is None else Submission.from_json(request.submission)
        self._question = Question(
            spec=self._submission.spec if self._submission else None,
            device_type=self._submission.spec.devices.type if self._submission else request.device_type,
            paths=request.paths,
            training=request.training,
            names=request.names,
            is_full=request.is_full,
            every_pair=request.every_pair,
        )
        self._links, self._post, self._answer, self._ended = links, post, answer, ended
        self._reports: dict[str, NodeReport] = {}
        self._refused: dict[str, Failure] = {}
        self.is_done = False
        self.query = NodeQuery(self._hosts, links, post, reported=self._take_report, refused=self._take_failure)
        self.on_up, self.on_down = self.query.on_up, self.query.on_down

    def start(self) -> None:
        late = threading.Timer(CONNECT_S, lambda: self._post(self._give_up))
        late.daemon = True
        late.start()
        self.query.start()

    def _give_up(self) -> None:
        if not self.query.is_done:
            self.query.give_up_connecting(
                Failure(
                    "unreachable",
                    Text("agent.not-started", "the agent did not start within {limit_s:g} s", limit_s=CONNECT_S),
                )
            )

    def _take_report(self, report: NodeReport) -> None:
        self._reports[report.host] = report
        self._go_on()

    def _take_failure(self, host: str, failure: Failure) -> None:
        error = self._links.get(self._host(host)).last_error
        self._refused[host] = Failure.of(error) if error else failure
        self._go_on()

    def _host(self, name: str) -> Host:
        return next(host for host in self._hosts if host.name == name)

    def _go_on(self) -> None:
        if len(self._reports) + len(self._refused) < len(self._hosts):
            return
        ordered = {host.name: self._reports[host.name] for host in self._hosts if host.name in self._reports}
        from ascendrun.head.survey.survey_reader import dry_plan

        plan = None if self._refused else dry_plan(self._submission, self._reports, time.time())
        Examination(
            self._hosts, ordered, self._question, plan, links=self._links, post=self._post, done=self._reply
        ).start()

    def _reply(self, answers: SurveyResults) -> None:
        self.is_done = True
        self._ended()
        everyone = [host.name for host in self._hosts]
        for index, host in enumerate(self._hosts):
            found = answers.get(host.name, {})
            refused = self._refused.get(host.name) or found.get("refused")
            if refused is not None:
                reply = SurveyReply(host.name, refused)
            else:
                reply = SurveyReply(
                    host.name,
                    report=report_values(self._reports[host.name], everyone),
                    results=found.get("results", {}),
                )
            self._answer(reply, b"", index == len(self._hosts) - 1)
