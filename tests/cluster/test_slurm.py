"""Slurm on the virtual cluster."""

from __future__ import annotations

import json

from tests.lib.vcluster.processes import await_true
from tests.lib.vcluster.slurm import ROOT


def test_a_slurm_of_the_cluster_grants_typed_npus_and_is_gone_with_it(cluster_of):
    cluster = cluster_of(2, has_slurm=True)

    def slurm(*argv: str) -> str:
        return str(cluster.head_run(argv, cwd="/", capture_output=True, text=True, check=True).stdout)

    assert sorted(slurm("srun", "-N2", "--gres=npu:910b:2", "hostname").split()) == ["node1", "node2"]
    slurm("sbatch", "-N2", "--gres=npu:910b:2", "--output=/dev/null", "--wrap=sleep 60")
    granted = ["npu:910b:2(IDX:0-1)"] * 2

    def devices() -> list[str]:
        return list(json.loads(slurm("squeue", "--json"))["jobs"][-1]["gres_detail"])

    assert await_true(lambda: devices() == granted, deadline_s=30.0), devices()
    group = ROOT / "freezer" / f"vcluster-{cluster.cluster_id}"
    assert group.is_dir()
    cluster.down()
    assert not group.exists()
