"""Replies to the probes of what lasts: the next start on a host within a minute does not ask for them again.

Only a reboot, an administrator or an installation changes them. A start with any finding has all probes asked again,
so that no check fails by what was mended meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from typing import Any

from ascendrun.core.rank_env import is_own_variable
from ascendrun.core.reports import NodeReport
from ascendrun.head.protocol import agent_messages as agent

KEPT_S = 60.0


class KeptFacts:
    """By host, its user and its boot. Use from the controller's thread."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str, str], dict[str, tuple[float, Any]]] = {}
        self._due_mono = float("inf")

    def known(self, report: NodeReport, survey: agent.Survey) -> dict[str, Any]:
        """Return, by probe, the results that this survey would have; those in a container are never known."""
        kept, since = self._kept.get(_place(report), {}), time.monotonic() - KEPT_S
        found = {name: kept.get(question) for name, question in _questions(survey).items()}
        return {name: one[1] for name, one in found.items() if one is not None and one[0] > since}

    def note(self, report: NodeReport, survey: agent.Survey, results: Mapping[str, Any]) -> None:
        """Keep what lasts of the results of a survey, unless the boot of the host is unknown."""
        if not report.boot_id:
            return
        kept, now = self._kept.setdefault(_place(report), {}), time.monotonic()
        self._due_mono = min(self._due_mono, now + KEPT_S)
        for name, question in _questions(survey).items():
            raw = results.get(name)
            if isinstance(raw, dict) and raw.get("code") == 0 and not (raw.get("late") or raw.get("timed_out")):
                kept[question] = (now, raw)

    def tick(self) -> None:
        """Forget what is too old; called periodically."""
        now = time.monotonic()
        if now < self._due_mono:
            return
        kept = {
            place: {name: one for name, one in own.items() if one[0] > now - KEPT_S}
            for place, own in self._kept.items()
        }
        self._kept = {place: own for place, own in kept.items() if own}
        times = [at for own in self._kept.values() for at, _ in own.values()]
        self._due_mono = min(times, default=float("inf")) + KEPT_S

    def forget(self, reports: Iterable[NodeReport]) -> None:
        for report in reports:
            self._kept.pop(_place(report), None)


def _place(report: NodeReport) -> tuple[str, str, str]:
    return report.host, report.user, report.boot_id


def _questions(survey: agent.Survey) -> dict[str, str]:
    """Return a hash of each lasting probe with the shell in which it is asked. Variables of ascendrun and the
    directory, which are new for each job, do not count."""
    from ascendrun.health.survey.probes import LASTING

    shell = dict(survey.shell or {})
    if shell.get("container") is not None:
        return {}
    env = {name: text for name, text in (shell.get("env") or {}).items() if not is_own_variable(name)}
    inside = {"setup": shell.get("setup"), "env": env, "secret_env": dict(shell.get("secret_env") or {})}
    whole = {item["name"]: [item, inside] for item in survey.items if item["name"] in LASTING}
    return {name: hashlib.sha256(json.dumps(one, sort_keys=True).encode()).hexdigest() for name, one in whole.items()}
