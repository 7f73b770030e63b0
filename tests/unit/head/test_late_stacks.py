"""Stacks that arrive when a hung job is already being stopped are not kept: its ranks were told to abort."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ascendrun.core.jobs.job import State
from ascendrun.head.loop.hang import HangMonitor, _Watched
from ascendrun.head.protocol.agent_messages import StacksReply
from ascendrun.head.protocol.remote import Reply
from ascendrun.head.state.state_dir import SPOOL_STACKS, spool_dir
from ascendrun.health.hang import Windows
from tests.lib.small_world import N1, World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.store.close()


@pytest.mark.parametrize(("state", "is_kept"), [(State.RUNNING, True), (State.STOPPING, False)])
def test_stacks_are_kept_while_the_job_runs(
    world: World, monkeypatch: pytest.MonkeyPatch, state: State, is_kept: bool
) -> None:
    job = world.running(N1)
    [runner] = world.jobs
    replies: list[Any] = []
    link: Any = world.get(N1)
    link.is_up = True
    monkeypatch.setattr(link, "call", lambda request, *, deadline_s, done: replies.append(done))
    monitor = HangMonitor(
        world.folder,
        post=lambda call: call(),
        record=lambda job_id, events: None,
        events_of=lambda job_id: (),
        feed=lambda job_id, event: None,
        separate=lambda job, host, world: None,
    )
    monitor._ask(runner, _Watched(world.folder, job, Windows(), is_reported=False))
    runner.job = replace(runner.job, state=state)
    replies[0](Reply(StacksReply((), at_ns=1)))
    assert (spool_dir(world.folder, job.id, job.attempt) / "n1" / SPOOL_STACKS).exists() == is_kept
