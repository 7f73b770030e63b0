"""What a check found: a stable code, its severity, its hosts, typed values and evidence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ascendrun.text import Text


class Severity(str, Enum):
    """FAIL prevents a start; WARN is a risk for a job; NOTE is information."""

    FAIL = "FAIL"
    WARN = "WARN"
    NOTE = "NOTE"


SEVERITIES: tuple[Severity, ...] = (Severity.FAIL, Severity.WARN, Severity.NOTE)
"""The worst first."""


@dataclass(frozen=True)
class Finding:
    """One fault. `code`: stable, for programs, kebab-case; its message, hint and fix are in health/texts.

    `values`: by placeholder of the message; numbers, strings, texts and tuples of them. `evidence`: lines of a tool's
    output and measured values. `hosts` (): it concerns the cluster or the job as a whole.
    """

    code: str
    severity: Severity
    hosts: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    evidence: tuple[str | Text, ...] = ()


def fold_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Merge findings that differ in their hosts only; the most severe first, otherwise the order is kept."""
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for finding in findings:
        key = (finding.code, finding.severity, tuple(sorted(finding.values.items())), finding.evidence)
        groups.setdefault(key, []).append(finding)
    folded = [
        Finding(same[0].code, same[0].severity, _hosts_of(same), same[0].values, same[0].evidence)
        for same in groups.values()
    ]
    return tuple(sorted(folded, key=lambda finding: SEVERITIES.index(finding.severity)))


def _hosts_of(findings: Iterable[Finding]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(host for finding in findings for host in finding.hosts))
