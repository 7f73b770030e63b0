"""The daily removal of old data: over the small world of nodes."""

import os
from typing import Any

import pytest

from ascendrun.core.errors import ConflictError
from ascendrun.core.jobfile.model import JobSpec
from ascendrun.core.jobs.job import State
from ascendrun.core.jobs.plan import Tree
from ascendrun.core.retention import Retention
from ascendrun.head.loop.operations import Operations
from ascendrun.head.loop.pruning import PruneOperation
from ascendrun.head.protocol import agent_messages as agent
from ascendrun.head.protocol import control_messages as messages
from ascendrun.head.protocol.remote import Reply
from ascendrun.head.state.state_dir import tree_file
from ascendrun.head.survey.submission import Submission, add_jobs
from tests.lib.small_world import N1, N2, World
from tests.lib.vcluster.processes import await_true


def prune(world: World, request: messages.Prune, **more: Any) -> tuple[PruneOperation, list[Any]]:
    """An operation, and what its threads post for the controller's thread."""
    posted: list[Any] = []
    world.post = posted.append
    operations = Operations(world.context.links)
    parts = world.store, operations, lambda reply, body, is_last: None, Retention()
    return PruneOperation(request, *parts, live=(), **more), posted


def test_a_tree_stays_for_a_job_that_is_acknowledged_while_old_data_goes(world: World) -> None:
    over = world.job(N1, state=State.FAILED, hosts=("n1",), ended_at_s=1.0)
    world.store.jobs.mark_drained(over.id)
    world.restart()
    world.up(N1)
    old, new = (Tree("code", digit * 64, 1, 1) for digit in "ab")
    for tree in (old, new):
        path = tree_file(world.folder, tree.sha256)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
        os.utime(path, (1.0, 1.0))
    operation, posted = prune(world, messages.Prune(older_s=0.0))
    world.job(N2, trees=(new,))
    operation.start()
    assert await_true(lambda: bool(posted), deadline_s=10.0)
    posted.pop()()
    assert [tree_file(world.folder, tree.sha256).exists() for tree in (old, new)] == [False, True]
    operation._take("n1", Reply(agent.UsageReply({}, {tree.sha256: (1, 9.0) for tree in (old, new)})), 0.0)
    [asked] = [one for one in world.get(N1).node.asked if isinstance(one, agent.Prune)]
    assert set(asked.trees) == {old.sha256}


def test_a_job_whose_packed_directory_went_before_the_acknowledgement_is_refused(world: World) -> None:
    submission = Submission("k", JobSpec(name="demo", command=("true",)), (N1,), (Tree("code", "c" * 64, 1, 1),), None)
    with pytest.raises(ConflictError):
        add_jobs(world.store, messages.Submit((submission.to_json(),)), now_s=1.0)
    assert world.store.jobs.all() == ()


def test_the_daily_removal_asks_connected_hosts_and_connects_to_no_other(world: World) -> None:
    over = world.job(N1, N2, state=State.FAILED, hosts=("n1", "n2"), ended_at_s=1.0)
    world.store.jobs.mark_drained(over.id)
    world.restart()
    world.up(N1)
    operation, posted = prune(world, messages.Prune(), hosts_up_only=True)
    operation.start()
    assert await_true(lambda: bool(posted), deadline_s=10.0)
    asked = [one for one in world.get(N1).node.asked if isinstance(one, agent.Usage)]
    assert len(asked) == 1 and [link.host for link in world] == [N1]
