"""The report in a real browser: everything is drawn, nothing is loaded, no word of a job becomes markup."""

from __future__ import annotations

from pathlib import Path
from typing import Callable

import pytest
from browser import Browse, Seen
from PIL import Image

from ascendrun.cli.report.page import make_page
from ascendrun.cli.report.picture import make_picture
from ascendrun.health.report.data import Material, Report, make_report
from ascendrun.text import use_language
from tests.lib.report_stories import HOSTILE, hostile, month, short

LIGHT_LINE, DARK_LINE = (31, 111, 235), (110, 168, 254)
"""--line of web/report.css."""


def report_on(story: Callable[[], Material]) -> Report:
    material = story()
    return make_report(material, now_s=(material.job.ended_at_s or 0.0) + 60.0)


def look(browse: Browse, folder: Path, report: Report, *, lang: str = "en", **how: object) -> Seen:
    use_language(lang)
    page = folder / f"{report.id}-{lang}.html"
    page.write_text(make_page(report), encoding="utf-8")
    return browse(page, **how)


def colors_of(picture: Path) -> dict[tuple[int, int, int], int]:
    image = Image.open(picture).convert("RGB")
    return {color: count for count, color in image.getcolors(maxcolors=1 << 24) or []}


def test_a_month_is_drawn_by_day_and_by_night(browse: Browse, tmp_path: Path) -> None:
    report = report_on(month)
    day = look(browse, tmp_path, report)
    assert day.complaints == []
    assert f'data-drawn="{len(report.charts)}"' in day.dom and len(report.charts) > 10
    assert day.dom.count("<canvas") == len(report.charts)
    assert "97.3%" in day.dom and "lost to failures" in day.dom
    assert colors_of(day.picture).get(LIGHT_LINE, 0) > 2000
    night = look(browse, tmp_path, report, lang="zh", dark=True)
    assert night.complaints == []
    assert "故障损失" in night.dom and 'lang="zh-CN"' in night.dom
    colors = colors_of(night.picture)
    assert colors.get(DARK_LINE, 0) > 2000 and colors.get((14, 17, 22), 0) > 100_000


def test_words_that_would_be_markup_are_shown_as_words(browse: Browse, tmp_path: Path) -> None:
    report = report_on(hostile)
    seen = look(browse, tmp_path, report, width=500)
    assert seen.complaints == []
    assert "<title>Report · &lt;/script&gt;" in seen.dom
    assert "<img" not in seen.dom and seen.dom.count("<script") == 2
    assert f'data-drawn="{len(report.charts)}"' in seen.dom
    assert any(chart.name == f"eval_{HOSTILE}" for chart in report.charts)


def test_a_job_of_seconds_without_any_figures_has_a_page(browse: Browse, tmp_path: Path) -> None:
    seen = look(browse, tmp_path, report_on(short))
    assert seen.complaints == [] and 'data-drawn="0"' in seen.dom
    assert "No charts" in seen.dom


@pytest.mark.parametrize(("story", "lang"), [(month, "zh"), (short, "en"), (hostile, "en")])
def test_the_picture_is_one_whatever_the_story(story: Callable[[], Material], lang: str, tmp_path: Path) -> None:
    use_language(lang)
    (tmp_path / "report.png").write_bytes(make_picture(report_on(story)))
    with Image.open(tmp_path / "report.png") as image:
        image.load()
        assert image.format == "PNG" and image.width == 1440 and 300 < image.height < 5000
    assert len(colors_of(tmp_path / "report.png")) > 10
