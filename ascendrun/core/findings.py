"""What a check found: a stable code, how bad it is, on which hosts, and the evidence; its words are made elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from ascendrun.text import Text


class Severity(str, Enum):
    """FAIL stops a start; WARN will hurt sooner or later; NOTE is worth knowing."""

    FAIL = "FAIL"
    WARN = "WARN"
    NOTE = "NOTE"


SEVERITIES: tuple[Severity, ...] = (Severity.FAIL, Severity.WARN, Severity.NOTE)
"""The worst first."""


@dataclass(frozen=True)
class Finding:
    """One fault. `code`: stable, for programs, kebab-case; its words in each language are in health/texts.

    `values`: what the words name, by placeholder. `evidence`: raw lines that a person would want to see.
    `hosts` (): it concerns the cluster or the job as a whole.
    """

    code: str
    severity: Severity
    hosts: tuple[str, ...] = ()
    values: Mapping[str, str | Text] = field(default_factory=dict)
    evidence: tuple[str, ...] = ()


def fold_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """What is the same but for its hosts becomes one finding over all of them; the worst first, else order is kept."""
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
