"""Whom to blame when the ranks only tell that they waited for each other, or lost each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable

from ascendrun.health.diagnosis import collective_reports, reachability, unresponsive, wait_chain
from ascendrun.health.diagnosis.candidates import Candidate
from ascendrun.health.diagnosis.evidence import Evidence
from ascendrun.health.diagnosis.rank_timelines import RankTimeline
from ascendrun.health.diagnosis.wait_table import Report, Table

RULES: tuple[Callable[[Table], Candidate | None], ...] = (
    collective_reports.blame_tls,
    collective_reports.blame_differs,
    collective_reports.blame_cqe,
    collective_reports.blame_location,
    reachability.blame_loopback,
    collective_reports.blame_world_size,
    collective_reports.blame_missing,
    unresponsive.blame_finished_early,
    unresponsive.blame_unreachable,
    unresponsive.blame_first_loser,
    reachability.blame_unreached,
    collective_reports.blame_completion,
    unresponsive.blame_silent,
    unresponsive.blame_latest,
    unresponsive.blame_sequence,
    unresponsive.blame_lagging,
    wait_chain.blame_stuck,
    wait_chain.blame_chain,
    wait_chain.blame_named,
)
"""What is reported outright comes before what is concluded."""


def blame_waiting(evidence: Evidence, timelines: Sequence[RankTimeline]) -> Candidate | None:
    """The first rule that can tell; None when no rank waited for or lost another, or nothing tells whom. Where nobody
    failed and nobody says anything, a host that does not answer is all that is left."""
    reports: list[Report] = [(timeline, word) for timeline in timelines for word in timeline.words]
    table = Table(evidence, timelines, reports)
    if not reports:
        return (
            None if any(timeline.rank.has_failed for timeline in timelines) else unresponsive.blame_unreachable(table)
        )
    return next((found for found in (rule(table) for rule in RULES) if found is not None), None)
