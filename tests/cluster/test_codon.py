"""The job file of codon, whole, on two virtual hosts: prepared, trained, scored, and the DNA of a protein."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from scenes import Scene

from ascendrun.programs.codon import vocabulary as v
from tests.lib.vcluster.cluster import VirtualCluster

Ascendrun = Any
JOB = Path(__file__).parents[2] / "jobs" / "codon.yaml"


@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_the_job_file_ends_with_a_scored_model_and_dna(ascendrun: Ascendrun, cluster: VirtualCluster) -> None:
    scene = Scene(ascendrun, cluster)
    hostfile = scene.folder / "two.hosts"
    hostfile.write_text(cluster.hostfile(slots=2))
    where = ("--hostfile", hostfile, "--set", f"python={sys.executable}")
    stages = {each["stage"]: each for each in scene.ascendrun.ask("plan", JOB, *where, timeout=200)["stages"]}
    train = stages["train"]
    assert train["work"]["steps"] > 100 and train["choice"]["chosen"]["memory"], train
    scene.ascendrun("submit", JOB, *where, timeout=1100, code=0)
    folder = scene.folder / "fetched"
    for name in ("evaluation/report.json", "optimize/optimized.csv"):
        scene.ascendrun("cp", f"j-0001-4:out/{name}", folder, code=0)
    scores = json.loads((folder / "report.json").read_text())["scores"]["all"]
    assert scores["masked_accuracy"] > scores["highest_frequency_accuracy"] - 0.05
    assert scores["loss"] < scores["uniform_loss"]
    [row] = csv.DictReader((folder / "optimized.csv").open(encoding="utf-8"))
    assert v.translate(row["predicted_dna"]) == row["protein"] and row["protein"].startswith("MALWMRLL")
    assert not any(site in row["predicted_dna"] for site in ("GAATTC", "GGTCTC", "GAGACC"))
