"""The demo's two nodes with a hostfile, a job file and its training."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from ascendrun.sim.ascend.scenario import Scenario
from ascendrun.sim.ascend.tree import environ_of, install_tree
from ascendrun.sim.demo import train

NAMES = ("npu1", "npu2")
HOSTFILE, JOB_FILE, PROGRAM, CHECKPOINTS = "demo.hosts", "job.yaml", "train.py", "checkpoints"
CARDS = 4
FIRST_SAVED = train.SAVE_EVERY

HOSTS = """\
# Both are on this machine, so each has its own devices. Elsewhere: npu1 slots=8 addr=10.0.0.1
npu1 addr=local slots=2 devices=0,1
npu2 addr=local slots=2 devices=2,3
"""

JOB = """\
# Four ranks on two nodes train eight weights.
name: demo
command: [python3, train.py, --steps, 140]
nodes: 2
devices: {{type: npu, per_node: 2}}
hostfile: demo.hosts
workdir: {{path: code}}
setup: source "$ASCENDRUN_SIM_ROOT/usr/local/Ascend/ascend-toolkit/set_env.sh"
checkpoint: {{dir: {checkpoints}, grace_period_s: 10}}
# No torch is needed; no real device means no HCCL and no files in /dev; each node's CANN is in its own directory.
checks: {{skip: [{skipped}]}}
"""
SKIPPED = ("torch", "torch-npu", "hccl-ports", "device-files", "variables-consistency")


def tree_of(folder: Path, name: str) -> Path:
    """The directory that is the root of this simulated node."""
    return folder / "nodes" / name


def make_nodes(folder: Path) -> None:
    """Two nodes with four cards each below `folder`. Raises OSError."""
    for number, name in enumerate(NAMES):
        tree = tree_of(folder, name)
        install_tree(tree, Scenario(chip="910B3", cards=CARDS, number=number), seen_as=str(tree), has_devices=False)


def make_job(folder: Path) -> None:
    """The hostfile, the job file, the code to stage, and a directory for checkpoints that both nodes see."""
    (folder / "code").mkdir()
    (folder / CHECKPOINTS).mkdir()
    shutil.copyfile(train.__file__, folder / "code" / PROGRAM)
    (folder / HOSTFILE).write_text(HOSTS, encoding="utf-8")
    text = JOB.format(checkpoints=json.dumps(str(folder / CHECKPOINTS)), skipped=", ".join(SKIPPED))
    (folder / JOB_FILE).write_text(text, encoding="utf-8")


def login_of(folder: Path, name: str, environ: Mapping[str, str]) -> dict[str, str]:
    """What a login on this node sets: its tools are found first, and they know which node they are."""
    seen = environ_of(tree_of(folder, name), dict(environ))
    return {variable: value for variable, value in seen.items() if environ.get(variable) != value}


def newest_step(folder: Path) -> int:
    """The step of the newest checkpoint; 0: there is none yet."""
    found = train.checkpoints(str(folder / CHECKPOINTS))
    return int(found[0][len("step-") : -len(".json")]) if found else 0
