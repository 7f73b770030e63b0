"""jobs/nanochat-speedrun.yaml in small, on two virtual hosts with simulated NPUs: every stage, up to the report."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.conftest import (  # noqa: F401  # fixtures
    ascendrun,
    cluster,
    machine_left_as_found,
    module_cluster,
    no_leftovers,
)
from tests.npu.two_hosts import submit, write_job  # noqa: F401
from tests.programs.conftest import REPO

SMALL = {
    "data_path": "generated",
    "synthetic_documents": 120,
    "dtype": "float32",
    "logging_steps": 1,
    "eval_steps": 0,
    "sample_steps": 2,
}
SIZES: dict[str, dict[str, Any]] = {
    "tokenizer": {"vocab_size": 300},
    "base": {
        "depth": 2, "aspect_ratio": 16, "head_dim": 16, "max_seq_len": 64, "micro_batch_size": 2,
        "total_batch_size": 256, "max_steps": 4, "warmup_steps": 1,
    },
    "mid": {"micro_batch_size": 2, "total_batch_size": 256, "max_steps": 2},
    "sft": {"micro_batch_size": 2, "target_examples_per_step": 4, "max_steps": 2},
    "rl": {"micro_batch_size": 4, "target_examples_per_step": 2, "num_samples": 2, "max_new_tokens": 4, "max_steps": 2},
    "evaluate": {"max_new_tokens": 4},
}  # fmt: skip
"""Options of the stages by their mode, in place of those of the file."""


def in_small() -> dict[str, Any]:
    """The job file with its stages and the order of them, other sizes, and tasks that need no file."""
    job = yaml.safe_load((REPO / "jobs" / "nanochat-speedrun.yaml").read_text())
    job["args"] = SMALL
    for stage in job["stages"]:
        given = stage["args"]
        given.update(SIZES.get(given["mode"], {}))
        if "mixture" in given:
            given["mixture"] = [{"kind": "sums", "rows": 20}]
    return {name: job[name] for name in ("name", "program", "args", "stages")}


def losses(spool: Path) -> dict[int, float]:
    lines = (spool / "attempt-1" / "node1" / "rank-0.metrics.0").read_text().splitlines()
    return {line["step"]: line["loss"] for line in map(json.loads, lines) if "loss" in line}


@pytest.mark.thorough
@pytest.mark.timeout(3000)
def test_all_stages_run_on_two_hosts_and_base_has_the_losses_of_cpus(submit, ascendrun):  # noqa: F811
    found = {}
    for family in ("npu", "cpu"):
        job = in_small()
        job["stages"] = job["stages"] if family == "npu" else job["stages"][:2]
        done = submit({**job, "name": f"chat-{family}"}, family=family, per_node=1).succeed()
        found[family] = losses(done.spool.with_name(f"{done.spool.name}-2"))
    assert len(found["npu"]) == 4 and found["npu"] == pytest.approx(found["cpu"], rel=2e-3)
    told = json.loads(ascendrun("report", "chat-npu", "-o", "json").stdout)["stages"]
    assert {row["stage"]: row["state"] for row in told} == {each["name"]: "SUCCEEDED" for each in in_small()["stages"]}
    assert {"bits_per_byte", "sums"} <= set(next(row for row in told if row["stage"] == "eval-rl")["scores"])
