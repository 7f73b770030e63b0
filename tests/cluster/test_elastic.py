"""A job that shrinks when a host is gone, and grows when it is back."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from invariants import check_ended
from scenes import SAVED, Scene, await_that, venv_python

START_S = 600.0
"""For ranks that import torch on a machine with other work."""
PAGE = Path(__file__).resolve().parents[2] / "docs" / "recovery.md"
OWN = """
import select, torch

def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

def batch(step, size):
    select.select([], [], [], 0.2)
    lot = torch.Generator().manual_seed(step)
    inputs = torch.randn(size, 4, generator=lot)
    return inputs, inputs.sum(1, keepdim=True)
"""
"""A user's model and data, which the script of the page imports."""
ALONE = """
import torch
from own import batch, make_model

model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(1, {last} + 1):
    inputs, targets = batch(step, 24)
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
"""


@pytest.fixture
def scene(training_scene_of: Callable[..., Scene]) -> Scene:
    return training_scene_of(3)


def await_hosts(scene: Scene, job: str, attempt: int) -> list[str]:
    """The hosts of an attempt, once it runs."""

    shown: dict[str, Any] = {}

    def runs() -> bool:
        shown.update(scene.show(job)["job"])
        return (shown["attempt"], shown["state"]) == (attempt, "RUNNING")

    await_that(runs, lambda: str(scene.show(job)["events"]), deadline_s=START_S)
    return list(shown["hosts"])


@pytest.mark.timeout(1800)
def test_a_job_shrinks_when_a_host_is_gone_and_grows_when_it_is_back(scene: Scene) -> None:
    path = scene.job(
        "elastic",
        per_node=1,
        slots=1,
        command=["python3", "training.py", SAVED],
        more=(
            "nodes: 3\nmin_nodes: 2\nrestart: {max_restarts: 3, backoff_s: [0, 0]}\n"
            f"checkpoint: {{dir: {SAVED}, grace_period_s: 0, fenced: true}}\nsampling: {{interval_s: 0.5}}\n"
        ),
    )
    job = scene.start(path, env={"ASCENDRUN_HANG_DIVISOR": "20"})
    scene.await_line(job, "saved 20")
    scene.cluster.crash("node2")

    assert await_hosts(scene, job, 2) == ["node1", "node3"]
    scene.await_line(job, "from", count=5)
    scene.cluster.reboot("node2", keep_disk=True)
    assert sorted(await_hosts(scene, job, 3)) == ["node1", "node2", "node3"]
    events = {event["code"]: event for event in scene.show(job)["events"]}
    assert events["nodes-missing"]["values"] == {"found": 2, "count": 3}
    assert events["grows-later"]["hosts"] == ["node2"] and events["grows-later"]["values"] == {"found": 2, "count": 3}
    scene.await_line(job, "from", count=8)
    printed = b"".join(scene.on_head(job, "rank-0.out.*").values()).decode(errors="replace")
    begun = sorted(int(step) for step in re.findall(r"from (\d+)", printed))
    saved = {int(step) for step in re.findall(r"saved (\d+)", printed)}
    assert len(begun) == 3 and begun[0] == 0 and set(begun[1:]) <= saved, "each attempt resumes from a checkpoint"
    codes = [event["code"] for event in scene.show(job)["events"]]
    assert codes.count("restarting") == 1, "growth uses no restart"
    scene.ascendrun("stop", job, "--now", code=0)
    check_ended(scene, job, state="STOPPED", but=["node2"])


@pytest.mark.thorough
@pytest.mark.timeout(3000)
def test_the_torchrun_script_of_the_page_trains_the_same_on_two_hosts_on_one_and_on_two_again(scene: Scene) -> None:
    page = PAGE.read_text(encoding="utf-8")
    (script,) = re.findall(r"```python\n(.*?)```", page, re.S)
    (keys,) = re.findall(r"```yaml\n(launcher: torchrun\n.*?)```", page, re.S)
    code = scene.folder / "code"
    for name, text in {"train.py": script, "own.py": OWN}.items():
        (code / name).write_text(text)
    of_page = yaml.safe_load(keys.replace("/shared/run", SAVED))
    command = of_page.pop("command")
    of_page |= {"python": venv_python(), "sampling": {"interval_s": 0.5}, "env": {"OMP_NUM_THREADS": 1}}
    more = "".join(f"{key}: {json.dumps(value)}\n" for key, value in of_page.items())
    path = scene.job("own", hosts=["node1", "node2"], per_node=1, slots=1, command=command, more=more)
    job = scene.start(path, env={"ASCENDRUN_HANG_DIVISOR": "10"})
    scene.await_line(job, "step 20/", deadline_s=START_S)
    scene.cluster.crash("node2")
    assert await_hosts(scene, job, 2) == ["node1"]
    scene.await_line(job, "on 1 ranks", count=3, deadline_s=START_S)
    scene.cluster.reboot("node2", keep_disk=True)
    assert sorted(await_hosts(scene, job, 3)) == ["node1", "node2"]
    before = printed(scene, job).count("on 2 ranks")
    await_that(lambda: printed(scene, job).count("on 2 ranks") > before + 2, deadline_s=START_S)
    scene.ascendrun("stop", job, "--now", code=0)
    lines = re.findall(r"step (\d+)/\d+, loss: (\S+) on (\d) ranks", printed(scene, job))
    assert [ranks for ranks, _ in itertools.groupby(ranks for _, _, ranks in lines)] == ["2", "1", "2"]
    last = max(int(step) for step, _, _ in lines)
    argv = [venv_python(), "-c", ALONE.format(last=last)]
    alone = subprocess.run(argv, cwd=code, capture_output=True, text=True, check=True).stdout
    losses = dict(line.split() for line in alone.splitlines())
    assert {step for step, _, _ in lines} == set(losses), "every step was trained"
    for step, loss, _ in lines:
        assert float(loss) == pytest.approx(float(losses[step]), rel=1e-3, abs=1e-4), step
    check_ended(scene, job, state="STOPPED", but=["node2"])


def printed(scene: Scene, job: str) -> str:
    """The output of rank 0, by attempt."""
    found = scene.on_head(job, "rank-0.out.[0-9]*").items()
    files = sorted(found, key=lambda each: ("attempt-" in each[0], each[0]))
    return "".join(data.decode(errors="replace") for _, data in files)
