"""Diagnosis of an ended attempt: the first failing rank, the evidence, the confidence, and the consequences.

diagnose(evidence) -> Diagnosis        render(diagnosis, "zh") -> the diagnosis with sentences

evidence        the input, and times on one clock      result      observations, and the output
lines/          the meaning of single lines            rank_timelines  one rank's end in its own output
candidates      possible first failures: ranks of one reason, and what is observed of their hosts
edges           which rank names which others          wait_rules  rules to find the culprit if all waited
ranking         the choice, its caveats, the chain     outcomes    attempts without a failure
classes         domain, scope, phase, grade, whether another attempt helps
render          sentences, from text/en.json and signatures
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ascendrun.ascend.vocabularies import alike
from ascendrun.core.events import Event
from ascendrun.health.diagnosis.evidence import DeviceFact, Evidence, FixedClock, HostEvidence, Line, RankEvidence
from ascendrun.health.diagnosis.lines.launchers import expand
from ascendrun.health.diagnosis.outcomes import LIVE, explain_ending
from ascendrun.health.diagnosis.rank_timelines import read_timeline, without_survived
from ascendrun.health.diagnosis.ranking import decide
from ascendrun.health.diagnosis.render import NOT_RESTARTED, render
from ascendrun.health.diagnosis.result import ChainLink, Confidence, Diagnosis, Proof, Role
from ascendrun.text import Text

__all__ = [
    "ChainLink", "Confidence", "DeviceFact", "Diagnosis", "Evidence", "FixedClock", "HostEvidence", "Line",
    "LIVE", "Proof", "RankEvidence", "Role", "diagnose", "outcome_of", "render",
]  # fmt: skip


def diagnose(evidence: Evidence) -> Diagnosis:
    """Diagnose an attempt. Never raises. Missing evidence lowers the confidence. `render` adds the sentences."""
    ending = explain_ending(evidence)
    if ending is not None:
        return replace(ending, outcome=outcome_of(evidence.events))
    whole = expand(evidence)
    timelines = without_survived([read_timeline(whole, rank) for rank in whole.ranks])
    return replace(decide(whole, timelines), outcome=outcome_of(whole.events), labels=evidence.labels)


def outcome_of(events: Sequence[Event]) -> tuple[Text, ...]:
    """Return the events since the stop of the attempt started; for a failed attempt also that it was not
    restarted."""
    states = [event.values.get("state") if event.code == "state-changed" else None for event in events]
    if "STOPPING" not in states and "FAILED" not in states:
        return ()
    begins = len(states) - states[::-1].index("STOPPING") if "STOPPING" in states else states.index("FAILED")
    shown = [event for event in events[begins:] if event.code in alike("decisions")][:4]
    messages = tuple(event.message() for event in shown)
    last = shown[-1].values if shown else {}
    if last.get("state") == "FAILED" and getattr(last.get("reason"), "key", None) != "reason.not-restarted":
        return (*messages, NOT_RESTARTED)
    return messages
