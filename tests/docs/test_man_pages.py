"""groff reads the man pages that the commands make."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ascendrun.cli.commands.completion import make_manuals


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_groff_accepts_the_man_pages(tmp_path: Path) -> None:
    for name, page in make_manuals().items():
        (tmp_path / name).write_text(page, encoding="utf-8")
    command = ["groff", "-K", "utf8", "-man", "-ww", "-z", *sorted(path for path in tmp_path.iterdir())]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (0, "")
