"""The state CHECKING of a job: reports of its hosts, its checkpoints, the launch plan, the examination."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

from ascendrun.core.errors import AscendrunError
from ascendrun.core.jobs import inputs
from ascendrun.core.jobs.checkpoints import Listings, OnlyCopy, ResumePoint, incomplete
from ascendrun.core.jobs.job import State
from ascendrun.core.jobs.plan import LaunchPlan
from ascendrun.core.node_messages import Failure
from ascendrun.core.reports import NodeReport
from ascendrun.head.agents.checkpoint_query import choose, query_checkpoints
from ascendrun.head.agents.node_query import NodeQuery
from ascendrun.head.loop.job.live_job import LiveJob
from ascendrun.head.protocol.remote import AgentConnection
from ascendrun.head.survey.doctor import Examination, SurveyResults
from ascendrun.head.survey.preflight import evaluate_preflight, preflight_question
from ascendrun.head.survey.submission import build_plan


class JobSurvey:
    """One round for each start. `plan`: of the present attempt, None until every check has passed."""

    def __init__(self, live: LiveJob) -> None:
        self._live = live
        self._query: NodeQuery | None = None
        self.reports: dict[str, NodeReport] = {}
        self.plan: LaunchPlan | None = None

    def start(self) -> None:
        self.reports, self.plan = {}, None
        live, attempt = self._live, self._live.job.attempt

        def refused(host: str, failure: Failure) -> None:
            if live.job.attempt == attempt:
                live.refuse(host, failure, is_away=True)

        self._query = NodeQuery(
            live.placed, live.context.links, live.post, reported=partial(self._take_report, attempt), refused=refused
        )
        self._query.start()

    def on_up(self) -> None:
        if self._live.job.state is State.CHECKING and self._query is not None:
            self._query.on_up()

    def on_down(self, link: AgentConnection, error: AscendrunError) -> None:
        if self._live.job.state is State.CHECKING and self._query is not None:
            self._query.on_down(link, error)

    def _take_report(self, attempt: int, report: NodeReport) -> None:
        live = self._live
        if live.job.state is not State.CHECKING or live.job.attempt != attempt:
            return
        self.reports[report.host] = report
        identity = {"machine_key": report.machine_key, "incarnation": report.incarnation}
        live.feed(inputs.NodeReported(report.host, report.boot_id, report.clock_offset_s, **identity))
        if len(self.reports) == len(live.job.hosts):
            query_checkpoints(
                live.spec,
                live.job,
                live.placed,
                self.reports,
                links=live.context.links,
                post=live.post,
                done=partial(self._take_checkpoints, live.job.run_id),
            )

    def _take_checkpoints(self, run_id: str, listings: Listings) -> None:
        """Choose what the attempt resumes from. Without the lists of all hosts the program decides by itself."""
        live = self._live
        if live.job.state is not State.CHECKING or run_id != live.job.run_id:
            return
        chosen = choose(live.job, live.job.hosts, listings)
        if isinstance(chosen, OnlyCopy):
            live.feed(inputs.ResumeLost(chosen.step, chosen.hosts))
            return
        if chosen is not None:
            live.feed(inputs.ResumeChosen(chosen, tuple(incomplete(listings, chosen.step))))
        self._make_plan(chosen)

    def _make_plan(self, resume: ResumePoint | None) -> None:
        live = self._live
        try:
            plan = build_plan(live.spec, live.placed, self.reports, replace(live.job, resume=resume), live.trees)
        except AscendrunError as error:
            live.refuse(None, Failure.of(error))
            return
        Examination(
            live.placed,
            self.reports,
            preflight_question(live.spec),
            plan,
            links=live.context.links,
            post=live.post,
            done=partial(self._judge, plan),
        ).start()

    def _judge(self, plan: LaunchPlan, answers: SurveyResults) -> None:
        """Start the job only if no check failed."""
        live = self._live
        if live.job.state is not State.CHECKING or plan.run_id != live.job.run_id:
            return
        known = {host.name: live.context.idle_memory(host) for host in live.placed}
        result = evaluate_preflight(
            answers, self.reports, spec=live.spec, plan=plan, now_s=time.time(), idle_memory=known
        )
        for host in live.placed:
            taken = result.not_released.get(host.name)
            memory = result.idle_memory.get(host.name, {})
            live.context.note_memory(host, memory, None if taken is None else taken.message)
        live.feed(inputs.Checked(result.warnings))
        if result.held is not None:
            live.feed(inputs.Held(result.hosts[0], result.held.message, result.held.values.get("run")))
            return
        if result.refusal is not None:
            live.feed(inputs.Refused(None, result.refusal, result.hosts))
            return
        self.plan = plan
        ranks = {node.host: tuple(rank.rank for rank in node.ranks) for node in plan.nodes}
        live.feed(inputs.Planned(ranks, plan.world_size))
