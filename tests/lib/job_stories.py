"""Lives of a job as stories: events in, records and actions out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ascendrun.core.events import Event
from ascendrun.core.jobs import actions, endings, inputs
from ascendrun.core.jobs.draft import Step
from ascendrun.core.jobs.inputs import JobInput
from ascendrun.core.jobs.job import Exit, Job, State
from ascendrun.core.jobs.lifecycle import advance

HOSTS = ("node1", "node2")


def make_job(**changes: Any) -> Job:
    job = Job(id="j-0001", name="demo", run="head-j-0001", hosts=HOSTS, grace_s=30, start_s=60, created_at_s=0.0)
    return replace(job, **changes)


class Story:
    """A job that lives through events at one second each."""

    def __init__(self, job: Job) -> None:
        self.job, self.now_s = job, 0.0
        self.actions: list[actions.Action] = []
        self.events: list[Event] = []
        self.states: list[State] = [job.state]

    def tell(self, *events: JobInput) -> Story:
        for event in events:
            self.now_s += 1.0
            self.take(advance(self.job, event, now_s=self.now_s))
        return self

    def take(self, step: Step) -> None:
        self.job = step.job
        self.actions = list(step.actions) or self.actions
        self.events += step.events
        self.states += [move.target for move in step.transitions]


def to_starting() -> tuple[JobInput, ...]:
    return (
        inputs.NodesFree(HOSTS),
        inputs.NodeReported("node1", "b1", 0.0),
        inputs.NodeReported("node2", "b2", 0.0),
        inputs.Planned({"node1": (0, 1), "node2": (2, 3)}, 4),
        inputs.NodeStaged("node1"),
        inputs.NodeStaged("node2"),
    )


def to_running() -> tuple[JobInput, ...]:
    started = tuple(inputs.RankStarted("node1" if rank < 2 else "node2", rank, 100 + rank) for rank in range(4))
    return (*to_starting(), inputs.NodeReady("node1", 29400), inputs.NodeReady("node2", None), *started)


def ended(rank: int, code: int = 0, *, at_ns: int = 5, stopped: bool = False) -> endings.RankExited:
    return endings.RankExited("node1" if rank < 2 else "node2", rank, Exit(code, None, at_ns, stopped))
