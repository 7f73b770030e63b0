"""The end of an attempt as its node recorded it: what is believed, and when."""

import json
from dataclasses import replace
from typing import Any

from ascendrun.core.jobs.job import State
from ascendrun.head.protocol.file_messages import FileData
from tests.lib.small_world import N1, PROCESS, World


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


def test_late_records_of_an_earlier_attempt_neither_change_nor_stop_the_present_one(world: World) -> None:
    """Between two looks at an end, the supervisor of the next attempt is starting: its processes are there, its record
    is not."""
    job = world.running(N1)
    world.up(N1)
    [runner] = world.jobs
    old, node = runner.copies.present, world.get(N1).node
    old.follow("n1")
    runner.job = replace(runner.job, attempt=2)
    runner.begin_attempt()
    node.processes[runner.job.run_id] = (PROCESS,)
    late = line(3, "rank_exited", rank=0, code=1, signal=None) + line(4, "ended", leftovers=[])
    runner.copies.take_data("n1", FileData(old.tag, "events", 0, 0), late)
    world.turn()
    assert node.stopped() == []
    assert runner.job.state is State.RUNNING and not runner.job.node("n1").exits
    assert job.run_id == old.tag
