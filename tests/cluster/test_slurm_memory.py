"""Memory that runs out in a real Slurm whose control groups limit it: of a rank, and of an allocation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from test_slurm import ENDLESS, SlurmScene

from tests.lib.vcluster import slurm


def test_a_rank_without_memory_fails_by_its_record_and_an_allocation_without_memory_by_its_state(
    ascendrun, cluster_of, monkeypatch
):
    if not (slurm.ROOT / "memory").is_dir():
        pytest.skip("the kernel has no memory groups of version 1")
    conf = slurm.SLURM_CONF.replace("=CR_Core", "=CR_Core_Memory").replace("task/none", "task/cgroup")
    monkeypatch.setattr(slurm, "SLURM_CONF", conf)
    monkeypatch.setattr(slurm, "CGROUP_CONF", slurm.CGROUP_CONF + "ConstrainRAMSpace=yes\n")
    cluster = cluster_of(1, has_slurm=True)
    scene = SlurmScene(ascendrun.on(cluster), cluster)
    (scene.folder / "ascendrun/config.yaml").write_text("engines: {hpc: {type: slurm, options: [--mem=300]}}\n")
    hungry = ["python3", "-c", "import os; x = b'x' * (int(os.environ['RANK']) << 30); os.kill(os.getpid(), 19)"]
    job = scene.launch("hungry", nodes=1, command=hungry)
    scene.await_state(job, "FAILED")
    assert "allocation-gone" not in scene.codes(job)
    assert {"code": "rank-killed", "ranks": [1], "values": {"signal": 9}}.items() <= scene.reason(job).items()
    scene.await_free()

    job = scene.launch("starved", *ENDLESS, nodes=1)
    scene.await_line(job, "ready", count=2)
    (batch,) = (slurm.ROOT / "memory" / f"vcluster-{cluster.cluster_id}").rglob("step_batch")
    for pid in [pid for file in batch.rglob("cgroup.procs") for pid in file.read_text().split()]:
        if "slurm_script" in Path(f"/proc/{pid}/cmdline").read_text():
            Path(f"/proc/{pid}/oom_score_adj").write_text("1000")  # it is killed, and not what takes the memory
    takes = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); x = b'x' * (1 << 30)"
    subprocess.run([sys.executable, "-c", takes, str(batch / "cgroup.procs")], check=False)
    scene.await_state(job, "FAILED")
    assert scene.reason(job)["code"] == "allocation-gone" and scene.slurm_state(job) == "OUT_OF_MEMORY"
    scene.await_nobody(job)
