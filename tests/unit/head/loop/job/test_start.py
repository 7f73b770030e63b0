"""The start of an attempt over nodes that reply as they like: what is sent and asked when."""

from __future__ import annotations

import gc
import hashlib
import json
import weakref
from functools import partial
from itertools import count
from typing import Any, Callable

import pytest

from ascendrun.core.hosts import Host
from ascendrun.core.jobfile.model import JobSpec
from ascendrun.core.jobs import inputs
from ascendrun.core.jobs.job import State
from ascendrun.core.jobs.plan import Tree
from ascendrun.core.node_messages import Failure
from ascendrun.core.reports import NodeReport
from ascendrun.head.protocol import agent_messages as agent
from ascendrun.head.protocol.file_messages import PutTree
from ascendrun.head.protocol.remote import Reply
from ascendrun.head.state.state_dir import tree_file
from ascendrun.head.survey import kept_facts
from ascendrun.head.survey.doctor import Examination
from tests.lib.small_world import Link, World

N1 = Host("n1", slots=8)
SPEC = JobSpec.model_validate(
    {"name": "demo", "command": ("python3", "train.py"), "devices": {"type": "cpu", "per_node": 1}}
)
PYTHON = {"code": 0, "out": json.dumps({"executable": "/usr/bin/python3", "version": "3.11.4", "modules": {}})}
NO_SPACE = {"disks": {"x": {"at": "/r", "free_bytes": 5, "total_bytes": 1 << 40, "free_inodes": 9, "total_inodes": 9}}}
HELD = inputs.Held("n1", "NPU 3 is in use", None)


def packed(world: World) -> Tree:
    """A packed directory on the head node."""
    data = b"code"
    sha256 = hashlib.sha256(data).hexdigest()
    file = tree_file(world.folder, sha256)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    return Tree("code", sha256, len(data), 1)


def ready(world: World, **results: Any) -> None:
    world.get(N1).node.survey = {"python": PYTHON, **results}
    world.up(N1)


def asked(world: World, kind: type) -> list[Any]:
    return [one for one in world.get(N1).node.asked if isinstance(one, kind)]


def probes(world: World) -> list[bool]:
    """Of each survey, whether it asked for the interpreter."""
    return [any(item["name"] == "python" for item in survey.items) for survey in asked(world, agent.Survey)]


def start(world: World, **changes: Any) -> State:
    job = world.job(N1, **{"spec": SPEC, **changes})
    world.turn()
    return world.now(job).state


def run(world: World) -> None:
    """The host is ready, and its rank starts."""
    [runner] = world.jobs
    runner.feed(inputs.NodeReady("n1", 29500))
    runner.feed(inputs.RankStarted("n1", 0, 4711))
    world.turn()


def answering(world: World, kind: type, take: Callable[[Callable[[], None]], None]) -> None:
    """`take` gets what answers each request of a kind."""
    link: Any = world.get(N1)

    def call(request: Any, body: bytes = b"", *, deadline_s: float, done: Any) -> None:
        answer = partial(Link.call, link, request, body, deadline_s=deadline_s, done=done)
        take(answer) if isinstance(request, kind) else answer()

    link.call = call


def test_the_directories_are_sent_while_the_hosts_are_examined_and_once(world: World) -> None:
    ready(world)
    waiting: list[Callable[[], None]] = []
    answering(world, agent.Survey, waiting.append)
    assert start(world, trees=(packed(world),)) is State.CHECKING
    assert len(asked(world, PutTree)) == 1 and not asked(world, agent.Prepare), "no device is held before the checks"
    [answer] = waiting
    answer()
    world.turn()
    assert (len(asked(world, agent.Prepare)), len(asked(world, PutTree))) == (1, 1)


def test_a_directory_that_a_host_did_not_take_during_the_examination_is_sent_again(world: World) -> None:
    ready(world)
    tries = count()
    link: Any = world.get(N1)

    def call(request: Any, body: bytes = b"", *, deadline_s: float, done: Any) -> None:
        if isinstance(request, PutTree) and next(tries) == 0:
            done(Reply(None, error=Failure("internal", "full for a moment")))
        else:
            Link.call(link, request, body, deadline_s=deadline_s, done=done)

    link.call = call
    start(world, trees=(packed(world),))
    assert next(tries) == 2 and len(asked(world, agent.Prepare)) == 1


def test_what_lasts_is_asked_once_a_minute(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    ready(world)
    for _ in range(2):
        start(world)
    assert probes(world) == [True, False] and len(asked(world, agent.Prepare)) == 2
    world.get(N1).node.boot_id = "later"
    start(world)
    assert probes(world) == [True, False, True]
    start(world, spec=SPEC.model_copy(update={"env": {"PYTHONPATH": "/opt/lib"}}))
    assert probes(world) == [True, False, True, True], "another shell"
    monkeypatch.setattr(kept_facts, "KEPT_S", 0.0)
    start(world)
    assert probes(world) == [True, False, True, True, True]


@pytest.mark.parametrize(("then", "state"), [((), State.RUNNING), ((HELD,), State.BACKOFF)], ids=["runs", "held"])
def test_what_hosts_replied_is_not_kept_when_the_start_is_over(
    world: World, then: tuple[inputs.Held, ...], state: State
) -> None:
    def kept() -> int:
        gc.collect()
        return sum(isinstance(one, (NodeReport, Examination)) for one in gc.get_objects())

    before = kept()
    ready(world)
    job = world.job(N1, spec=SPEC)
    world.turn()
    assert kept() > before
    [runner] = world.jobs
    for event in then:
        runner.feed(event)
    if not then:
        run(world)
    world.turn()
    assert world.now(job).state is state and kept() == before


def test_what_lasts_is_released_after_a_minute_without_another_start(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_facts, "KEPT_S", 0.0)
    large = weakref.ref(python := Large(PYTHON))
    ready(world, python=python)
    del python
    world.job(N1, spec=SPEC)
    world.turn()
    run(world)
    world.get(N1).node.survey = None
    world.context.kept_facts.tick()
    gc.collect()
    assert large() is None


class Large(dict):  # type: ignore[type-arg]
    """A reply that can be watched."""


def test_after_a_finding_everything_is_asked_before_it_counts(world: World) -> None:
    ready(world)
    start(world)
    ready(world, disk=NO_SPACE)
    start(world)
    assert probes(world) == [True, False, True] and len(asked(world, agent.Prepare)) == 1
    ready(world)
    start(world)
    assert probes(world) == [True, False, True, True] and len(asked(world, agent.Prepare)) == 2
