"""Whom to blame when the ranks only tell that they waited for each other, or lost each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable

from ascendrun.health.diagnosis import accusations, reaching, silence, waitchain
from ascendrun.health.diagnosis.candidates import Candidate
from ascendrun.health.diagnosis.evidence import Evidence
from ascendrun.health.diagnosis.stories import RankStory
from ascendrun.health.diagnosis.waittable import Said, Table

RULES: tuple[Callable[[Table], Candidate | None], ...] = (
    accusations.blame_tls,
    accusations.blame_differs,
    accusations.blame_cqe,
    accusations.blame_location,
    reaching.blame_loopback,
    accusations.blame_world_size,
    accusations.blame_missing,
    silence.blame_finished_early,
    silence.blame_unreachable,
    silence.blame_first_loser,
    reaching.blame_unreached,
    accusations.blame_completion,
    silence.blame_silent,
    silence.blame_latest,
    silence.blame_sequence,
    silence.blame_lagging,
    waitchain.blame_stuck,
    waitchain.blame_chain,
    waitchain.blame_named,
)
"""What is said outright before what is concluded."""


def blame_waiting(evidence: Evidence, stories: Sequence[RankStory]) -> Candidate | None:
    """The first rule that can tell; None when no rank waited for or lost another, or nothing tells whom. Where nobody
    failed and nobody says anything, a host that does not answer is all that is left."""
    said: list[Said] = [(story, word) for story in stories for word in story.words]
    table = Table(evidence, stories, said)
    if not said:
        return None if any(story.rank.has_failed for story in stories) else silence.blame_unreachable(table)
    return next((found for found in (rule(table) for rule in RULES) if found is not None), None)
