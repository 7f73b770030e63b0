"""One report as one picture (PNG), drawn by matplotlib, which the extra `plot` installs."""

from __future__ import annotations

import io
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from ascendrun.cli.output import cut, sanitise_line
from ascendrun.cli.report import charts, page
from ascendrun.core.errors import InvalidInputError, Problem
from ascendrun.health.report.time_use import USES
from ascendrun.text import Text, language, use_language

if TYPE_CHECKING:
    from ascendrun.health.report.charts import Chart
    from ascendrun.health.report.data import Report

COLORS = dict(
    zip(USES, ("#9aa4b2", "#7d8fb3", "#8f7cc3", "#d09a2d", "#2a9d66", "#8aa38f", "#2f80c9", "#63b7af", "#d1495b"))
)
"""The light colours of web/report.css."""
LINE = "#1f6feb"
TILES = 6
CHINESE_FONTS = (
    *("Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei"),
    *("Microsoft YaHei", "PingFang SC", "SimHei", "Noto Sans CJK JP", "Noto Serif CJK SC", "Noto Serif CJK JP"),
    *("Droid Sans Fallback", "AR PL UMing CN"),
)


def make_picture(report: Report) -> bytes:
    """Return the picture; in English if no installed font has Chinese. Raises InvalidInputError without matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        missing = Text("report.no-matplotlib", "matplotlib not found")
        hint = Text(
            "report.no-matplotlib-hint", "run `pip install 'ascendrun[plot]'`, in a checkout `bin/setup-env plot`"
        )
        raise InvalidInputError([Problem("--png", None, None, missing, hint)]) from error
    fonts = [name for name in CHINESE_FONTS if _has_font(name)][:1]
    lang = language()
    use_language(lang if fonts else "en")
    try:
        return _draw(report, fonts)
    finally:
        use_language(lang)


def _draw(report: Report, fonts: list[str]) -> bytes:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = -(-len(report.charts) // 2)
    with matplotlib.rc_context({"font.family": ["DejaVu Sans", *fonts], "axes.unicode_minus": False, "font.size": 9}):
        figure = Figure(figsize=(12, 3.3 + 2.5 * rows), dpi=120, layout="constrained")
        canvas: Any = FigureCanvasAgg(figure)
        grid = figure.add_gridspec(2 + rows, 2, height_ratios=[1.5, 0.5, *[2.5] * rows])
        _draw_head(figure.add_subplot(grid[0, :]), report)
        _draw_time(figure.add_subplot(grid[1, :]), report)
        for index, chart in enumerate(report.charts):
            _draw_chart(figure.add_subplot(grid[2 + index // 2, index % 2]), chart, report)
        out = io.BytesIO()
        canvas.print_png(out)
    return out.getvalue()


def _has_font(name: str) -> bool:
    from matplotlib import font_manager

    return any(font.name == name for font in font_manager.fontManager.ttflist)


def _plain(value: str, width: int) -> str:
    """Truncate to `width` cells and escape dollars, which matplotlib reads as mathematics."""
    return cut(sanitise_line(value), width).replace("$", r"\$")


def _draw_head(axes: Any, report: Report) -> None:
    axes.axis("off")
    top: dict[str, Any] = {"va": "top", "transform": axes.transAxes}
    axes.text(0, 1, _plain(f"{report.state}  {report.id}  {report.name}", 80), fontsize=15, weight="bold", **top)
    place = f"{page.describe_place(report)} · {page.when(report.created_at_s)}"
    axes.text(0, 0.74, _plain(place, 130), color="#5b6675", **top)
    for index, (value, label) in enumerate(page.list_tiles(report)):
        x, y = index % TILES / TILES, 0.5 - 0.34 * (index // TILES)
        axes.text(x, y, _plain(value, 18), fontsize=12, weight="bold", **top)
        axes.text(x, y - 0.17, _plain(label, 30), fontsize=7.5, color="#5b6675", **top)


def _draw_time(axes: Any, report: Report) -> None:
    left = 0.0
    for spent in report.time:
        if spent.seconds:
            label = f"{USES[spent.use].name} {page.duration(spent.seconds)} ({page.percent(spent.ratio)})"
            axes.barh(0, spent.ratio, left=left, color=COLORS[spent.use], label=label)
        left += spent.ratio
    axes.set_xlim(0, 1)
    axes.axis("off")
    axes.set_title(str(page.LABELS["time"]), loc="left", fontsize=10)
    if left:
        axes.legend(loc="upper left", bbox_to_anchor=(0, 0.02), ncols=4, frameon=False, fontsize=8)


def _draw_chart(axes: Any, chart: Chart, report: Report) -> None:
    offset = datetime.fromtimestamp(report.made_at_s).astimezone().utcoffset()
    shift = offset.total_seconds() if offset else 0.0
    xs: list[Any] = list(chart.xs)
    if chart.x == "time":
        xs = [datetime.fromtimestamp(at + shift, timezone.utc) for at in chart.xs]
    columns = [[float("nan") if value is None else value for value in line.ys] for line in chart.lines]
    axes.plot(xs, columns[0], color=LINE, linewidth=1.2, marker="." if len(xs) < 3 else None)
    if chart.is_band:
        axes.fill_between(xs, columns[1], columns[2], color=LINE, alpha=0.18, linewidth=0)
    axes.set_title(_plain(charts.chart_title(chart), 60), loc="left", fontsize=10)
    axes.grid(True, color="#e6eaef")
    if chart.is_load:
        axes.set_ylim(0, max(100.0, axes.get_ylim()[1]))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if len(xs) == 1:  # a single point has no width
        reach: Any = timedelta(seconds=30) if chart.x == "time" else 1
        axes.set_xlim(xs[0] - reach, xs[0] + reach)
    if chart.x == "time":
        from matplotlib import dates

        tools: Any = dates
        locator = tools.AutoDateLocator(minticks=3, maxticks=8)
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(tools.ConciseDateFormatter(locator))
    else:
        axes.set_xlabel(str(charts.AXES["step"]))
