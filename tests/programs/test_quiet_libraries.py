"""What the libraries under a program say of themselves does not reach whoever reads the program's output."""

import os
import subprocess
import sys

import pytest

from tests.programs import test_qwen_runs
from tests.programs.conftest import REPO, TINY


@pytest.mark.parametrize(
    "program, options",
    [
        ("qwen_lora", (*test_qwen_runs.TINY, "--max_steps=2")),
        pytest.param("trajectory", (*TINY, "--num_train_epochs=1"), marks=pytest.mark.thorough),
    ],
)
def test_a_training_that_goes_well_warns_of_nothing(tmp_path, program, options):
    """The oldest transformers loads DeepSpeed, which guessed a device aloud, on the stream where answers go."""
    environ = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    environ.pop("DS_ACCELERATOR", None)
    ran = subprocess.run(
        [sys.executable, "-m", f"ascendrun.programs.{program}", *options],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "WARNING" not in ran.stdout and "Sliding Window" not in ran.stdout, ran.stdout
