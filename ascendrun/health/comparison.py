"""The report of doctor: majority values, nodes that differ, and findings with messages and hints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Callable, Optional, Union

from ascendrun.core.dataclass import dataclass
from ascendrun.core.findings import SEVERITIES, Finding, Severity
from ascendrun.core.node_messages import Failure
from ascendrun.health.deep.measurements import DeepReport
from ascendrun.health.deep.view import summary_rows
from ascendrun.health.forecast import Forecast
from ascendrun.health.survey.check_context import CheckContext, Group, group_hosts
from ascendrun.health.survey.facts import NodeFacts
from ascendrun.text import Text
from ascendrun.text.format import fold_hosts


@dataclass(frozen=True)
class FactRow:
    """One line of the table; the first group is the largest group with a known value."""

    name: str
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class FindingView:
    """One finding for output; `nodes`: its hosts, folded. `fix`: a shell command for them, None: none."""

    code: str
    severity: Severity
    nodes: str
    hosts: tuple[str, ...]
    message: Text
    hint: Text | None
    evidence: tuple[str | Text, ...]
    values: Mapping[str, Any]
    fix: str | None = None


@dataclass(frozen=True)
class DoctorReport:
    """The report. `is_ready`: no finding prevents a start. `unreached`: hosts that could not be surveyed, and why.

    `forecast`: the cost of failures on this number of nodes. `deep`: the measurements, None: none.
    """

    is_ready: bool
    hosts: tuple[str, ...]
    unreached: Mapping[str, Failure]
    device_type: str | None
    job: str | None
    facts: tuple[FactRow, ...]
    findings: tuple[FindingView, ...]
    checks: int
    wall_s: float
    forecast: Forecast | None = None
    deep: DeepReport | None = None


Row = tuple[str, Callable[[NodeFacts], Optional[Union[str, Text]]]]


def _chips_text(facts: NodeFacts) -> str | None:
    info = facts.npu.info
    if info is None:
        return None
    names = dict.fromkeys(chip.name or "?" for chip in info.chips)
    return f"{len(info.chips)} x {', '.join(names)}"


def _python_text(facts: NodeFacts) -> str | None:
    python = facts.python
    return None if python is None or python.version is None else _joined(python.version, python.executable)


ROWS: tuple[Row, ...] = (
    ("os", lambda facts: facts.os_name),
    ("kernel", lambda facts: _joined(facts.kernel, facts.arch)),
    ("cpus", lambda facts: None if facts.cpus is None else str(facts.cpus)),
    ("memory", lambda facts: None if facts.memory_bytes is None else f"{facts.memory_bytes / (1 << 30):.0f} GiB"),
    ("user", lambda facts: facts.user),
    ("python", _python_text),
    ("torch", lambda facts: None if facts.python is None else facts.python.version_of("torch")),
    ("npus", _chips_text),
    ("driver", lambda facts: facts.npu.driver_version),
    ("firmware", lambda facts: facts.npu.firmware_version),
    ("cann", lambda facts: facts.npu.cann_version),
)
"""Name, and the value of a node; None: unknown, or not present."""


def fact_rows(context: CheckContext) -> tuple[FactRow, ...]:
    """Return the lines of the table that have a known value."""
    rows = [(name, {host: value_of(facts) for host, facts in context.facts.items()}) for name, value_of in ROWS]
    return tuple(FactRow(name, groups) for name, groups in ((name, group_hosts(of)) for name, of in rows) if groups)


def view_findings(findings: Iterable[Finding]) -> tuple[FindingView, ...]:
    same = ("code", "severity", "hosts", "message", "hint", "evidence", "values", "fix")
    return tuple(
        FindingView(nodes=fold_hosts(finding.hosts), **{name: getattr(finding, name) for name in same})
        for finding in findings
    )


def make_report(context: CheckContext, findings: tuple[Finding, ...], *, checks: int, wall_s: float) -> DoctorReport:
    return DoctorReport(
        is_ready=not any(finding.severity is Severity.FAIL for finding in findings),
        hosts=(*context.facts, *context.unreached),
        unreached=context.unreached,
        device_type=context.device_type,
        job=context.job.name if context.job is not None else None,
        facts=fact_rows(context),
        findings=view_findings(findings),
        checks=checks,
        wall_s=wall_s,
    )


def add_deep(report: DoctorReport, deep: DeepReport, findings: tuple[Finding, ...]) -> DoctorReport:
    """Return the report with the measurements and their findings; the most severe finding first."""
    views = sorted((*report.findings, *view_findings(findings)), key=lambda view: SEVERITIES.index(view.severity))
    is_ready = report.is_ready and not any(finding.severity is Severity.FAIL for finding in findings)
    measured = tuple(name for name in report.hosts if name in deep.hosts)
    rows = tuple(FactRow(name, (Group(text, measured),)) for name, text in summary_rows(deep))
    return replace(report, facts=(*report.facts, *rows), findings=tuple(views), is_ready=is_ready, deep=deep)


def failed_checks(findings: Sequence[Finding], *, most: int = 8) -> Text:
    """Return why a start was rejected: one line for each finding."""
    lines, count = tuple(finding_line(finding) for finding in findings[:most]), len(findings)
    if count == 1:
        return lines[0]
    if count <= most:
        return Text("doctor.checks-failed", "{count} checks failed:{lines:lines}", count=count, lines=lines)
    english = "{count} checks failed, among them:{lines:lines}\n  (all: ascendrun doctor)"
    return Text("doctor.many-checks-failed", english, count=count, lines=lines)


def finding_line(finding: Finding) -> Text:
    """Return a finding in one line: hosts, message, code and hint."""
    values: dict[str, Any] = {"message": finding.message, "code": finding.code}
    if not finding.hosts:
        return Text("doctor.cluster-finding", "{message} [{code}]", **values)
    values["hosts"], hint = finding.hosts, finding.hint
    if hint is None:
        return Text("doctor.finding", "{hosts:hosts}: {message} [{code}]", **values)
    return Text("doctor.finding-with-hint", "{hosts:hosts}: {message} [{code}] (hint: {hint})", **values, hint=hint)


def _joined(*parts: str | None) -> str | None:
    known = [part for part in parts if part]
    return " ".join(known) if known else None
