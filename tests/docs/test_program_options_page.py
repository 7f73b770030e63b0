"""docs/program-options.md is what the tables of options hold."""

from __future__ import annotations

from pathlib import Path

from ascendrun.programs.options_page import render_page

COMMAND = "python -m ascendrun.programs.options_page > docs/program-options.md"


def test_the_page_of_program_options_is_fresh() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "program-options.md"
    assert page.read_text(encoding="utf-8") == render_page(), COMMAND
