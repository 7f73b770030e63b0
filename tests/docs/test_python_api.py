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

PAGE = (Path(__file__).parents[2] / "docs" / "python-api.md").read_text(encoding="utf-8")


def test_every_call_is_listed_with_its_parameters() -> None:
    listed = dict(re.findall(r"`(\w+)\(([^`]*)\)`", "".join(re.findall(r"^\| [^|]+ \| ([^|]+) \|", PAGE, re.M))))
    public = {name for name in dir(Cluster) if not name.startswith("_")}
    assert set(listed) == public
    for name, text in listed.items():
        parameters = inspect.signature(getattr(Cluster, name)).parameters
        shown = [each.split("=")[0].strip() for each in re.split(r",\s*(?![^(]*\))", text) if each]
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
        "name: demo\ncommand: [echo, hello]\nnodes: 1\ndevices: {type: cpu, per_node: 2}\nhostfile: cluster.hosts\n"
    )
    environ = {**os.environ, "ASCENDRUN_STATE_DIR": str(tmp_path / "state"), "ASCENDRUN_CONTROLLER_IDLE_S": "1"}
    run = subprocess.run(
        [sys.executable, "-c", example.group(1)], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert "(0, 1) hello" in run.stdout and run.stdout.splitlines()[-1] == "SUCCEEDED 0"
