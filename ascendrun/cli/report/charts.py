"""Charts as the scripts of the report and of the dashboard draw them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from ascendrun.health.report.charts import TITLES, Chart
from ascendrun.text import Text

LINE_NAMES: Mapping[str, Text] = {
    "": Text("report.line-value", "value"),
    "mean": Text("report.line-mean", "mean"),
    "minimum": Text("report.line-minimum", "minimum"),
    "maximum": Text("report.line-maximum", "maximum"),
}
AXES: Mapping[str, Text] = {"step": Text("report.axis-step", "step"), "time": Text("report.axis-time", "time")}


def chart_title(chart: Chart) -> str:
    return str(TITLES.get(chart.name, chart.name))


def chart_json(charts: Sequence[Chart], at_s: float) -> str:
    """Return JSON that cannot end its script element. Times: as they are on this machine at `at_s`."""
    rows = [
        {
            **{name: getattr(chart, name) for name in ("x", "is_band", "is_load", "xs")},
            "x_label": str(AXES[chart.x]),
            "labels": [str(LINE_NAMES.get(line.name, line.name)) for line in chart.lines],
            "lines": [[_finite(value) for value in line.ys] for line in chart.lines],
        }
        for chart in charts
    ]
    offset = datetime.fromtimestamp(at_s).astimezone().utcoffset()
    data: dict[str, Any] = {"offset_s": offset.total_seconds() if offset else 0.0, "charts": rows}
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
