"""Why an attempt ended: which rank was first, on which evidence, how sure that is, and what followed from it.

diagnose(evidence) -> Diagnosis        tell(diagnosis, "zh") -> the same with its words

evidence    what goes in                          verdict     what comes out
times       clocks' offsets and errors removed    tracebacks  exceptions and their chains
peers       words about other ranks               exits       codes, signals, the kernel's out-of-memory killer
launchers   torchrun's and deepspeed's own ranks  rank_lines  one rank's lines with what is known of each
elastic, devices   texts of others made evidence  fatal       the exception that ended a rank
unfolding   lines before a logger changed them    known_lines known messages outside of exceptions
remarks     warnings, tries, words at the side    stories     one rank's end by its own traces
afterwards  what a rank did after a line          places      services, and everybody's own address
handlers    what came while another was handled
candidates  who may have been first               waiting     whom to blame when all only waited, by the rules of
                                                              accusations, reaching, silence, waitchain
judge       the choice, its doubts, the chain     endings     attempts without a failure
telling     the words, from texts/ and the signature catalogue
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
    StoryEvent,
)
from ascendrun.health.diagnosis.lines.launchers import expand
from ascendrun.health.diagnosis.outcomes import LIVE, explain_ending
from ascendrun.health.diagnosis.rank_timelines import tell_rank, without_survived
from ascendrun.health.diagnosis.ranking import judge
from ascendrun.health.diagnosis.render import tell
from ascendrun.health.diagnosis.result import ChainLink, Confidence, Diagnosis, Proof, Role

__all__ = [
    "ChainLink",
    "Clock",
    "Confidence",
    "DeviceFact",
    "Diagnosis",
    "Evidence",
    "FixedClock",
    "HostEvidence",
    "Line",
    "LIVE",
    "Proof",
    "RankEvidence",
    "Role",
    "StoryEvent",
    "diagnose",
    "tell",
]


NOT_AGAIN = "not-again"


def diagnose(evidence: Evidence) -> Diagnosis:
    """Pure; never raises for odd evidence: what is missing lowers the confidence. Words come with `tell`."""
    ending = explain_ending(evidence)
    if ending is not None:
        return replace(ending, decided=_decided(evidence))
    whole = expand(evidence)
    stories = without_survived([tell_rank(whole, rank) for rank in whole.ranks])
    return replace(judge(whole, stories), decided=_decided(whole))


def _decided(evidence: Evidence) -> tuple[str, ...]:
    """The story's lines from the moment on when the attempt was being stopped: what ascendrun did about it; of an
    attempt that failed and that none followed, a label of texts/ says so."""
    ways = [
        index
        for index, event in enumerate(evidence.story)
        if event.kind == "state" and event.text.startswith(("STOPPING", "FAILED"))
    ]
    if not ways:
        return ()
    stopping = [index for index in ways if evidence.story[index].text.startswith("STOPPING")]
    begins = stopping[-1] + 1 if stopping else ways[0]
    told = tuple(event.text for event in evidence.story[begins:] if event.kind != "note" or "exclud" in event.text)[:4]
    return (*told, NOT_AGAIN) if told and told[-1].startswith("FAILED") else told
