"""Stacks of a hang that the head keeps: shown after the end, without the node."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ascendrun.cluster import Cluster
from ascendrun.core.events import Event
from ascendrun.core.jobs.job import State
from ascendrun.head.loop.hang import keep_stacks
from ascendrun.head.state.state_dir import SPOOL_STACKS, spool_dir
from ascendrun.head.state.store import Store
from ascendrun.query.explain import JobStacks, explain_job, kept_stacks
from tests.lib.demo_jobs import store_job

WAITS = json.dumps(
    [{"thread_name": "MainThread", "frames": [{"filename": "/t/torch/distributed/c10d.py", "name": "all_reduce"}]}]
)


class World:
    """A job of two attempts on two hosts; the first one hung."""

    def __init__(self, folder: Path) -> None:
        self.state_dir = folder / "state"
        store = Store.open(self.state_dir)
        made = store_job(store, spec={"name": "j"}, name="j")
        self.job = replace(made, state=State.FAILED, attempt=2)
        hang = Event("hang", {"finding": "stuck"}, ("b",), (1,), attempt=1, at_s=5.0)
        store.jobs.save(self.job, [hang], now_s=2.0)
        store.close()

    def folder(self, host: str, attempt: int = 1) -> Path:
        return spool_dir(self.state_dir, self.job.id, attempt) / host

    def keep(self, host: str, *rows: dict[str, Any]) -> None:
        keep_stacks(self.folder(host), rows)

    def stacks(self, **asked: int) -> JobStacks | None:
        return kept_stacks(self.state_dir, self.job.id, **asked)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def waiting(rank: int) -> dict[str, Any]:
    return {"rank": rank, "pid": 7, "state": "S", "source": "py-spy", "text": WAITS}


def stopped(rank: int) -> dict[str, Any]:
    return {"rank": rank, "pid": 8, "state": "T", "source": "proc", "text": ""}


def test_stacks_are_shown_of_the_newest_attempt_that_has_any(world: World) -> None:
    assert world.stacks() is None
    world.keep("a", waiting(0))
    world.keep("b", waiting(1))
    world.keep("b", stopped(1))
    found = world.stacks()
    assert found is not None and found.attempt == 1 and found.at_s is not None
    assert [(group.ranks, group.hosts, group.state, group.is_awaited) for group in found.groups] == [
        ((0,), ("a",), "S", False),
        ((1,), ("b",), "T", True),
    ]
    assert world.stacks(attempt=2) is None
    own = world.stacks(rank=0)
    assert own is not None and [group.threads[0][0] for group in own.groups] == ["MainThread"]


def abort_in(name: str) -> bytes:
    """What Python prints when it ends by SIGABRT in the function of this name."""
    code = f"import os\ndef {name}(): os.abort()\n{name}()"
    return subprocess.run([sys.executable, "-X", "faulthandler", "-c", code], stderr=subprocess.PIPE).stderr


def test_a_rank_without_a_stack_has_the_one_that_it_printed_as_it_was_ended(world: World) -> None:
    printed = abort_in("read_shard")
    world.keep("a", waiting(0))
    world.keep("b", stopped(1))
    (world.folder("b") / "rank-1.err.0").write_bytes(b"warning: x\n" + printed)
    (world.folder("a") / "rank-0.err.0").write_bytes(printed)
    found = world.stacks(attempt=1)
    assert found is not None
    frames = {group.ranks: (group.state, group.source, group.frames[0].split()[-1]) for group in found.groups}
    assert frames == {(0,): ("S", "py-spy", "all_reduce"), (1,): ("T", "abort", "read_shard")}


def test_the_rank_that_the_hang_names_is_awaited_though_it_was_ended_in_the_same_call(world: World) -> None:
    """Where its host sent no stacks, it prints at its end where it had been stopped: perhaps among the others."""
    printed = abort_in("all_reduce")
    for host, rank in (("a", 0), ("b", 1), ("b", 2)):
        world.folder(host).mkdir(parents=True, exist_ok=True)
        (world.folder(host) / f"rank-{rank}.err.0").write_bytes(printed)
    found = world.stacks()
    assert found is not None
    assert [(group.ranks, group.is_awaited) for group in found.groups] == [((0, 2), False), ((1,), True)]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"at_s": 1, "ranks": [{}]}', '{"at_s": 1, "ranks": 5}'])
def test_a_damaged_file_hides_no_other(world: World, damage: str) -> None:
    world.keep("a", waiting(0))
    world.folder("b").mkdir(parents=True)
    (world.folder("b") / SPOOL_STACKS).write_text(damage)
    found = world.stacks()
    assert found is not None and [group.ranks for group in found.groups] == [(0,)]


def test_a_place_that_takes_no_file_does_not_stop_the_monitor(world: World) -> None:
    world.folder("a").parent.mkdir(parents=True)
    world.folder("a").write_text("not a directory")
    world.keep("a", waiting(0))
    assert world.stacks() is None


def test_explain_and_bundle_have_them(world: World, tmp_path: Path) -> None:
    world.keep("a", waiting(0))
    world.keep("b", stopped(1))
    explained = explain_job(world.state_dir, world.job.id, attempt=1, now_s=9.0)
    assert [group.ranks for group in explained.stacks] == [(0,), (1,)]
    assert explain_job(world.state_dir, world.job.id, attempt=2, now_s=9.0).stacks == (), "it did not hang"
    Cluster(state_dir=world.state_dir).diagnosis.bundle(world.job.id, path=tmp_path / "b.tar.gz", environ={})
    with tarfile.open(tmp_path / "b.tar.gz") as archive:
        names = [name for name in archive.getnames() if name.endswith(SPOOL_STACKS)]
    assert len(names) == 2
