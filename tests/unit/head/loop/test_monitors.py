"""Which hosts are silent is told in time, and looked at no more often than that needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from ascendrun.core.errors import AscendrunError, HostKeyChangedError
from ascendrun.core.events import Event
from ascendrun.core.jobs.job import Job, State
from ascendrun.head.loop.monitors import LOOK_S, ReachabilityMonitor
from tests.lib.demo_jobs import demo_job

JOB = demo_job(hosts=("n1", "n2"), state=State.RUNNING, go_sent_at_s=2.0)
TURN_S = 0.25


@dataclass
class FakeHost:
    """A link to a host, and how often somebody asked how it is."""

    word: str = "ALIVE"
    looks: int = 0
    is_up: bool = True
    first_error: AscendrunError | None = None

    def liveness(self) -> str:
        self.looks += 1
        return self.word


class FakeRunner:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.hosts = {name: FakeHost() for name in job.hosts}

    def link(self, host: str) -> FakeHost:
        return self.hosts[host]


def test_hosts_are_looked_at_once_a_second_and_silence_is_still_told() -> None:
    told: list[Event] = []
    runner = FakeRunner(JOB)
    steps: Any = SimpleNamespace(events_of=lambda job_id: (), record=lambda job_id, events: told.extend(events))
    listening = ReachabilityMonitor(steps)
    for turn in range(41):
        listening.tick([runner], now_s=100.0 + turn * TURN_S)  # type: ignore[list-item]
    assert runner.hosts["n1"].looks <= 41 * TURN_S / LOOK_S + 1
    runner.hosts["n2"].word, runner.hosts["n2"].is_up = "UNREACHABLE", False
    for turn in range(80):
        listening.tick([runner], now_s=120.0 + turn * TURN_S)  # type: ignore[list-item]
    assert [(event.code, event.hosts, event.values) for event in told] == [
        ("unreachable", ("n2",), {"why": "no-reply"})
    ]
    runner.job = replace(JOB, state=State.FAILED, ended_at_s=9.0)
    listening.tick([runner], now_s=200.0)  # type: ignore[list-item]
    assert len(told) == 1


def test_hosts_lost_for_one_reason_are_one_event_and_those_of_another_reason_another() -> None:
    told: list[Event] = []
    runner = FakeRunner(replace(JOB, hosts=("n1", "n2", "n3")))
    steps: Any = SimpleNamespace(events_of=lambda job_id: (), record=lambda job_id, events: told.extend(events))
    listening = ReachabilityMonitor(steps)
    for host in runner.hosts.values():
        host.word = "UNREACHABLE"
    runner.hosts["n2"].first_error = HostKeyChangedError("n2: another key")
    for turn in range(80):
        listening.tick([runner], now_s=100.0 + turn * TURN_S)  # type: ignore[list-item]
    for host in runner.hosts.values():
        host.word = "ALIVE"
    for turn in range(80):
        listening.tick([runner], now_s=200.0 + turn * TURN_S)  # type: ignore[list-item]
    assert [(event.code, event.hosts, event.values) for event in told] == [
        ("unreachable", ("n1", "n3"), {"why": "no-reply"}),
        ("unreachable", ("n2",), {"why": "host-key-changed"}),
        ("reachable", ("n1", "n2", "n3"), {}),
    ]
    assert "no-reply" in str(told[0].message())
