"""Preflight checks before every start: evaluates an examination's raw results for this job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from typing import TYPE_CHECKING

from ascendrun.core.dataclass import dataclass
from ascendrun.core.findings import Finding, Severity
from ascendrun.head.survey.doctor import Question
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.core.jobfile.model import JobSpec
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


def preflight_question(spec: JobSpec, training: tuple[str, ...] = ()) -> Question:
    """Return the light examination, or the full one if the job requires a check that needs it. `training`: paths of
    files that the nodes read for the plan of a training."""
    from ascendrun.health.checks import CHECKS, plain_name

    required = {plain_name(name) for name in spec.checks.require}
    is_full = any(check.is_full and check.name in required for check in CHECKS)
    return Question(spec=spec, device_type=spec.devices.type, training=training, is_full=is_full)


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
