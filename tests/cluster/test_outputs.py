"""Outputs on the head node of a shipped job."""

import json
import re
import sys
from pathlib import Path
from typing import Callable

import pytest
from scenes import Scene

JOBS = Path(__file__).resolve().parents[2] / "jobs"
TRAININGS = ("pretrain", "finetune")


@pytest.mark.thorough
@pytest.mark.timeout(1500)
def test_the_shipped_trajectory_job_leaves_model_report_and_predictions_here(scene_of: Callable[..., Scene]) -> None:
    scene = scene_of(2, disk="1G")
    hostfile = scene.folder / "two.hosts"
    hostfile.write_text(scene.cluster.hostfile(slots=2))
    changes = ["args.synthetic_tracks=300", *(f"stages.{name}.args.num_train_epochs=1" for name in TRAININGS)]
    options = [word for change in (*changes, f"python={sys.executable}") for word in ("--set", change)]
    done = scene.ascendrun("submit", JOBS / "trajectory.yaml", "--hostfile", hostfile, *options, timeout=1400.0, code=0)
    last = (done.stdout + done.stderr).splitlines()[-1]
    folder = Path(re.search(r"outputs: (\S+) \(", last)[1])  # type: ignore[index]
    assert folder.is_relative_to(scene.ascendrun.state_dir / "outputs"), last
    print(last, sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()))
    assert list(folder.glob("**/finetune/best/model.pt"))
    (report,) = folder.glob("**/evaluate/report.json")
    assert json.loads(report.read_text())["test"]
    (predictions,) = folder.glob("**/predict/predictions.jsonl")
    assert "class_name" in json.loads(predictions.read_text().splitlines()[0])
