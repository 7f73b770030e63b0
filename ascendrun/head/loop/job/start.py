"""The start of an attempt: survey and plan, directories are staged, every node prepares it, then each gets GO."""

from __future__ import annotations

import secrets
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Callable

from ascendrun.core.errors import AscendrunError, PreflightError
from ascendrun.core.events import Event
from ascendrun.core.jobs import inputs
from ascendrun.core.jobs.checkpoints import Listings, OnlyCopy, ResumePoint, incomplete
from ascendrun.core.jobs.job import Job, State
from ascendrun.core.jobs.plan import LaunchPlan
from ascendrun.core.jobs.plan_text import prepare_request
from ascendrun.core.jobs.reasons import Reason
from ascendrun.core.network import host_addresses
from ascendrun.core.node_messages import Failure
from ascendrun.core.reports import NodeReport, shared_homes
from ascendrun.head.agents.node_query import NodeQuery, choose, query_checkpoints
from ascendrun.head.loop.job.copies import JobCopies
from ascendrun.head.loop.job.live_job import LiveJob
from ascendrun.head.protocol import agent_messages as agent
from ascendrun.head.protocol.control_messages import SurveyReply
from ascendrun.head.protocol.remote import AgentConnection, Reply
from ascendrun.head.spool.relay import DIRECT, Relay
from ascendrun.head.spool.staging import TreePush, push_once_per_home
from ascendrun.head.state.job_files import copy_for_nodes, write_plan
from ascendrun.head.state.state_dir import SPOOL_FACTS, claim_spool_dir, spool_dir, write_placement
from ascendrun.head.survey.doctor import Examination
from ascendrun.head.survey.submission import build_plan, read_secret_env, stages_around
from ascendrun.head.survey.survey_reader import PreflightResult, evaluate_preflight, make_context, preflight_request
from ascendrun.head.waiting import in_background
from ascendrun.node.files import write_json

if TYPE_CHECKING:
    from ascendrun.core.jobfile.model import JobSpec
    from ascendrun.head.state.job_table import StoredJob
    from ascendrun.head.survey.kept_facts import KeptFacts
    from ascendrun.head.survey.training_plan import TrainingStage
    from ascendrun.health.survey.check_context import CheckContext
    from ascendrun.planner.plan import TrainingPlan

Verdict = tuple["CheckContext", PreflightResult]
CHECK_S = 60.0
STAGE_S = 120.0
FEW_HOSTS = 32
"""Of up to so many the replies are judged in the loop itself."""
PEERS_S = 60.0
"""Seconds after which a host whose peers have ended stops by itself: a controller stops it at once."""


