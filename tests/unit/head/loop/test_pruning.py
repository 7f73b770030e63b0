"""The daily removal of old data: over the small world of nodes."""

from __future__ import annotations

from ascendrun.core.jobs.job import State
from ascendrun.core.retention import Retention
from ascendrun.head.loop.operations import Operations
from ascendrun.head.loop.pruning import PruneOperation
from ascendrun.head.protocol import agent_messages as agent
from ascendrun.head.protocol import control_messages as messages
from tests.lib.small_world import N1, N2, World


def test_the_daily_removal_asks_connected_hosts_and_connects_to_no_other(world: World) -> None:
    over = world.job(N1, N2, state=State.FAILED, hosts=("n1", "n2"), ended_at_s=1.0)
    world.store.jobs.mark_drained(over.id)
    world.restart()
    world.up(N1)
    operations = Operations(world.context.links, world.context.post)
    context = operations.context(lambda reply, body, is_last: None)
    prune = PruneOperation(messages.Prune(), world.store, context, Retention(), live=(), hosts_up_only=True)
    prune.start()
    asked = [one for one in world.get(N1).node.asked if isinstance(one, agent.Usage)]
    assert len(asked) == 1 and [link.host for link in world] == [N1]
