"""The example of docs/python-api.md runs, and the calls that the page lists exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ascendrun import Cluster

PAGE = (Path(__file__).parents[2] / "docs" / "python-api.md").read_text(encoding="utf-8")


def test_the_calls_exist() -> None:
    for row in re.findall(r"^\| [^|]+ \| ([^|]+) \|", PAGE, re.M)[2:]:
        for name in re.findall(r"`(\w+)\(", row):
            assert callable(getattr(Cluster, name)), name


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
