"""Jobs of family npu on two virtual hosts, each with a network, cards and devices of its own: HCCL's way over TCP."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.cluster.conftest import (  # noqa: F401  # fixtures
    ascendrun,
    cluster,
    machine_left_as_found,
    module_cluster,
    no_leftovers,
)
from tests.npu.two_hosts import submit  # noqa: F401
from tests.programs.conftest import TINY


def test_a_bundled_program_trains_over_two_hosts_as_it_does_on_the_cpu(submit, launch):  # noqa: F811
    words = (option[2:].split("=") for option in (*TINY, "--dropout=0"))
    args = {name: yaml.safe_load(value or "[]") for name, value in words}
    found = submit({"name": "ships", "program": "trajectory", "args": args}, per_node=1).succeed().losses()
    on_cpu = launch("trajectory", [*TINY, "--dropout=0"], ranks=2, family="cpu").succeed().losses()
    assert len(on_cpu) > 3
    assert found == pytest.approx(on_cpu, rel=2e-3)


@pytest.mark.thorough
def test_codon_trains_over_two_hosts_as_it_does_on_the_cpu(submit, launch):  # noqa: F811
    args = {
        "mode": "pretrain", "data_path": "generated", "synthetic_sequences": 40, "val_size": 0.2, "dropout": 0,
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 128,
        "global_batch_size": 8, "micro_batch_size": 2, "num_train_epochs": 2, "learning_rate": 0.01,
        "logging_steps": 1, "dtype": "float32",
    }  # fmt: skip
    found = submit({"name": "genes", "program": "codon", "args": args}, per_node=1).succeed().losses()
    options = [f"--{name}={value}" for name, value in args.items()]
    on_cpu = launch("codon", options, ranks=2, family="cpu").succeed().losses()
    assert len(on_cpu) > 6 and on_cpu[max(on_cpu)] < on_cpu[1]
    assert found == pytest.approx(on_cpu, rel=0, abs=1e-4)


def test_explain_names_the_rank_whose_memory_broke_not_the_one_that_waited(submit, ascendrun):  # noqa: F811
    job = {
        "name": "meshtest",
        "program": "meshtest",
        "args": {"message_sizes": ["65536"], "max_iterations": 3, "time_per_size_s": 0.1},
        "env": {"HCCL_EXEC_TIMEOUT": "68"},
        "restart": {"max_restarts": 0},
    }
    done = submit(job, per_node=1, SPEEDUP=60, FAULTS="hbm-ecc:1@2")
    assert done.code == 1, done.said
    told = ascendrun("explain", "meshtest", "-o", "json")
    found = json.loads(told.stdout)["diagnosis"]
    assert (found["code"], found["ranks"], found["hosts"]) == ("ACL-507054", [1], ["node2"]), told.stderr
