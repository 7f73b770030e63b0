"""Dumps of the flight recorder are read without torch, and run nothing."""

import json
import pickle
import subprocess
import sys
from importlib.util import find_spec

import pytest

from ascendrun.health.flight_recorder import Recorded, first_difference, read_dump

PROGRAM = """
import json, sys, torch, torch.distributed as dist
import torch._C._distributed_c10d as c10d
dist.init_process_group("gloo", init_method="file://" + sys.argv[1] + "/store", rank=0, world_size=1)
def wait_for(number):  # one thread writes it down after the call, and that of the next call could overtake it
    while int(json.loads(c10d._dump_fr_trace_json())["pg_status"]["0"]["last_completed_collective"]) < number:
        pass
dist.all_reduce(torch.ones(3, 4))
wait_for(1)
dist.broadcast(torch.ones(2), 0)
wait_for(2)
open(sys.argv[1] + "/pickle", "wb").write(c10d._dump_fr_trace())
open(sys.argv[1] + "/json", "wb").write(c10d._dump_fr_trace_json())
"""


@pytest.mark.skipif(find_spec("torch") is None, reason="no torch here")
def test_what_the_real_torch_dumps_is_read_in_both_forms(tmp_path):
    environ = {"TORCH_FR_BUFFER_SIZE": "100", "GLOO_SOCKET_IFNAME": "lo", "PATH": "/usr/bin"}
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], env=environ, check=True, timeout=120)
    for form in ("pickle", "json"):
        found = read_dump((tmp_path / form).read_bytes())
        ops = [(one.seq, one.op, one.sizes) for one in found.collectives]
        assert ops == [(1, "gloo:all_reduce", (((3, 4),),) * 2), (2, "gloo:broadcast", (((2,),),) * 2)]
        kinds = {(one.group, one.members, one.is_p2p, one.state) for one in found.collectives}
        assert kinds == {("0(default_pg)", (0,), False, "scheduled")}  # under an empty name in its configuration
        assert found.last == {"0": (2, None, 2)} and found.version.startswith("2.")
        assert all(one.frame in (None, f"<string>:{line}") for line, one in zip((8, 10), found.collectives))
    assert read_dump((tmp_path / "pickle").read_bytes()[:-40]) is None


class Call:
    def __reduce__(self):
        return (open, ("/tmp/owned", "w"))


@pytest.mark.parametrize(
    "data", [b"", b"{", b"nonsense", b"[1]", json.dumps({"entries": [1]}).encode(), pickle.dumps({"entries": Call()})]
)
def test_what_is_no_dump_is_unknown_and_runs_nothing(data):
    assert read_dump(data) is None


def test_a_dump_without_entries_is_one_of_a_rank_that_did_nothing():
    assert read_dump(b'{"version": "2.10"}').collectives == ()


def test_the_ranks_of_a_group_are_those_of_its_configuration():
    call = {"process_group": ["7", "tensor"], "collective_seq_id": 1, "profiling_name": "nccl:all_reduce"}
    groups = {"7": {"name": "7", "desc": "tensor", "ranks": "[2, 3]"}, "0": {"ranks": "[0, 1, 2, 3]"}}
    [found] = read_dump(json.dumps({"entries": [call], "pg_config": groups}).encode()).collectives
    assert (found.group, found.members) == ("7(tensor)", (2, 3))


REDUCE, SEND = "nccl:all_reduce", "nccl:all_to_all"


def calls(*ops, group="default_pg", first=1, size=4):
    shape = (((size,),),) * 2
    return [Recorded(group, first + place, op, "started", shape) for place, op in enumerate(ops)]


@pytest.mark.parametrize(
    ("recordings", "expected"),
    [
        ([calls(REDUCE), calls(REDUCE), calls(REDUCE)], None),
        ([calls(REDUCE, REDUCE), calls(REDUCE, SEND), calls(REDUCE, REDUCE)], ((1,), "op", 2)),
        ([calls(REDUCE), calls(REDUCE), calls(REDUCE, size=5)], ((2,), "sizes", 1)),
        ([calls(SEND), calls(SEND), calls(SEND, size=5)], None),
        ([calls(REDUCE, SEND), calls(SEND, first=2), calls(REDUCE)], ((2,), "seq", 2)),
        ([calls(REDUCE), calls(SEND)], None),
        # ranks 0 and 1 are a group, 1 and 2 another one: 1 waits for 2, and so 0 for 1
        (
            [
                calls(REDUCE, REDUCE, group="a"),
                calls(REDUCE, group="a") + calls(REDUCE, REDUCE, group="b"),
                calls(REDUCE, group="b"),
            ],
            ((2,), "seq", 2),
        ),
    ],
    ids=["none", "op", "sizes", "uneven by nature", "behind", "a tie", "the end of a chain"],
)
def test_the_first_row_in_which_recordings_differ_names_the_fewer(recordings, expected):
    found = first_difference(dict(enumerate(recordings)))
    assert (found and (found.ranks, found.field, found.theirs.seq)) == expected
