"""The example of docs/python-api.md runs, and the calls that the page lists exist."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ascendrun
from ascendrun import Cluster, cluster
from ascendrun.cluster import Job
from ascendrun.cluster.api import PARTS

PAGE = (Path(__file__).parents[2] / "docs" / "python-api.md").read_text(encoding="utf-8")


OF_A_JOB = PAGE[PAGE.index("## A job\n") : PAGE.index("## Job files:")]


PARTS = [
    (type(getattr(Cluster(state_dir="/nowhere"), name)), text.split("\n## ")[0], r"^\| [^|]+ \| ([^|]+) \|")
    for name, text in ((name, PAGE[PAGE.index(f": `cluster.{name}`\n") :]) for name in PARTS)
]


@pytest.mark.parametrize(
    ("kind", "text", "row"),
    [
        *PARTS,
        (Cluster, PAGE[PAGE.index(": `cluster`\n") :], r"^\| [^|]+ \| ([^|]+) \|"),
        (Job, OF_A_JOB, r"^\| (`\w+\([^|]*) \|"),
    ],
)
def test_every_call_is_listed_with_its_parameters(kind: type, text: str, row: str) -> None:
    listed = dict(re.findall(r"`(\w+)\(([^`]*)\)`", "".join(re.findall(row, text, re.M))))
    public = {name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))}
    assert set(listed) == public
    for name, text in listed.items():
        parameters = inspect.signature(getattr(object.__new__(kind), name)).parameters
        shown = [each.split("=")[0].strip(" *") for each in re.split(r",\s*(?![^(]*\))", text) if each]
        assert shown == list(parameters), name


def test_every_public_name_can_be_imported_and_is_what_a_type_checker_sees(tmp_path: Path) -> None:
    assert {"Cluster", "JobView", "LogView", "connect"} <= set(dir(cluster)) and "log" in dir(ascendrun)
    for package in (ascendrun, cluster):
        assert [getattr(package, name).__name__ for name in dir(package)] == dir(package)
    with pytest.raises(ImportError):
        from ascendrun.cluster import Nothing  # noqa: F401


@pytest.mark.slow
def test_a_type_checker_sees_the_public_names_and_no_others(tmp_path: Path) -> None:
    names = [f"from {package.__name__} import {name}" for package in (ascendrun, cluster) for name in dir(package)]
    checks = ["reveal_type(Cluster().jobs.detail)", "reveal_type(JobView)", "from ascendrun.cluster import Nothing"]
    (tmp_path / "user.py").write_text("\n".join([*names, *checks]))
    run = subprocess.run([sys.executable, "-m", "mypy", str(tmp_path / "user.py")], capture_output=True, text=True)
    assert len(re.findall("error:", run.stdout)) == 1 and '"Nothing"' in run.stdout, run.stdout
    assert "-> ascendrun.query.views.JobDetail" in run.stdout


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
