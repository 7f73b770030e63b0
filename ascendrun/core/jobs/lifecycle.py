"""State machine of a job: a pure step from one input to the next record and the actions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Callable

from ascendrun.core.events import Event
from ascendrun.core.jobs.actions import StartNodes
from ascendrun.core.jobs.draft import Draft, Step, judge_actions, stop_actions
from ascendrun.core.jobs.inputs import HeadRestarted, JobInput, OfNode
from ascendrun.core.jobs.job import BEFORE_GO, Job, State


def advance(job: Job, event: JobInput, *, now_s: float, recent: Callable[[], Sequence[str]] = tuple) -> Step:
    """Return the next record of `job` after `event`, and the actions. Pure; a repeated event changes nothing.

    `recent` returns the last events of the job; used only for the message of InvalidTransitionError.
    """
    if isinstance(event, OfNode) and job.place_of(event.host) is None:
        return Step(job)  # of an attempt that is over: it arrived late
    draft = Draft(job, now_s, recent)
    event.apply(draft)
    draft.settle()
    return Step(draft.job, tuple(draft.transitions), tuple(draft.events), tuple(draft.actions))


def resume(job: Job, *, now_s: float) -> Step:
    """Return the step of a new controller for a job of a previous controller.

    A start without GO is repeated as the next attempt: the nodes dropped their reservations with the connections of the
    old controller. After GO every action is repeatable and is sent again.
    """
    if job.state in BEFORE_GO and job.go_sent_at_s is None:
        return advance(job, HeadRestarted(), now_s=now_s)
    job = restart_timers(job, now_s=now_s)
    if job.state is State.STARTING:
        return Step(job, actions=(StartNodes(),))
    if job.state is State.STOPPING or job.unconfirmed or job.state is State.FAILED:
        return Step(job, actions=stop_actions(job) + judge_actions(job))
    return Step(job)


def restart_timers(job: Job, *, now_s: float) -> Job:
    """Restart the timeouts of a job after a time without a running controller (stopped or suspended)."""
    if job.state is State.STARTING and job.go_sent_at_s is not None:
        return replace(job, go_sent_at_s=now_s)
    return replace(job, since_s=now_s) if job.state is State.STOPPING else job


def state_changes(events: Iterable[Event]) -> tuple[tuple[float, State], ...]:
    """Return (UTC seconds, new state) of a job's events, in their order. A state of a later release is skipped."""
    changes = ((event.at_s, event.values.get("state")) for event in events if event.code == "state-changed")
    return tuple((at_s, State(name)) for at_s, name in changes if name in State.__members__)
