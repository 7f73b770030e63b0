"""Findings of a check: a stable code, severity, hosts, typed values and evidence."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field, replace
from enum import Enum
from typing import Any

from ascendrun.core.dataclass import dataclass
from ascendrun.text import Text


class Severity(str, Enum):
    """FAIL prevents a start; WARN is a risk for a job; NOTE is information."""

    FAIL = "FAIL"
    WARN = "WARN"
    NOTE = "NOTE"


SEVERITIES: tuple[Severity, ...] = (Severity.FAIL, Severity.WARN, Severity.NOTE)
"""Most severe first."""


@dataclass(frozen=True)
class Finding:
    """One fault. `code`: stable, for programs, kebab-case; its message, hint and fix are in health/texts.

    `values`: by placeholder of the message; numbers, strings, texts and tuples of them. `evidence`: lines of a tool's
    output and measured values. `hosts` (): it concerns the entire cluster or job.
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
        replace(same[0], hosts=tuple(dict.fromkeys(host for finding in same for host in finding.hosts)))
        for same in groups.values()
    ]
    return tuple(sorted(folded, key=lambda finding: SEVERITIES.index(finding.severity)))


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pause garbage collection while the facts of many nodes (a million objects, no cycles) are read: 25% faster."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
