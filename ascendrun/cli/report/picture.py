"""One report as one picture (PNG), by matplotlib, which is there with the extra `plot` only."""

from __future__ import annotations

import io
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from ascendrun.cli.report.page import chart_title, duration, list_tiles, percent, when
from ascendrun.cli.report.words import Words
from ascendrun.core.errors import InvalidInputError, Problem
from ascendrun.core.names import fold_names

if TYPE_CHECKING:
    from ascendrun.health.report.charts import Chart
    from ascendrun.health.report.data import Report

COLORS = {
    "queue": "#9aa4b2",
    "checks": "#7d8fb3",
    "staging": "#8f7cc3",
    "start-up": "#d09a2d",
    "training": "#2a9d66",
    "checkpoint": "#2f80c9",
    "ending": "#63b7af",
    "lost": "#d1495b",
}
"""Those of web/report.css in the light."""
LINE = "#1f6feb"
TILES = 6
CHINESE_FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans SC",
    "Source Han Sans SC",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
    "Microsoft YaHei",
    "PingFang SC",
    "SimHei",
    "Noto Sans CJK JP",
    "Noto Serif CJK SC",
    "Noto Serif CJK JP",
    "Droid Sans Fallback",
    "AR PL UMing CN",
)


def make_picture(report: Report, *, lang: str) -> bytes:
    """The picture; in English where no font here has Chinese. Raises InvalidInputError when matplotlib is missing."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        hint = "in a checkout bin/setup-env plot, else pip install 'ascendrun[plot]'; --out FILE.html needs nothing"
        raise InvalidInputError(
            [Problem("--png", None, None, "needs matplotlib, which is not installed", hint)]
        ) from error
    fonts = [name for name in CHINESE_FONTS if _has_font(name)][:1]
    words = Words(lang if lang == "en" or fonts else "en")
    rows = -(-len(report.charts) // 2)
    with matplotlib.rc_context({"font.family": ["DejaVu Sans", *fonts], "axes.unicode_minus": False, "font.size": 9}):
        figure = Figure(figsize=(12, 3.3 + 2.5 * rows), dpi=120, layout="constrained")
        canvas: Any = FigureCanvasAgg(figure)
        heights = [1.5, 0.5, *[2.5] * rows]
        grid = figure.add_gridspec(2 + rows, 2, height_ratios=heights)
        _draw_head(figure.add_subplot(grid[0, :]), report, words)
        _draw_time(figure.add_subplot(grid[1, :]), report, words)
        for index, chart in enumerate(report.charts):
            _draw_chart(figure.add_subplot(grid[2 + index // 2, index % 2]), chart, report, words)
        out = io.BytesIO()
        canvas.print_png(out)
    return out.getvalue()


def _has_font(name: str) -> bool:
    from matplotlib import font_manager

    return any(font.name == name for font in font_manager.fontManager.ttflist)


def _plain(value: str, width: int) -> str:
    """In at most `width` cells. matplotlib takes what stands between dollars for mathematics; no name of a job is."""
    from ascendrun.cli.output import cut
    from ascendrun.cli.sanitise import sanitise_line

    return cut(sanitise_line(value), width).replace("$", r"\$")


def _draw_head(axes: Any, report: Report, words: Words) -> None:
    axes.axis("off")
    axes.text(
        0,
        1,
        _plain(f"{report.state}  {report.id}  {report.name}", 80),
        fontsize=15,
        weight="bold",
        va="top",
        transform=axes.transAxes,
    )
    told = f"{words('on', hosts=fold_names(report.hosts), ranks=report.world_size)} · {when(report.created_at_s)}"
    axes.text(0, 0.74, _plain(told, 130), color="#5b6675", va="top", transform=axes.transAxes)
    for index, (value, label) in enumerate(list_tiles(report, words)):
        x, y = index % TILES / TILES, 0.5 - 0.34 * (index // TILES)
        axes.text(x, y, _plain(value, 18), fontsize=12, weight="bold", va="top", transform=axes.transAxes)
        axes.text(x, y - 0.17, _plain(label, 30), fontsize=7.5, color="#5b6675", va="top", transform=axes.transAxes)


def _draw_time(axes: Any, report: Report, words: Words) -> None:
    left = 0.0
    for spent in report.time:
        if spent.seconds:
            label = f"{words('use-' + spent.use)} {duration(spent.seconds)} ({percent(spent.share)})"
            axes.barh(0, spent.share, left=left, color=COLORS[spent.use], label=label)
        left += spent.share
    axes.set_xlim(0, 1)
    axes.axis("off")
    axes.set_title(words("time"), loc="left", fontsize=10)
    if left:
        axes.legend(loc="upper left", bbox_to_anchor=(0, 0.02), ncols=4, frameon=False, fontsize=8)


def _draw_chart(axes: Any, chart: Chart, report: Report, words: Words) -> None:
    offset = datetime.fromtimestamp(report.made_at_s).astimezone().utcoffset()
    shift = offset.total_seconds() if offset else 0.0
    xs: list[Any] = list(chart.xs)
    if chart.x == "time":
        xs = [datetime.fromtimestamp(at + shift, timezone.utc) for at in chart.xs]
    columns = [[_number(value) for value in line.ys] for line in chart.lines]
    axes.plot(xs, columns[0], color=LINE, linewidth=1.2, marker="." if len(xs) < 3 else None)
    if chart.is_band:
        axes.fill_between(xs, columns[1], columns[2], color=LINE, alpha=0.18, linewidth=0)
    axes.set_title(_plain(chart_title(chart, words), 60), loc="left", fontsize=10)
    axes.grid(True, color="#e6eaef")
    if chart.is_load:
        axes.set_ylim(0, max(100.0, axes.get_ylim()[1]))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if len(xs) == 1:  # one point has no stretch to be drawn in
        reach: Any = timedelta(seconds=30) if chart.x == "time" else 1
        axes.set_xlim(xs[0] - reach, xs[0] + reach)
    if chart.x == "time":
        from matplotlib import dates

        tools: Any = dates
        locator = tools.AutoDateLocator(minticks=3, maxticks=8)
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(tools.ConciseDateFormatter(locator))
    else:
        axes.set_xlabel(words("x-step"))


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
