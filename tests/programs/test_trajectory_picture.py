"""The report's picture, and what the library that draws it says on the way."""

import os
import subprocess
import sys

import pytest

from tests.programs.conftest import REPO

DRAW = """
import sys
from pathlib import Path
from ascendrun.programs.trajectory.scores import measure
from ascendrun.programs.trajectory.stages.trained import draw
from ascendrun.programs.trajectory.scores import score
import numpy as np
print(draw(Path(sys.argv[1]), score([0, 1], [0, 1], ["Cargo", "Tug"]), measure(np.eye(2), [0, 1])))
"""


def test_a_job_whose_home_cannot_be_written_has_its_picture_and_no_words_about_caches(tmp_path):
    """matplotlib tells of its own cache, of fonts, where it is new or has no place, on whichever rank draws."""
    pytest.importorskip("matplotlib")
    no_folder = tmp_path / "a-file"
    no_folder.touch()
    ran = subprocess.run(
        [sys.executable, "-c", DRAW, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "MPLCONFIGDIR": str(no_folder), "PYTHONPATH": str(REPO)},
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert str(tmp_path / "report.png") in ran.stdout and ran.stdout.count("\n") == 1
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
