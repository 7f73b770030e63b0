"""The end of an attempt as its node recorded it: what is believed, and when."""

from __future__ import annotations

import json
from typing import Any

from ascendrun.core.jobs.job import State
from tests.lib.small_world import N1, World


def line(seq: int, event: str, **fields: Any) -> bytes:
    return json.dumps({"seq": seq, "at_ns": seq, "event": event, **fields}).encode() + b"\n"


def test_an_end_that_a_rank_wrote_is_not_believed_before_the_last_records_are_here(world: World) -> None:
    job = world.running(N1)
    world.up(N1)
    node, tag = world.get(N1).node, job.run_id
    node.supervised = True
    node.records[tag] = line(8, "rank_exited", rank=0, code=0, signal=None) + line(9, "ended", leftovers=[])
    world.send_records(job, N1)
    assert world.now(job).state is State.RUNNING, "its supervisor lives"
    exits = {"0": {"code": 1, "signal": None}}
    node.records[tag] += line(3, "rank_exited", rank=0, code=1, signal=None)
    node.records[tag] += line(4, "ended", leftovers=[], exits=exits)
    node.supervised, node.processes[tag], node.phases[tag] = False, (), "ended"
    world.confirm_ends(job)
    assert world.now(job).state is State.RUNNING, "the node has records that are not here"
    world.send_records(job, N1)
    assert world.now(job).state is State.FAILED
    assert world.now(job).reason.values["code"] == 1
