"""What doctor shows: a table of what most nodes have and who differs, and the findings in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Callable, Optional

from ascendrun.core.findings import SEVERITIES, Finding, Severity
from ascendrun.core.names import fold_names
from ascendrun.health.deep.results import DeepReport
from ascendrun.health.deep.view import summary_rows
from ascendrun.health.forecast import Forecast
from ascendrun.health.survey.check_context import World, compare
from ascendrun.health.survey.facts import NodeFacts, Unreached
from ascendrun.health.texts import fix_of, render, rendered


@dataclass(frozen=True)
class FactGroup:
    """Hosts that say the same; `value` None: could not look there."""

    value: str | None
    hosts: tuple[str, ...]


@dataclass(frozen=True)
class FactRow:
    """One line of the table; the first group is the largest one that says something."""

    name: str
    groups: tuple[FactGroup, ...]


@dataclass(frozen=True)
class FindingView:
    """One finding for people and programs; `nodes`: its hosts, folded. `fix`: a shell command for them, None: none."""

    code: str
    severity: Severity
    nodes: str
    hosts: tuple[str, ...]
    says: str
    advice: str
    evidence: tuple[str, ...]
    values: Mapping[str, str]
    fix: str | None = None


@dataclass(frozen=True)
class DoctorReport:
    """`is_fit`: nothing found that would stop a start. `unreached`: hosts without an answer, and why.
    `forecast`: what failures will cost on so many nodes. `deep`: what was measured, None: nothing was."""

    is_fit: bool
    hosts: tuple[str, ...]
    unreached: Mapping[str, Unreached]
    family: str | None
    job: str | None
    facts: tuple[FactRow, ...]
    findings: tuple[FindingView, ...]
    checks: int
    wall_s: float
    forecast: Forecast | None = None
    deep: DeepReport | None = None


Row = tuple[str, Callable[[NodeFacts], Optional[str]]]


def _chips_text(facts: NodeFacts) -> str | None:
    info = facts.npu.info
    if info is None:
        return None
    names = dict.fromkeys(chip.name or "?" for chip in info.chips)
    return f"{len(info.chips)} x {', '.join(names)}"


ROWS: tuple[Row, ...] = (
    ("os", lambda facts: facts.os_name),
    ("kernel", lambda facts: _joined(facts.kernel, facts.arch)),
    ("cpus", lambda facts: None if facts.cpus is None else str(facts.cpus)),
    ("memory", lambda facts: gib(facts.memory_bytes)),
    ("user", lambda facts: facts.user),
    (
        "python",
        lambda facts: (
            None
            if facts.python is None or facts.python.version is None
            else _joined(facts.python.version, facts.python.executable)
        ),
    ),
    ("torch", lambda facts: module_of(facts, "torch")),
    ("npus", _chips_text),
    ("driver", lambda facts: facts.npu.driver_version),
    (
        "firmware",
        lambda facts: (
            facts.npu.files.firmware.version
            if facts.npu.files is not None and facts.npu.files.firmware is not None
            else None
        ),
    ),
    ("cann", lambda facts: facts.npu.cann.version if facts.npu.cann is not None else None),
)
"""Name, and what a node says; a node that could not be asked, or has no such thing, says None."""


def fact_rows(world: World) -> tuple[FactRow, ...]:
    """The lines of the table; a row that nobody can answer is left out."""
    found: list[FactRow] = []
    for name, value_of in ROWS:
        values = {host: value_of(facts) for host, facts in world.facts.items()}
        same = compare(values)
        if same is None:
            continue
        groups = [FactGroup(same.majority, same.majority_hosts), *(FactGroup(*other) for other in same.others)]
        unknown = tuple(host for host, value in values.items() if value is None)
        if unknown:
            groups.append(FactGroup(None, unknown))
        found.append(FactRow(name, tuple(groups)))
    return tuple(found)


def view_findings(findings: tuple[Finding, ...], lang: str) -> tuple[FindingView, ...]:
    views = []
    for finding in findings:
        words = render(finding, lang)
        views.append(
            FindingView(
                code=finding.code,
                severity=finding.severity,
                nodes=fold_names(finding.hosts),
                hosts=finding.hosts,
                says=words.says,
                advice=words.advice,
                evidence=finding.evidence,
                values=rendered(finding, lang),
                fix=fix_of(finding),
            )
        )
    return tuple(views)


def make_report(world: World, findings: tuple[Finding, ...], *, lang: str, checks: int, wall_s: float) -> DoctorReport:
    is_fit = not any(finding.severity is Severity.FAIL for finding in findings)
    return DoctorReport(
        is_fit=is_fit,
        hosts=(*world.facts, *world.unreached),
        unreached=world.unreached,
        family=world.family,
        job=world.job.name if world.job is not None else None,
        facts=fact_rows(world),
        findings=view_findings(findings, lang),
        checks=checks,
        wall_s=wall_s,
    )


def add_deep(report: DoctorReport, deep: DeepReport, findings: tuple[Finding, ...], *, lang: str) -> DoctorReport:
    """The report with what a deep look measured, and what that means; the worst of all findings first."""
    views = sorted((*report.findings, *view_findings(findings, lang)), key=lambda view: SEVERITIES.index(view.severity))
    is_fit = report.is_fit and not any(finding.severity is Severity.FAIL for finding in findings)
    measured = tuple(name for name in report.hosts if name in deep.hosts)
    rows = tuple(FactRow(name, (FactGroup(text, measured),)) for name, text in summary_rows(deep))
    return replace(report, facts=(*report.facts, *rows), findings=tuple(views), is_fit=is_fit, deep=deep)


def refusal_text(findings: tuple[Finding, ...], lang: str = "en", *, most: int = 8) -> str:
    """Findings as the reason why nothing was started: code, nodes, fact, way out."""
    lines = [one_line(view) for view in view_findings(findings[:most], lang)]
    if len(findings) > most:
        lines.append(f"and {len(findings) - most} more: `ascendrun doctor` shows all")
    return lines[0] if len(lines) == 1 else "\n  ".join([f"{len(findings)} checks fail:", *lines])


def one_line(view: FindingView) -> str:
    """A finding in one line, for a job's story."""
    where = f"{view.nodes}: " if view.nodes else ""
    return f"{where}{view.says} [{view.code}]" + (f" ({view.advice})" if view.advice else "")


def module_of(facts: NodeFacts, name: str) -> str | None:
    """The installed version of a Python package in the job's shell; "none" when it is not there; None: not known."""
    if facts.python is None or facts.python.modules is None or name not in facts.python.modules:
        return None
    return facts.python.modules[name] or "none"


def gib(size_bytes: int | None) -> str | None:
    return None if size_bytes is None else f"{size_bytes / (1 << 30):.0f} GiB"


def _joined(*parts: str | None) -> str | None:
    known = [part for part in parts if part]
    return " ".join(known) if known else None
