"""The measuring program on real ranks: what it writes, and that every rank of a group tells the same."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ascendrun.programs.meshtest import measure as burning
from tests.ports import free_port

REPO = Path(__file__).resolve().parents[2]
QUICK = ("--message_sizes=1024,65536", "--max_iterations=3", "--time_per_size_s=0.5", "--device=cpu")


def run(folder: Path, options: list[str], *, nodes: int, per_node: int) -> list[list[dict[str, Any]]]:
    """Each rank's lines."""
    port = str(free_port())
    ranks = []
    for rank in range(nodes * per_node):
        env = {
            **os.environ,
            "PYTHONPATH": str(REPO),
            "OMP_NUM_THREADS": "1",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % per_node),
            "NODE_RANK": str(rank // per_node),
            "MASTER_ADDR": "127.0.0.1",
            "WORLD_SIZE": str(nodes * per_node),
            "MASTER_PORT": port,
            "ASCENDRUN_METRICS_FILE": str(folder / f"{rank}.metrics"),
        }
        argv = [sys.executable, "-m", "ascendrun.programs.meshtest", *options]
        ranks.append(subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    try:
        texts = [process.communicate(timeout=200)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0] * len(ranks), "\n".join(texts)
    return [
        [json.loads(line) for line in (folder / f"{rank}.metrics").read_text().splitlines()]
        for rank in range(len(ranks))
    ]


def test_two_ranks_of_one_node_burn_their_devices_and_measure_their_node(tmp_path: Path) -> None:
    lines = run(tmp_path, [*QUICK, "--matmul_s=0.1", "--matmul_size=64"], nodes=1, per_node=2)
    assert [[line["measured"] for line in of_rank] for of_rank in lines] == [["device", "node"]] * 2
    devices = [of_rank[0] for of_rank in lines]
    assert [line["device"] for line in devices] == ["cpu:0", "cpu:1"]
    assert len({line["digest"] for line in devices}) == 1
    assert all(line["wrong"] == 0 and line["tflops"] >= line["tflops_slowest"] > 0 for line in devices)
    nodes = [of_rank[1] for of_rank in lines]
    assert set(nodes[0]["bandwidth_bytes_per_s"]) == {"1024", "65536"}
    assert nodes[0]["latency_s"] == nodes[1]["latency_s"] > 0


def test_two_nodes_measure_every_rail_and_the_whole_mesh(tmp_path: Path) -> None:
    lines = run(tmp_path, list(QUICK), nodes=2, per_node=2)
    assert [[(line["measured"], line["ranks"]) for line in of_rank] for of_rank in lines] == [
        [("rail", [0, 2]), ("mesh", [0, 1, 2, 3])],
        [("rail", [1, 3]), ("mesh", [0, 1, 2, 3])],
        [("rail", [0, 2]), ("mesh", [0, 1, 2, 3])],
        [("rail", [1, 3]), ("mesh", [0, 1, 2, 3])],
    ]
    assert lines[0][0]["bandwidth_bytes_per_s"] == lines[2][0]["bandwidth_bytes_per_s"]
    assert len({json.dumps(of_rank[1]["bandwidth_bytes_per_s"]) for of_rank in lines}) == 1


@pytest.mark.parametrize("sizes", ["", "7", "1024,1024", "2048,1024", "lots"])
def test_sizes_that_are_no_ascending_bytes_are_refused(sizes: str, tmp_path: Path) -> None:
    from ascendrun.programs.errors import InvalidDataError
    from ascendrun.programs.meshtest.measure import read_sizes

    with pytest.raises(InvalidDataError):
        read_sizes([part for part in sizes.split(",") if part])


def test_a_product_in_float16_is_as_exact_as_in_float64() -> None:
    chance = torch.Generator().manual_seed(1)
    left, right = (burning.make_signs(256, chance) for _ in range(2))
    exact = left.double() @ right.double()
    assert torch.equal((left.half() @ right.half()).double(), exact)
