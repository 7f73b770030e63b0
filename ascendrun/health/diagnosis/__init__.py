"""Why an attempt ended: which rank was first, on which evidence, with which confidence, and what followed.

diagnose(evidence) -> Diagnosis        render(diagnosis, "zh") -> the same with its sentences

evidence      the input                             result         the output
times         offsets and errors of clocks removed  ranking        the choice, its caveats, the chain
exits         codes, signals, out-of-memory killer  fatal          the exception that ended a rank
candidates    who may have been first               outcomes       attempts without a failure
collective_reports, reachability, unresponsive, wait_chain: rules for whom to blame when all only waited,
              over wait_table                       peers          messages about other ranks
after_error   what a rank did after a line          rank_timelines one rank's end by its own output
lines/        the meaning of single lines of output render         the sentences, from texts/ and the catalogue
"""

from __future__ import annotations

from dataclasses import replace

from ascendrun.health.diagnosis.evidence import (
    Clock,
    DeviceFact,
    Evidence,
    FixedClock,
    HostEvidence,
    Line,
    RankEvidence,
)
from ascendrun.health.diagnosis.lines.launchers import expand
from ascendrun.health.diagnosis.outcomes import LIVE, explain_ending
from ascendrun.health.diagnosis.rank_timelines import read_timeline, without_survived
from ascendrun.health.diagnosis.ranking import decide
from ascendrun.health.diagnosis.render import NOT_RESTARTED, render
from ascendrun.health.diagnosis.result import ChainLink, Confidence, Diagnosis, Proof, Role
from ascendrun.text import Text

__all__ = [
    "ChainLink", "Clock", "Confidence", "DeviceFact", "Diagnosis", "Evidence", "FixedClock", "HostEvidence", "Line",
    "LIVE", "Proof", "RankEvidence", "Role", "diagnose", "render",
]  # fmt: skip


_DECISIONS = frozenset({"state-changed", "stop-requested", "unreachable", "reachable"})


def diagnose(evidence: Evidence) -> Diagnosis:
    """Pure; never raises. Missing evidence lowers the confidence. `render` adds the sentences."""
    ending = explain_ending(evidence)
    if ending is not None:
        return replace(ending, outcome=_outcome(evidence))
    whole = expand(evidence)
    timelines = without_survived([read_timeline(whole, rank) for rank in whole.ranks])
    return replace(decide(whole, timelines), outcome=_outcome(whole))


def _outcome(evidence: Evidence) -> tuple[Text, ...]:
    """The events from the moment on when the attempt was being stopped; of an attempt that failed and was not
    restarted, that as well."""
    states = {
        index: event.values.get("state") for index, event in enumerate(evidence.events) if event.code == "state-changed"
    }
    stopping = [index for index, state in states.items() if state == "STOPPING"]
    failed = [index for index, state in states.items() if state == "FAILED"]
    if not stopping and not failed:
        return ()
    begins = stopping[-1] + 1 if stopping else failed[0]
    shown = [event for event in evidence.events[begins:] if event.code in _DECISIONS][:4]
    messages = tuple(event.message() for event in shown)
    if shown and shown[-1].values.get("state") == "FAILED":
        return (*messages, NOT_RESTARTED)
    return messages
