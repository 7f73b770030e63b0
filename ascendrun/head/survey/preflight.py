"""Preflight checks before every start: evaluates an examination's raw results for this job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ascendrun.core.findings import Finding, Severity, paused_collector
from ascendrun.core.node_messages import Failure
from ascendrun.core.reports import NodeReport
from ascendrun.head.survey.doctor import Question, SurveyResults
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.core.jobfile.model import JobSpec
    from ascendrun.core.jobs.plan import LaunchPlan

MOST_WARNINGS = 20


@dataclass(frozen=True)
class PreflightResult:
    """Result. `refusal`: why nothing may start, None: no reason. `hosts`: with problems. `warnings`: as in Checked."""

    refusal: Text | None
    hosts: tuple[str, ...] = ()
    warnings: tuple[tuple[Finding, Text], ...] = ()


def preflight_question(spec: JobSpec) -> Question:
    """Return the light examination, or the full one if the job requires a check that needs it."""
    from ascendrun.health.checks import CHECKS, plain_name

    required = {plain_name(name) for name in spec.checks.require}
    is_full = any(check.is_full and check.name in required for check in CHECKS)
    return Question(spec=spec, device_type=spec.devices.type, is_full=is_full)


def evaluate_preflight(
    answers: SurveyResults, reports: Mapping[str, NodeReport], *, spec: JobSpec, plan: LaunchPlan, now_s: float
) -> PreflightResult:
    """Evaluate the results. FAIL findings prevent the start, and so does a node that could not be examined."""
    from ascendrun.health.checks import run_checks
    from ascendrun.health.comparison import failed_checks, finding_line
    from ascendrun.health.survey.check_context import CheckContext
    from ascendrun.health.survey.facts import NodeFacts, Unreached
    from ascendrun.health.survey.probes import read_facts

    facts: dict[str, NodeFacts] = {}
    unreached: dict[str, Unreached] = {}
    with paused_collector():
        for host, report in reports.items():
            answer = answers.get(host, {})
            if "results" in answer:
                facts[host] = read_facts(report, answer["results"])
            else:
                why: Failure = answer.get("refused") or Failure("internal", "")
                unreached[host] = Unreached(why.code, why.message, why.hint)
    context = CheckContext(
        facts=facts, unreached=unreached, job=spec, plan=plan, device_type=spec.devices.type, now_s=now_s
    )
    findings = run_checks(context, is_full=False, skip=spec.checks.skip, require=spec.checks.require)
    failed = tuple(finding for finding in findings if finding.severity is Severity.FAIL)
    warned: tuple[Finding, ...] = tuple(one for one in findings if one.severity is Severity.WARN)[:MOST_WARNINGS]
    return PreflightResult(
        failed_checks(failed) if failed else None,
        tuple(sorted({host for finding in failed for host in finding.hosts})),
        tuple((finding, finding_line(finding)) for finding in warned),
    )
