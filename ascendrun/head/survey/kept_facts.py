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
        for question in [question for question, (at, _) in kept.items() if at <= now - KEPT_S]:
            del kept[question]
        for name, question in _questions(survey).items():
            raw = results.get(name)
            if isinstance(raw, dict) and raw.get("code") == 0 and not (raw.get("late") or raw.get("timed_out")):
                kept[question] = (now, raw)

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
