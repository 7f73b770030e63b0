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


def test_every_command_has_a_man_page(tmp_path: Path) -> None:
    assert reference.main(["man", str(tmp_path)]) == 0
    names = {command.name for command in reference.visible_commands()}
    assert {path.name for path in tmp_path.iterdir()} == {"ascendrun.1", *(f"ascendrun-{name}.1" for name in names)}
    for path in tmp_path.iterdir():
        page = path.read_text(encoding="utf-8")
        assert page.startswith(".TH ") and ".SH NAME" in page and ".SH OPTIONS" in page, path.name


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_groff_accepts_the_man_pages(tmp_path: Path) -> None:
    reference.main(["man", str(tmp_path)])
    for path in sorted(tmp_path.iterdir()):
        command = ["groff", "-K", "utf8", "-man", "-ww", "-z", str(path)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (run.returncode, run.stderr) == (0, ""), path.name
