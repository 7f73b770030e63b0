"""docs/cli.md and the man pages are what the commands themselves print, and every help text has its Chinese."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ascendrun import text
from ascendrun.cli import reference

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def test_the_page_is_generated() -> None:
    text.use_language("en")
    assert PAGE.read_text(encoding="utf-8") == reference.make_page(), "python -m ascendrun.cli.reference docs/cli.md"


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_groff_accepts_the_man_pages(tmp_path: Path) -> None:
    for name, page in reference.make_manuals().items():
        (tmp_path / name).write_text(page, encoding="utf-8")
    command = ["groff", "-K", "utf8", "-man", "-ww", "-z", *sorted(path for path in tmp_path.iterdir())]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (0, "")
