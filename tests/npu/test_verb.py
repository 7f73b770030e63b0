"""`ascendrun sim npu -- COMMAND`, as docs/simulated-npu.md shows it."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from ascendrun.cli.commands.demo import NOTE
from tests.programs.conftest import REPO

DEADLINE_S = 800.0
ASK = """
import json, torch
free, total = torch.npu.mem_get_info()
there = torch.ones(3).to("npu:2").sum().item()
print(json.dumps([torch.npu.device_count(), torch.npu.get_device_name(0), total, there]))
"""


@pytest.fixture
def sim(toolkit, tmp_path):
    """sim(*words): `ascendrun sim npu` with these in a directory that has the template's training script."""
    shutil.copy(REPO / "templates" / "script" / "train.py", tmp_path)
    path = os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"]))

    def run(*words):
        argv = [sys.executable, "-m", "ascendrun", "sim", "npu", *words]
        environ = {**os.environ, "PATH": path, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
        environ["ASCENDRUN_LANG"] = "en"
        return subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=DEADLINE_S)

    return run


def test_a_command_sees_the_devices_that_were_asked_for(sim):
    done = sim("--devices", "3", "--memory", "2048", "--chip", "Ascend910A", "--", "python", "-c", ASK)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [3, "Ascend910A", 2 << 30, 3.0]
    assert done.stderr.splitlines()[0] == f"ascendrun: {NOTE}"
    assert NOTE.key == "sim.note" and NOTE.values == {}


def shown():
    """The lines about epochs that the page shows."""
    return re.findall(r"^epoch .*", (REPO / "docs" / "simulated-npu.md").read_text(), re.MULTILINE)


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "launcher",
    [
        ("torchrun", "--nproc-per-node", "2"),
        ("deepspeed", "--num_gpus", "2"),
        ("accelerate", "launch", "--num_processes", "2"),
    ],
)
def test_a_launcher_trains_on_two_devices_with_the_losses_that_the_page_shows(sim, launcher):
    done = sim("--devices", "2", "--", *launcher, "train.py", "--epochs", "3")
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^epoch .*", done.stdout, re.MULTILINE) == shown() and len(shown()) == 3


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_the_fault_that_the_page_shows_is_told_in_the_words_that_it_shows(sim):
    done = sim("--devices", "2", "--fault", "hbm-ecc:1@5", "--", "torchrun", "--nproc-per-node", "2", "train.py")
    assert done.returncode != 0
    words = r"^\[rank1\]: RuntimeError: .* NPU function error: HBM MULTI BIT ECC ERROR"
    assert re.search(words, done.stderr, re.MULTILINE)
    assert "error code is 507054" in done.stderr
