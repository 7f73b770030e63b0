"""What trainings send from host to host, counted at the interfaces of the hosts."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.lib.vcluster.cluster import VirtualCluster
from tests.lib.vcluster.machines import HEAD
from tests.lib.vcluster.network import BRIDGE

QWEN: dict[str, Any] = {
    "data_path": "generated", "model_preset": "small", "synthetic_samples": 60, "val_size": 0, "num_sample_prompts": 0,
    "lora_r": 8, "lora_dropout": 0, "dtype": "float32", "cutoff_len": 64, "global_batch_size": 4, "max_steps": 4,
    "warmup_steps": 0, "logging_steps": 1, "save_steps": 0,
}  # fmt: skip
BASE_BYTES = 4 * 1_900_000
QUIET = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
DEADLINE_S = 900.0


def counted(cluster: VirtualCluster, machine: str, interface: str, *, sent: bool) -> int:
    """Return the bytes that an interface has sent or received since the machine was started."""
    text = cluster.host_run(machine, ["cat", "/proc/self/net/dev"], capture_output=True, text=True).stdout
    (fields,) = [line.split(":")[1].split() for line in text.splitlines() if line.strip().startswith(f"{interface}:")]
    return int(fields[8 if sent else 0])


def losses(file: Path) -> list[float]:
    return [row["loss"] for row in map(json.loads, file.read_text().splitlines()) if "loss" in row]


def between_hosts(cluster: VirtualCluster) -> int:
    """Return the bytes that hosts have sent to each other: what they sent, less what the head received."""
    sent = sum(counted(cluster, host, "eth0", sent=True) for host in cluster.hosts)
    return sent - counted(cluster, HEAD, BRIDGE, sent=False)


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_a_model_that_is_sharded_inside_each_host_sends_a_quarter_of_the_bytes_between_hosts(
    ascendrun: Any, cluster_of: Callable[..., VirtualCluster]
) -> None:
    """2 hosts x 2 ranks, a frozen base with LoRA. Loading, and all that is sent once, counts as well."""
    cluster = cluster_of(2)
    on_head = ascendrun.on(cluster)
    (on_head.folder / "two.hosts").write_text(cluster.hostfile(slots=2))
    sent = {}
    for strategy in ("fsdp2", "hsdp"):
        job = {
            "name": strategy, "program": "qwen_lora", "nodes": 2, "devices": {"type": "cpu", "per_node": 2},
            "hostfile": "two.hosts", "args": {**QWEN, "strategy": strategy}, "python": sys.executable, "env": QUIET,
        }  # fmt: skip
        path = on_head.folder / f"{strategy}.yaml"
        path.write_text(json.dumps(job))
        before = between_hosts(cluster)
        on_head("submit", path, timeout=DEADLINE_S, code=0)
        sent[strategy] = between_hosts(cluster) - before
    print("bytes between the hosts:", {**sent, "ratio": round(sent["hsdp"] / sent["fsdp2"], 4)})
    flat, inside = (losses(file) for file in sorted(on_head.state_dir.glob("jobs/*/attempt-1/node1/rank-0.metrics.0")))
    assert len(inside) == QWEN["max_steps"] and inside == pytest.approx(flat, rel=1e-5)
    assert sent["fsdp2"] > QWEN["max_steps"] * BASE_BYTES, "the base was gathered over the network in every step"
    assert sent["hsdp"] <= 0.25 * sent["fsdp2"], sent
