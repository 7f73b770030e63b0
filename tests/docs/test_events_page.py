"""docs/events.md is what the table of events says."""

from __future__ import annotations

from pathlib import Path

from ascendrun.core.events_page import render_page

PAGE = Path(__file__).parents[2] / "docs" / "events.md"


def test_the_page_is_as_generated() -> None:
    assert PAGE.read_text(encoding="utf-8") == render_page(), "python -m ascendrun.core.events_page > docs/events.md"
