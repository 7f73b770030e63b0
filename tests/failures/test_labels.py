"""Labels of error lines name the rank in the output of a launcher's process, where nothing more exact does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from corpus import Builder

from ascendrun.health.diagnosis import Confidence, Diagnosis, diagnose

NCCL = "node7:4021:4388 [{}] misc/socket.cc:123 NCCL WARN the socket of the ring is gone"


def explain(*outputs: str, world: int = 8, launcher: str = "torchrun") -> Diagnosis:
    """Diagnose the output of the launcher of each node; all but the first are stopped."""
    ends: list[dict[str, object]] = [{"exit": 1}, *({"exit": -15, "stopped": True} for _ in outputs[1:])]
    groups = [{"ranks": rank, "at": 60, "err": err, **ends[rank]} for rank, err in enumerate(outputs)]
    made = {"ranks": len(outputs), "per_host": 1, "world": world, "launcher": launcher, "family": "cuda"}
    return diagnose(Builder({**made, "groups": groups, "steps": 2}, seed="label").evidence())


@pytest.mark.parametrize(
    "line",
    [
        "(Worker_TP5 pid=4123) ERROR 06-17 09:12:44 [worker.py:622] ValueError: 12 heads on 5 shards",
        "Rank[5] failed: ValueError: 12 heads on 5 shards",
        "rank 5: ValueError: 12 heads on 5 shards",
        "[Rank 5] ValueError: 12 heads on 5 shards",
        "2026-06-17 09:12:44,123 - fit - ERROR - [Rank 5] 12 heads on 5 shards",
        "rank5: ValueError: 12 heads on 5 shards",
        "[RANK 5] ValueError: 12 heads on 5 shards",
        "[rank=5] ValueError: 12 heads on 5 shards",
        "[Rank: 5] ValueError: 12 heads on 5 shards",
        "[global rank 5] ValueError: 12 heads on 5 shards",
        "host1: [rank5]: ValueError: 12 heads on 5 shards",
        "[host1 rank5] ValueError: 12 heads on 5 shards",
        "node-2 | rank 5 | ValueError: 12 heads on 5 shards",
        "[2026-06-17 09:12:44][rank5] ERROR 12 heads on 5 shards",
        "[1,5]<stderr>: ValueError: 12 heads on 5 shards",
        "[2026-06-17 09:12:44 TP5] ValueError: 12 heads on 5 shards",
        "ERROR local_rank=5 12 heads on 5 shards",
        NCCL.format(5),
    ],
)
def test_the_label_of_an_error_line_names_the_rank(line: str) -> None:
    found = explain(f"INFO local_rank=2 has read its shards\n{line}\n")
    assert found.ranks == (5,) and found.confidence is not Confidence.CERTAIN


def test_a_device_is_one_of_the_node() -> None:
    assert explain("", NCCL.format(3)).ranks == (0,), "the other node's process failed first"
    assert explain(NCCL.format(3), "").ranks == (3,)
    assert explain(NCCL.format(3), "", world=7).ranks == (0,), "how many ranks a node has is not known"


@pytest.mark.parametrize(
    "lines",
    [
        "[Rank 5] ValueError: too long\n[Rank 3] ValueError: too long",
        "ERROR no reply of rank 5: ValueError: too long",
        "(Worker_PP1_TP3 pid=4123) ERROR 06-17 09:12:44 [worker.py:622] ValueError: too long",
        "[2026-06-17 09:12:44 DP1 TP3] ValueError: too long",
        "ValueError: key store_based_barrier_key:1 on rank: 5, for 600 s",
        "ERROR no slot at [10.0.0.5] for rank=5 of 8",
        "[Rank 5] has read its shards\nValueError: too long",
    ],
    ids=["two ranks", "another rank", "the index in a stage", "a stage", "a key", "another slot", "no error"],
)
def test_other_labels_name_no_rank(lines: str) -> None:
    assert explain(lines).ranks == (0,)


def test_a_rank_that_is_known_keeps_its_number() -> None:
    assert explain("[Rank 5] ValueError: too long", launcher="spawn").ranks == (0,)
    assert explain("[Rank 5] no more shards\n[rank3]: ValueError: too long").ranks == (3,)


@pytest.mark.parametrize("prefix", ["", "(Worker_TP3 pid=4123) "])
def test_warnings_of_a_rank_leave_the_error_of_another_process(prefix: str) -> None:
    warning = f"{prefix}[rank3]:[W617 09:12:44.1 ProcessGroupNCCL.cpp:1250] Warning: the group was not destroyed\n"
    found = explain(f"(EngineCore pid=4001) ValueError: 12 heads on 5 shards\n{warning}")
    assert found.code == "exception" and "12 heads" in str(found.values["message"])
