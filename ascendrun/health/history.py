"""From the stories of past jobs to what the cluster itself has seen: node-days, nodes lost, restarts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ascendrun.core.jobs.job import State
from ascendrun.health.forecast import SECONDS_A_DAY, History


@dataclass(frozen=True)
class JobStory:
    """`moves`: (UTC seconds, new state) in their order. `lost_a_node`: that is how its last attempt ended."""

    nodes: int
    moves: tuple[tuple[float, State], ...]
    lost_a_node: bool


def sum_up(stories: Iterable[JobStory], *, now_s: float) -> History:
    """Time counts while a job was RUNNING; a run that was cut short and tried again counts as a failure, as does one
    that a lost node ended for good."""
    node_s, failures = 0.0, 0
    restarts_s: list[float] = []
    for story in stories:
        running_since_s: float | None = None
        cut_at_s: float | None = None
        for at_s, state in story.moves:
            if state is State.RUNNING:
                running_since_s = at_s
                if cut_at_s is not None:
                    failures += 1
                    restarts_s.append(max(0.0, at_s - cut_at_s))
                    cut_at_s = None
            elif running_since_s is not None:
                node_s += story.nodes * max(0.0, at_s - running_since_s)
                running_since_s, cut_at_s = None, at_s
        if running_since_s is not None:
            node_s += story.nodes * max(0.0, now_s - running_since_s)
        failures += int(story.lost_a_node)
    return History(node_days=node_s / SECONDS_A_DAY, failures=failures, restarts_s=tuple(restarts_s))
