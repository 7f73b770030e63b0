"""What nodes replied to a survey: as the context of the checks, and evaluated before every start of a job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING

from ascendrun.core.dataclass import dataclass
from ascendrun.core.errors import AscendrunError
from ascendrun.core.findings import Finding, Severity, paused_collector
from ascendrun.core.node_messages import Failure
from ascendrun.core.reports import NodeReport, load_report
from ascendrun.head.protocol.control_messages import Survey, SurveyReply
from ascendrun.head.survey.submission import Submission, build_plan, make_job
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.core.hosts import Host
    from ascendrun.core.jobfile.model import JobSpec
    from ascendrun.core.jobs.plan import LaunchPlan
    from ascendrun.health.survey.check_context import CheckContext

MOST_WARNINGS = 20
PASSING = frozenset(
    ("device-leased", "hbm-not-released", "npu-busy", "npu-busy-run", "npu-ghost", "port-taken", "hccl-port-taken")
)
"""Findings about other users of devices and ports: the job tries again later."""


@dataclass(frozen=True)
class PreflightResult:
    """Result. `refusal`: why nothing may start, None: no reason. `hosts`: with problems. `warnings`: as in Checked.
    `held`: the finding, if all failed checks found something that uses devices or ports of the job.
    `idle_memory`: by host and device of NPUs without a listed process, the MB of memory in use. `not_released`: by
    host, the finding of memory that stays in use."""

    refusal: Text | None
    hosts: tuple[str, ...] = ()
    warnings: tuple[tuple[Finding, Text], ...] = ()
    held: Finding | None = None
    idle_memory: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    not_released: Mapping[str, Finding] = field(default_factory=dict)


def make_context(
    replies: Iterable[SurveyReply],
    reports: Mapping[str, NodeReport],
    spec: JobSpec | None,
    plan: LaunchPlan | None,
    *,
    now_s: float,
    device_type: str | None = None,
) -> CheckContext:
    """Make the context of an examination. A host without results was not reached. `device_type`: without a job."""
    from ascendrun.health.survey.check_context import CheckContext
    from ascendrun.health.survey.facts import NodeFacts
    from ascendrun.health.survey.probes import read_facts

    facts: dict[str, NodeFacts] = {}
    unreached: dict[str, Failure] = {}
    by_host = {reply.host: reply for reply in replies}
    with paused_collector():
        for host in dict.fromkeys((*reports, *by_host)):
            reply = by_host.get(host)
            why = Failure("internal", "") if reply is None else reply.refused
            if reply is not None and why is None:
                facts[host] = read_facts(reports[host], reply.results)
            elif why is not None:
                unreached[host] = why
    return CheckContext(
        facts=facts,
        unreached=unreached,
        job=spec,
        plan=plan,
        now_s=now_s,
        device_type=spec.devices.type if spec is not None else device_type,
    )


def read_world(
    replies: Sequence[SurveyReply], submission: Submission | None, *, device_type: str | None, now_s: float
) -> CheckContext:
    """Make the context from one reply for each host. The plan is rebuilt from the same reports, as for a start."""
    everyone = {one.host: None for one in replies}
    with paused_collector():
        reports = {one.host: load_report(one.report, everyone) for one in replies if one.refused is None}
    spec = submission.spec if submission is not None else None
    plan = dry_plan(submission, reports, now_s)
    return make_context(replies, reports, spec, plan, now_s=now_s, device_type=device_type)


def dry_plan(submission: Submission | None, reports: Mapping[str, NodeReport], now_s: float) -> LaunchPlan | None:
    """Return the plan that a start would have; None if a host is missing, or cannot run the job: the findings or the
    caller's own plan report why."""
    if submission is None or len(reports) < len(submission.hosts):
        return None
    job = make_job(submission, "j-new", "dry-run", now_s)
    try:
        return build_plan(submission.spec, submission.hosts, reports, job, submission.trees)
    except AscendrunError:
        return None


def preflight_request(hosts: Sequence[Host], spec: JobSpec, training: Iterable[str] = ()) -> Survey:
    """Return the light examination, or the full one if the job requires a check that needs it. `training`: paths of
    files that the nodes read for the plan of a training."""
    from ascendrun.health.checks import CHECKS, plain_name

    required = {plain_name(name) for name in spec.checks.require}
    is_full = any(check.is_full and check.name in required for check in CHECKS)
    return Survey(tuple(hosts), device_type=spec.devices.type, training=tuple(training), is_full=is_full)


def evaluate_preflight(
    context: CheckContext, spec: JobSpec, *, idle_memory: Mapping[str, Mapping[int, int]] | None = None
) -> PreflightResult:
    """Evaluate the results. FAIL findings prevent the start, and so does a node that could not be examined.

    `idle_memory`: as PreflightResult had it at earlier starts, the least of each device.
    """
    from ascendrun.health.checks import run_checks
    from ascendrun.health.checks.npu import unowned_memory
    from ascendrun.health.comparison import failed_checks, finding_line

    context, facts = replace(context, idle_memory=idle_memory or {}), context.facts
    findings = run_checks(context, is_full=False, skip=spec.checks.skip, require=spec.checks.require)
    failed = tuple(finding for finding in findings if finding.severity is Severity.FAIL)
    warned: tuple[Finding, ...] = tuple(one for one in findings if one.severity is Severity.WARN)[:MOST_WARNINGS]
    return PreflightResult(
        failed_checks(failed) if failed else None,
        tuple(sorted({host for finding in failed for host in finding.hosts})),
        tuple((finding, finding_line(finding)) for finding in warned),
        held=failed[0] if failed and all(finding.code in PASSING for finding in failed) else None,
        idle_memory={host: unowned_memory(one.npu, is_idle=True) for host, one in facts.items()},
        not_released={host: one for one in failed if one.code == "hbm-not-released" for host in one.hosts},
    )
