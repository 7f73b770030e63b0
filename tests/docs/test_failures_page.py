"""docs/failures.md is what the catalogue of signatures says."""

from __future__ import annotations

from pathlib import Path

from ascendrun.ascend.failures_page import render_page


def test_the_page_of_failures_is_fresh() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "failures.md"
    wanted = "python -m ascendrun.ascend.failures_page > docs/failures.md"
    assert page.read_text(encoding="utf-8") == render_page(), wanted
