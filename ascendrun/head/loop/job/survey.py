"""The state CHECKING of a job: reports of its hosts, its checkpoints, the launch plan, the examination."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Callable

from ascendrun.core.errors import AscendrunError, PreflightError
from ascendrun.core.jobs import inputs
from ascendrun.core.jobs.checkpoints import Listings, OnlyCopy, ResumePoint, incomplete
from ascendrun.core.jobs.job import State
from ascendrun.core.jobs.plan import LaunchPlan
from ascendrun.core.node_messages import Failure
from ascendrun.core.reports import NodeReport
from ascendrun.head.agents.node_query import NodeQuery, choose, query_checkpoints
from ascendrun.head.loop.job.live_job import LiveJob
from ascendrun.head.protocol.control_messages import SurveyReply
from ascendrun.head.protocol.remote import AgentConnection
from ascendrun.head.state.job_files import write_plan
from ascendrun.head.survey.doctor import Examination
from ascendrun.head.survey.submission import build_plan, stages_around
from ascendrun.head.survey.survey_reader import PreflightResult, evaluate_preflight, make_context, preflight_request

if TYPE_CHECKING:
    from ascendrun.head.state.job_table import StoredJob
    from ascendrun.head.survey.training_plan import TrainingStage
    from ascendrun.health.survey.check_context import CheckContext
    from ascendrun.planner.plan import TrainingPlan


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
            hosts = error.hosts if isinstance(error, PreflightError) else ()
            live.feed(inputs.Refused(None, Failure.of(error).line(), hosts))
            return
        stages = self._training_stages()
        paths = dict.fromkeys(path for stage in stages for path in stage.paths)
        Examination(
            preflight_request(live.placed, live.spec, paths),
            live.spec,
            self.reports,
            plan,
            links=live.context.links,
            post=live.post,
            done=partial(self._judge, plan, stages),
        ).start()

    def _training_stages(self) -> tuple[TrainingStage, ...]:
        """Return this job and the later stages of its pipeline if any of them is a training with rules; else ()."""
        live, job = self._live, self._live.job
        own = replace(live.submission, hosts=live.placed, stage=job.stage)
        before, later = stages_around(live.context.store, job)
        if all(one.spec.program is None for one in (own, *later)):
            return ()  # nothing else is planned, or imports the planner
        from ascendrun.head.survey.training_plan import training_stages

        return training_stages([*before, own, *later])[len(before) :]

    def _judge(self, plan: LaunchPlan, stages: Sequence[TrainingStage], replies: Mapping[str, SurveyReply]) -> None:
        """Start the job only if no check failed, and no training would fail."""
        live = self._live
        if not self._is_current(plan):
            return
        context = make_context(replies.values(), self.reports, live.spec, plan, now_s=time.time())
        known = {host.name: live.context.idle_memory(host) for host in live.placed}
        result = evaluate_preflight(context, live.spec, idle_memory=known)
        for host in live.placed:
            taken = result.not_released.get(host.name)
            memory = result.idle_memory.get(host.name, {})
            live.context.note_memory(host, memory, None if taken is None else taken.message)
        live.feed(inputs.Checked(result.warnings))
        if not stages:
            self._decide(plan, result)
            return
        from ascendrun.head.survey.training_plan import RUNS_READ

        call = partial(self._plan_trainings, stages, context, live.context.store.jobs.all()[-RUNS_READ:])
        done = partial(self._take_plans, plan, result)
        threading.Thread(target=call, args=(done,), name="training-plan", daemon=True).start()

    def _is_current(self, plan: LaunchPlan) -> bool:
        return self._live.job.state is State.CHECKING and plan.run_id == self._live.job.run_id

    def _plan_trainings(
        self,
        stages: Sequence[TrainingStage],
        context: CheckContext,
        stored: Sequence[StoredJob],
        done: Callable[[Sequence[TrainingPlan]], None],
    ) -> None:
        """Plan in a thread of its own: metrics of earlier runs are read. A fault of ours prevents no start."""
        from ascendrun.head.survey.training_plan import plan_stage, recorded_runs

        runs_of, plans = partial(recorded_runs, stored, self._live.context.state_dir), []
        try:
            for number, stage in enumerate(stages):
                plans.append(plan_stage(stage, context if number == 0 else replace(context, plan=None), runs_of))
        except Exception:  # a bug in a rule: the log has the traceback
            traceback.print_exc()
        self._live.post(partial(done, plans))

    def _take_plans(self, plan: LaunchPlan, result: PreflightResult, plans: Sequence[TrainingPlan]) -> None:
        """Refuse a training that would fail; what else prevents the start now may pass."""
        from ascendrun.head.survey.training_plan import expected, hosts_at_fault, refusal

        if not self._is_current(plan):
            return
        why = refusal(plans)
        if why is not None:
            self._live.feed(inputs.TrainingRefused(why, hosts_at_fault(plans)))
            return
        if plans and (values := expected(plans[0])):
            with suppress(OSError):  # a report without it has the measured values alone
                write_plan(self._live.context.state_dir, self._live.job.id, values)
        self._decide(plan, result)

    def _decide(self, plan: LaunchPlan, result: PreflightResult) -> None:
        live = self._live
        if result.held is not None:
            owner = result.held.values.get("run")
            live.feed(inputs.Held(result.hosts[0], result.held.message, owner, result.hosts))
        elif result.refusal is not None:
            live.feed(inputs.Refused(None, result.refusal, result.hosts))
        else:
            self.plan = plan
            ranks = {node.host: tuple(rank.rank for rank in node.ranks) for node in plan.nodes}
            live.feed(inputs.Planned(ranks, plan.world_size))