class JobStart:
    """From the survey of the hosts of an attempt to GO. `plan`: of the present attempt, None until every check has
    passed."""

    def __init__(self, live: LiveJob, copies: JobCopies) -> None:
        self._live, self._copies = live, copies
        self._copy = lru_cache(1)(partial(copy_for_nodes, live.context.state_dir, live.job.id))
        self._peer_key = secrets.token_hex(32)
        self.forget()

    def forget(self) -> None:
        """Release what the hosts replied: the start is over, or begins again."""
        self._query: NodeQuery | None = None
        self.reports: dict[str, NodeReport] = {}
        self._build: Callable[[JobSpec], LaunchPlan] | None = None
        self._examination: Examination | None = None
        self.plan: LaunchPlan | None = None
        self._facts: dict[str, dict[str, Any]] = {}
        self._pushes: dict[str, TreePush] = {}
        self._arrived: set[str] = set()
        self._push_failed = False

    # The state CHECKING: reports of the hosts, checkpoints, the launch plan, the examination

    def survey(self) -> None:
        self.forget()
        live, attempt = self._live, self._live.job.attempt

        def refused(host: str, failure: Failure) -> None:
            if live.job.attempt == attempt:
                live.refuse(host, failure, is_away=True)

        self._query = NodeQuery(live.placed, live, reported=partial(self._take_report, attempt), refused=refused)
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
                live.spec, live.job, live.placed, links=live, done=partial(self._take_checkpoints, live.job.run_id)
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
        job = replace(live.job, resume=resume)
        others = sum(len(one.job.hosts) for one in live.jobs if one.job.id != job.id and not one.job.is_terminal)
        self._build = partial(
            build_plan, hosts=live.placed, reports=self.reports, job=job, trees=live.trees, hosts_of_others=others
        )
        try:
            plan = self._build(live.spec)
        except AscendrunError as error:
            hosts = error.hosts if isinstance(error, PreflightError) else ()
            live.feed(inputs.Refused(None, Failure.of(error).line(), hosts))
            return
        # A restart has everything asked again: something has happened since.
        self._examine(plan, self._training_stages(), live.context.kept_facts if live.job.attempt == 1 else None)
        self._send_to(live.job.hosts)

    def _examine(self, plan: LaunchPlan, stages: Sequence[TrainingStage], kept: KeptFacts | None) -> None:
        live = self._live
        paths = dict.fromkeys(path for stage in stages for path in stage.paths)
        self._examination = Examination(
            preflight_request(live.placed, live.spec, paths),
            live.spec,
            self.reports,
            plan,
            links=live,
            done=partial(self._judge, plan, stages),
            pulling=partial(self._take_pull, plan),
            kept=kept,
        )
        self._examination.start()

    def _take_pull(self, plan: LaunchPlan, reason: Reason) -> None:
        if self._is_current(plan):
            self._live.feed(inputs.Pulling(reason))

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
        if not self._is_current(plan):
            return
        known = {host.name: dict(self._live.jobs.machines.idle_memory(host)) for host in self._live.placed}
        judged = partial(_evaluate, plan, tuple(replies.values()), self.reports, self._live.spec, known)
        if len(replies) <= FEW_HOSTS:
            self._take_verdict(plan, stages, judged())
            return
        pool = ThreadPoolExecutor(1, "checks")  # a second for 1000 hosts, in which the loop serves others
        verdict = pool.submit(judged)
        then = partial(self._take_verdict, plan, stages)
        verdict.add_done_callback(lambda done: self._live.post(lambda: then(done.result())))
        pool.shutdown(wait=False)

    def _take_verdict(self, plan: LaunchPlan, stages: Sequence[TrainingStage], verdict: Verdict) -> None:
        live, (context, result) = self._live, verdict
        if not self._is_current(plan):
            return
        from ascendrun.health.survey.recorded_facts import recorded_facts

        if result.refusal is not None or result.warnings:
            live.context.kept_facts.forget(self.reports.values())
            if self._examination is not None and not self._examination.is_new:
                self._examine(plan, stages, None)
                return
        self._facts = {host: recorded_facts(facts) for host, facts in context.facts.items()}
        for host in live.placed:
            taken = result.not_released.get(host.name)
            memory = result.idle_memory.get(host.name, {})
            live.jobs.machines.note_memory(host, memory, None if taken is None else taken.message)
        live.feed(inputs.Checked(result.warnings))
        if not stages:
            self._decide(plan, result)
            return
        from ascendrun.head.survey.training_plan import RUNS_READ

        call = partial(self._plan_trainings, stages, context, live.context.store.jobs.all()[-RUNS_READ:])
        done = partial(self._take_plans, plan, result)
        in_background(partial(call, done), "training-plan")

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
        from ascendrun.head.survey.training_plan import chosen_args, expected, hosts_at_fault, refusal

        if not self._is_current(plan):
            return
        why = refusal(plans)
        if why is not None:
            self._live.feed(inputs.TrainingRefused(why, hosts_at_fault(plans)))
            return
        if plans and (values := expected(plans[0])):
            with suppress(OSError):  # a report without it has the measured values alone
                write_plan(self._live.context.state_dir, self._live.job.id, values)
        if plans and (chosen := chosen_args(plans[0], self._live.spec)):
            spec, tried = self._live.spec, plans[0].tried[0]
            facts = {"ranks": plan.world_size, "memory_bytes": tried.option.memory.total, "time": tried.time}
            event = Event("micro-batch-chosen", {**chosen, **facts}, attempt=plan.attempt, at_s=time.time())
            self._live.record([event])
            assert self._build is not None, "trainings are planned after the launch"
            plan = self._build(spec.model_copy(update={"args": {**spec.args, **chosen}}))
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
            serving = tuple(node.host for node in plan.nodes if not node.ends_job)
            roles = {node.host: node.role for node in plan.nodes if node.role is not None}
            live.feed(inputs.Planned(ranks, plan.world_size, serving, roles))

    # Staging, readiness and GO

    def stage(self) -> None:
        """Await the job's directories on all hosts. They are sent since the examination began; what failed meanwhile is
        sent again."""
        arrived = tuple(self._arrived)
        for host in arrived:
            self._live.feed(inputs.NodeStaged(host))
        if self._push_failed or not self._pushes:
            self._send_to([host for host in self._live.job.hosts if host not in arrived])

    def _send_to(self, hosts: Sequence[str]) -> None:
        self._pushes, self._push_failed, relay = {}, False, None
        if len(hosts) > 2 * DIRECT:
            addresses = host_addresses(self._live.placed, self.reports)
            relay = Relay({host: (address,) for host, address in addresses.items()})
        push_once_per_home(hosts, shared_homes(self.reports), partial(self._push, self._pushes, relay))

    def _push(self, pushes: dict[str, TreePush], relay: Relay | None, host: str, then: Callable[[], None]) -> None:
        """`pushes`: those of one round; those of an earlier round count no longer."""
        live = self._live

        def staged(failure: Failure | None) -> None:
            if self._pushes is not pushes:
                return
            if failure is None:
                self._arrived.add(host)
                then()
            if live.job.state is State.STAGING:
                live.refuse(host, failure) if failure is not None else live.feed(inputs.NodeStaged(host))
            elif failure is not None:
                self._push_failed = True

        pushes[host] = self.send_trees(host, staged, relay)

    def send_trees(self, host: str, done: Callable[[Failure | None], None], relay: Relay | None = None) -> TreePush:
        """Send the job's directories to a host; `done` gets why that failed, None: they are there."""
        push = TreePush(
            self._live.context.state_dir,
            self._live.trees,
            query=lambda request, body, deadline_s, then: self._live.call(
                host, request, body, deadline_s=max(STAGE_S, deadline_s), then=then
            ),
            done=done,
            host=host,
            relay=relay,
        )
        push.send_next()
        return push

    def staged_bytes(self) -> dict[str, tuple[int, int]]:
        """Return, by host, the bytes of the job's directories that are there, and their total."""
        return {host: (push.done_bytes, push.total_bytes) for host, push in self._pushes.items()}

    def prepare(self, host: str) -> None:
        live, plan = self._live, self.plan
        assert plan is not None, "PrepareNodes before the plan"
        node = next(node for node in plan.nodes if node.host == host)

        def prepared(reply: Reply[agent.PrepareReply]) -> None:
            if reply.error is None:
                if events := _prepared_events(live.job, host, reply.message):
                    live.record(events)
                hccl = reply.message.hccl if plan.hccl_bases else None
                live.feed(inputs.NodeReady(host, reply.message.master_port, hccl))
            elif reply.error.code == "stage-files-missing":
                live.feed(inputs.StageFilesMissing(host))
            else:
                live.refuse(host, reply.error)

        files, may_lack = live.job.node(host).replaces, live.job.request.may_lack_files
        more: dict[str, Any] = {} if files is None else {"work_of": files.machine_key, "may_lack_work": may_lack}
        if len(set(plan.peers)) > 1:
            more["peers"] = {"addresses": plan.peers, "key": self._peer_key, "after_s": PEERS_S}
        request = agent.Prepare.from_header({**prepare_request(node, plan), **more, "job": self._copy(live.job.hosts)})
        live.call(host, request, deadline_s=CHECK_S, then=prepared)

    def record_placement(self) -> None:
        job, state_dir = self._live.job, self._live.context.state_dir
        folder = spool_dir(state_dir, job.id, job.attempt)
        with suppress(OSError):  # no space: the record of the job has it
            claim_spool_dir(folder, job.run_id)
            write_placement(folder, job.hosts)
            write_json(str(folder / SPOOL_FACTS), self._facts, durable=False)

    def go(self, host: str) -> None:
        live = self._live
        try:
            secret_env = read_secret_env(live.spec)
        except AscendrunError as error:
            live.refuse(host, Failure.of(error))
            return

        def started(reply: Reply[agent.GoReply]) -> None:
            if reply.error is None:
                self._copies.present.follow(host)
            elif reply.error.code not in ("connection-lost", "deadline"):  # else repeated: it may have been received
                live.refuse(host, reply.error)

        request = agent.Go(live.job.run_id, live.job.master_port_of(host), secret_env, live.job.hccl_base)
        live.call(host, request, then=started)


def _evaluate(
    plan: LaunchPlan,
    replies: Sequence[SurveyReply],
    reports: Mapping[str, NodeReport],
    spec: JobSpec,
    known: Mapping[str, Mapping[int, int]],
) -> Verdict:
    context = make_context(replies, reports, spec, plan, now_s=time.time())
    return context, evaluate_preflight(context, spec, idle_memory=known)


def _prepared_events(job: Job, host: str, reply: agent.PrepareReply) -> list[Event]:
    noted: dict[str, dict[str, Any]] = {}
    if reply.pointer is not None:
        noted["checkpoint-pointer-repaired"] = {name: reply.pointer[name] for name in ("path", "before", "step")}
    if reply.not_local is not None:
        noted["records-on-network"] = {"reason": reply.not_local}
    return [Event(code, values, (host,), attempt=job.attempt, at_s=time.time()) for code, values in noted.items()]
