"""The example of docs/python-api.md runs, and the calls that the page lists exist."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ascendrun import Cluster, cluster
from ascendrun.cluster import Job

PAGE = (Path(__file__).parents[2] / "docs" / "python-api.md").read_text(encoding="utf-8")


OF_A_JOB = PAGE[PAGE.index("## A job\n") : PAGE.index("## Job files\n")]


@pytest.mark.parametrize(
    ("kind", "text", "row"),
    [(Cluster, PAGE.replace(OF_A_JOB, ""), r"^\| [^|]+ \| ([^|]+) \|"), (Job, OF_A_JOB, r"^\| (`\w+\([^|]*) \|")],
)
def test_every_call_is_listed_with_its_parameters(kind: type, text: str, row: str) -> None:
    listed = dict(re.findall(r"`(\w+)\(([^`]*)\)`", "".join(re.findall(row, text, re.M))))
    public = {name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))}
    assert set(listed) == public
    for name, text in listed.items():
        parameters = inspect.signature(getattr(kind, name)).parameters
        shown = [each.split("=")[0].strip(" *") for each in re.split(r",\s*(?![^(]*\))", text) if each]
        assert shown == list(parameters)[1:], name


def test_every_name_of_the_package_can_be_imported() -> None:
    for name in cluster.__all__:
        assert getattr(cluster, name).__name__ == name


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path) -> None:
    example = re.search(r"```python\n(.*?)```", PAGE, re.S)
    assert example is not None
    (tmp_path / "cluster.hosts").write_text("here slots=2 addr=local\n")
    (tmp_path / "job.yaml").write_text(
        "name: demo\nnodes: 1\ndevices: {type: cpu, per_node: 2}\nhostfile: cluster.hosts\noutputs: ['out/*.txt']\n"
        "command: [bash, -c, 'mkdir -p out; echo > out/$RANK.txt; echo \"iter 3: loss 2.5\"']\n"
    )
    environ = {**os.environ, "ASCENDRUN_STATE_DIR": str(tmp_path / "state"), "ASCENDRUN_CONTROLLER_IDLE_S": "1"}
    run = subprocess.run(
        [sys.executable, "-c", example.group(1)], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert sorted(lines[:2]) == ["here 0 iter 3: loss 2.5", "here 1 iter 3: loss 2.5"]
    assert lines[2:] == ["3 2.5", "['0.txt', '1.txt']", "SUCCEEDED"]
