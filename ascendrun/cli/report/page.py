"""One report as one HTML file: no network, no other file, every foreign word escaped, readable without scripts."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape
from importlib import resources
from typing import Any

from ascendrun import __version__
from ascendrun.cli.output import describe_memory, describe_seconds
from ascendrun.cli.report.words import Words
from ascendrun.cli.sanitise import headline, sanitise_line
from ascendrun.core.names import fold_names
from ascendrun.health.report.charts import Chart
from ascendrun.health.report.data import EventRow, Report, Spent

SHOWN_EVENTS = 40
SHOWN_DEVICES = 64
"""More than these are folded away until somebody opens them."""
STRIP_UNITS = 10_000


def make_page(report: Report, *, lang: str) -> str:
    """The whole page. `lang`: en or zh; times are those of this machine's zone."""
    words = Words(lang)
    style = read_asset("vendor/uplot/uPlot.min.css") + "\n" + read_asset("report.css")
    script = read_asset("vendor/uplot/uPlot.iife.min.js") + "\n" + read_asset("report.js")
    title = text(f"{words('title')} · {report.name} ({report.id})")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'; "
        "form-action 'none'"
    )
    parts = [
        _header(report, words),
        _tiles(report, words),
        _time(report, words),
        _doubts(report, words),
        _charts(report, words),
        _attempts(report, words),
        _devices(report, words),
        _events(report, words),
        _footer(report, words),
    ]
    return (
        f'<!doctype html>\n<html lang="{"zh-CN" if lang == "zh" else "en"}">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + f'\n</main>\n<script type="application/json" id="charts">{_chart_data(report, words)}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def read_asset(name: str) -> str:
    """A file of ascendrun/web."""
    found = resources.files("ascendrun.web")
    for part in name.split("/"):
        found = found.joinpath(part)
    return found.read_text(encoding="utf-8")


def text(value: str) -> str:
    """Foreign text as HTML: nothing in it is markup, steers the reading direction, or ends the page."""
    return escape(sanitise_line(value))


def reason(value: str, job: str) -> str:
    """As `text`; of several lines the first, and where the others are."""
    more = f" (ascendrun show {job})" if "\n" in value.strip() else ""
    return escape(headline(value) + more)


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def when(at_s: float | None) -> str:
    return "–" if at_s is None else datetime.fromtimestamp(at_s).strftime("%Y-%m-%d %H:%M:%S")


def number(value: float | None, *, digits: int = 4) -> str:
    """Four digits, thousands with commas; – for None."""
    if value is None or not math.isfinite(value):
        return "–" if value is None else str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def duration(seconds: float) -> str:
    return f"{seconds:.1f}s" if seconds < 10 else describe_seconds(seconds)


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def _header(report: Report, words: Words) -> str:
    end = report.ended_at_s if report.is_over else None
    span = (
        words("from-to", begin=when(report.created_at_s), end=when(end))
        if end is not None
        else words("from", begin=when(report.created_at_s))
    )
    lines = [
        words("on", hosts=text(fold_names(report.hosts)), ranks=report.world_size),
        reason(report.reason, report.id),
    ]
    if report.file:
        lines.append(words("file", file=text(report.file)))
    return (
        f'<header>\n<h1>{text(report.name)} <span class="quiet">{text(report.id)}</span>'
        f'<span class="state {text(report.state)}">{text(report.state)}</span></h1>\n'
        f"<p>{span}</p>\n" + "".join(f"<p>{line}</p>\n" for line in lines if line) + "</header>"
    )


def _tiles(report: Report, words: Words) -> str:
    return (
        '<div class="tiles">\n'
        + "".join(
            f'<div class="tile"><b>{text(value)}</b><span>{text(label)}</span></div>\n'
            for value, label in list_tiles(report, words)
        )
        + "</div>"
    )


def list_tiles(report: Report, words: Words) -> list[tuple[str, str]]:
    """The figures that come first, (value, what it is); only those that are known, but the cost always."""
    figures, cost = report.figures, report.cost
    steps = (
        number(figures.steps)
        if figures.total_steps in (None, figures.steps)
        else words("of-steps", steps=number(figures.steps), total=number(figures.total_steps))
    )
    tiles = [
        (percent(report.effective_ratio), words("tile-effective")),
        (duration(report.wall_s), words("tile-wall" if report.is_over else "tile-wall-live")),
        (steps if figures.steps is not None else None, words("tile-steps")),
        (number(figures.loss) if figures.loss is not None else None, words("tile-loss")),
        (f"{number(figures.step_s, digits=3)} s" if figures.step_s is not None else None, words("tile-step_s")),
        (number(figures.tokens_per_s) if figures.tokens_per_s is not None else None, words("tile-tokens_per_s")),
        (percent(figures.mfu) if figures.mfu is not None else None, words("tile-mfu")),
        *((number(value), name) for name, value in list(figures.evals.items())[:3]),
        (
            words("unknown") if cost.device_hours is None else number(cost.device_hours, digits=3),
            words(f"tile-hours-{cost.family}"),
        ),
    ]
    if cost.energy_kwh is not None:
        is_partly = cost.energy_known is not None and cost.energy_known < 0.98
        label = (
            words("tile-energy-partly", percent=f"{100 * (cost.energy_known or 0.0):.0f}")
            if is_partly
            else words("tile-energy")
        )
        tiles.append((number(cost.energy_kwh, digits=3), label))
    elif cost.family != "cpu":
        tiles.append((words("unknown"), words("tile-energy")))
    return [(value, label) for value, label in tiles if value is not None]


def _time(report: Report, words: Words) -> str:
    rows = "".join(_time_row(spent, words) for spent in report.time if spent.seconds)
    total = (
        (
            f"<tr><td><b>{words('sum')}</b></td><td class=number>{duration(report.wall_s)}</td>"
            "<td class=number>100.0 %</td><td></td></tr>"
        )
        if report.wall_s
        else ""
    )
    head = _row("th", [words("col-use"), words("col-time"), words("col-share"), words("col-what")], numbers=(1, 2))
    return (
        f"<section>\n<h2>{words('time')}</h2>\n{_bar(report, words)}\n{_strip(report, words)}\n"
        f'<table class="time-table"><thead>{head}</thead><tbody>\n{rows}{total}\n</tbody></table>\n</section>'
    )


def _time_row(spent: Spent, words: Words) -> str:
    swatch = f'<svg class="swatch" viewBox="0 0 1 1"><rect width="1" height="1" class="{spent.use}"/></svg>'
    return (
        f"<tr><td>{swatch}{words('use-' + spent.use)}</td><td class=number>{duration(spent.seconds)}</td>"
        f"<td class=number>{percent(spent.share)}</td><td class=quiet>{words('says-' + spent.use)}</td></tr>\n"
    )


def _bar(report: Report, words: Words) -> str:
    """All of the time, sorted by use."""
    rects, x = [], 0.0
    for spent in report.time:
        width = spent.share * STRIP_UNITS
        rects.append(
            f'<rect x="{x:.1f}" width="{width:.1f}" height="1" class="{spent.use}">'
            f"<title>{words('use-' + spent.use)}: {duration(spent.seconds)}</title></rect>"
        )
        x += width
    return _svg("bar", rects)


def _strip(report: Report, words: Words) -> str:
    """The same as it happened."""
    if not report.strips or not report.wall_s:
        return ""
    scale = STRIP_UNITS / report.wall_s
    rects = [
        f'<rect x="{(one.begin_at_s - report.created_at_s) * scale:.1f}" height="1" '
        f'width="{(one.end_at_s - one.begin_at_s) * scale:.1f}" class="{one.use}">'
        f"<title>{words('use-' + one.use)} · {words('col-attempt')} {one.attempt}</title></rect>"
        for one in report.strips
    ]
    end_s = report.created_at_s + report.wall_s
    return (
        _svg("strip", rects) + f'<div class="ends"><span>{when(report.created_at_s)}</span>'
        f"<span>{when(end_s)}</span></div>"
    )


def _svg(name: str, rects: Iterable[str]) -> str:
    return (
        f'<svg class="{name}" viewBox="0 0 {STRIP_UNITS} 1" preserveAspectRatio="none" role="img">'
        f"{''.join(rects)}</svg>"
    )


def _doubts(report: Report, words: Words) -> str:
    if not report.doubts:
        return ""
    items = "".join(f"<li>{text(words('doubt-' + doubt.code, **doubt.values))}</li>\n" for doubt in report.doubts)
    return f'<section>\n<h2>{words("doubts")}</h2>\n<ul class="doubts">\n{items}</ul>\n</section>'


def _charts(report: Report, words: Words) -> str:
    if not report.charts:
        return f'<section><p class="quiet">{words("no-charts")}</p></section>'
    boxes = "".join(
        f'<section><h2>{text(chart_title(chart, words))}</h2><div class="chart" id="chart-{index}"></div></section>\n'
        for index, chart in enumerate(report.charts)
    )
    return f'<noscript><section>{words("no-script")}</section></noscript>\n<div class="charts">\n{boxes}</div>'


def chart_title(chart: Chart, words: Words) -> str:
    return chart.name if chart.name.startswith("eval_") else words(f"chart-{chart.name}")


def _chart_data(report: Report, words: Words) -> str:
    """JSON that cannot end its script element."""
    charts = [
        {
            "x": chart.x,
            "x_label": words(f"x-{chart.x}"),
            "is_band": chart.is_band,
            "is_load": chart.is_load,
            "xs": chart.xs,
            "labels": [words(f"line-{line.name}") for line in chart.lines],
            "lines": [[_finite(value) for value in line.ys] for line in chart.lines],
        }
        for chart in report.charts
    ]
    offset = datetime.fromtimestamp(report.made_at_s).astimezone().utcoffset()
    data: dict[str, Any] = {"offset_s": offset.total_seconds() if offset else 0.0, "charts": charts}
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def _row(tag: str, cells: Sequence[str], *, numbers: Sequence[int] = (), whens: Sequence[int] = ()) -> str:
    made = []
    for index, cell in enumerate(cells):
        name = " class=number" if index in numbers else " class=when" if index in whens else ""
        made.append(f"<{tag}{name}>{cell}</{tag}>")
    return f"<tr>{''.join(made)}</tr>\n"


def _attempts(report: Report, words: Words) -> str:
    def steps(first: int | None, last: int | None) -> str:
        return "–" if first is None or last is None else f"{first:,}–{last:,}"

    names = ("attempt", "began", "ended", "steps", "resumed", "kept", "how")
    head = _row("th", [words(f"col-{name}") for name in names], numbers=(3, 4, 5))
    rows = "".join(
        _row(
            "td",
            [
                str(one.attempt),
                when(one.began_at_s),
                words("goes-on") if one.ended_at_s is None else when(one.ended_at_s),
                steps(one.first_step, one.last_step),
                "–" if one.resumed is None else f"{one.resumed:,}",
                duration(one.kept_s),
                f"<span class=words>{reason(one.reason, report.id)}</span>",
            ],
            numbers=(3, 4, 5),
            whens=(1, 2),
        )
        for one in report.attempts
    )
    return _table(words("attempts"), head, rows)


def _devices(report: Report, words: Words) -> str:
    if not report.devices:
        return ""

    def told(value: float | None, unit: str) -> str:
        return "–" if value is None else f"{value:.0f} {unit}"

    head = _row(
        "th",
        [words(f"col-{name}") for name in ("device", "chip", "utilisation", "power", "temperature", "memory")],
        numbers=(2, 3, 4, 5),
    )
    rows = "".join(
        _row(
            "td",
            [
                text(f"{one.host}:{one.device}"),
                text(one.name or "–"),
                told(one.utilisation, "%"),
                told(one.power_w, "W"),
                told(one.temperature_c, "°C"),
                "–" if one.memory_used_bytes is None else describe_memory(int(one.memory_used_bytes)),
            ],
            numbers=(2, 3, 4, 5),
        )
        for one in report.devices
    )
    return _table(words("devices"), head, rows, folded=len(report.devices) > SHOWN_DEVICES)


def _events(report: Report, words: Words) -> str:
    def rows(events: Sequence[EventRow]) -> str:
        return "".join(
            f'<tr class="kind-{text(event.kind)}"><td class=when>{when(event.at_s)}</td>'
            f"<td>{text(event.kind)}</td><td class=words>{text(event.text)}</td></tr>\n"
            for event in events
        )

    if not report.events:
        return ""
    head = _row("th", [words("col-when"), words("col-kind"), words("col-story")])
    events = report.events
    older, newest = (events[:-SHOWN_EVENTS], events[-SHOWN_EVENTS:]) if len(events) > SHOWN_EVENTS else ((), events)
    more = (
        (
            f"<details><summary>{words('more-events', count=len(older))}</summary><table><tbody>\n{rows(older)}"
            "</tbody></table></details>\n"
        )
        if older
        else ""
    )
    return (
        f'<section class="events">\n<h2>{words("events")}</h2>\n{more}<div class="scroll"><table><thead>{head}'
        f"</thead><tbody>\n{rows(newest)}</tbody></table></div>\n</section>"
    )


def _table(title: str, head: str, rows: str, *, folded: bool = False) -> str:
    table = f'<div class="scroll"><table><thead>{head}</thead><tbody>\n{rows}</tbody></table></div>'
    if folded:
        return f"<section>\n<details><summary>{title}</summary>\n{table}\n</details>\n</section>"
    return f"<section>\n<h2>{title}</h2>\n{table}\n</section>"


def _footer(report: Report, words: Words) -> str:
    zone = datetime.fromtimestamp(report.made_at_s).astimezone().strftime("UTC%z")
    return f"<footer>{words('made', version=__version__, when=when(report.made_at_s), zone=zone)}</footer>"
