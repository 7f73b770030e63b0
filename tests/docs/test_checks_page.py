"""docs/checks.md is what the table of checks says."""

from __future__ import annotations

from pathlib import Path

from ascendrun.health.checks_page import render_page


def test_the_page_of_checks_is_fresh() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "checks.md"
    assert page.read_text(encoding="utf-8") == render_page(), "python -m ascendrun.health.checks_page > docs/checks.md"
