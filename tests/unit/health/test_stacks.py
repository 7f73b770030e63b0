"""Stacks of ranks, as Python and py-spy print them."""

import json

import pytest

from ascendrun.health.stacks import Frame, RankStack, Take, find_outliers, fold, read_stack
from tests.lib.hang_world import READS, WAITS

PRINTED = """Thread 0x00007f0001 (most recent call first):
  File "/usr/lib/python3.9/threading.py", line 312 in wait
  File "/usr/lib/python3.9/queue.py", line 180 in get

Current thread 0x00007f0002 (most recent call first):
  File "/x/torch/distributed/distributed_c10d.py", line ??? in all_reduce
  File "/w/train.py", line 9 in step
"""


def row(rank: int = 0, **values: object) -> dict[str, object]:
    return {"rank": rank, "pid": 7, "state": "S", "source": "signal", "text": PRINTED, **values}


def test_what_python_prints_is_read_with_its_main_thread_last() -> None:
    stack = read_stack("npu01", row())
    assert stack.frames == (
        Frame("/x/torch/distributed/distributed_c10d.py", "all_reduce", None),
        Frame("/w/train.py", "step", 9),
    )
    assert (stack.waits_for_peers, stack.where, len(stack.threads)) == (True, "all_reduce", 2)


def test_what_py_spy_prints_is_read() -> None:
    frames = [
        {"filename": "/w/data.py", "name": "read_shard", "line": 41},
        {"filename": "/w/t.py", "name": "x", "line": 1},
    ]
    text = json.dumps([{"os_thread_id": 8, "frames": []}, {"os_thread_id": 7, "thread_name": "m", "frames": frames}])
    stack = read_stack("npu01", row(source="py-spy", text=text))
    assert (stack.where, stack.waits_for_peers) == ("w/data.py:read_shard", False)


@pytest.mark.parametrize("text", ["", "[", "[1]", '{"a": 1}', "Segmentation fault", '  File "x", line 1 in y'])
@pytest.mark.parametrize("source", ["py-spy", "signal", "proc", "other"])
def test_a_text_that_cannot_be_read_has_no_frames(source: str, text: str) -> None:
    assert read_stack("npu01", row(source=source, text=text)).frames == ()


@pytest.mark.parametrize(
    ("machine", "calls", "flushes"),
    [
        ("x86_64", ["202", "74"], True),
        ("aarch64", ["83"], True),
        ("aarch64", ["74"], False),  # there a signalfd4
        ("x86_64", ["running", "", "-1", "7"], False),
        ("riscv64", ["82"], False),
    ],
)
def test_a_thread_in_fsync_is_known_by_the_number_of_its_call(machine: str, calls: list[str], flushes: bool) -> None:
    threads = [{"name": "python3", "system_call": call} for call in calls]
    assert read_stack("npu01", row(machine=machine, threads=threads)).flushes is flushes


def test_a_stuck_data_loader_is_where_the_program_asked_for_its_batch() -> None:
    frames = (
        Frame("/usr/lib/python3.9/threading.py", "wait", 312),
        Frame("/usr/lib/python3.9/queue.py", "get", 180),
        Frame("/w/loader.py", "next_batch", 12),
    )
    stack = RankStack(3, "npu02", 7, "S", frames=frames)
    assert (stack.where, stack.waits_for_peers) == ("w/loader.py:next_batch", False)
    take = Take(0.0, {0: RankStack(0, "npu01", 6, "S", frames=WAITS), 3: stack})
    assert find_outliers(take) == (3,)


def test_equal_stacks_are_one_group_and_the_largest_is_first() -> None:
    ranks = {rank: RankStack(rank, "npu01", rank, "S", frames=READS if rank == 2 else WAITS) for rank in range(4)}
    assert [found for found, _ in fold(list(ranks.values()))] == [(0, 1, 3), (2,)]
    assert find_outliers(Take(0.0, ranks)) == (2,)
    assert find_outliers(Take(0.0, {rank: ranks[rank] for rank in (0, 1)})) == ()
