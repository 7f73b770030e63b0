"""docs/measurements.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ascendrun.core.measurement import metrics_of
from ascendrun.core.samples import DeviceSample, HostSample, RankSample
from ascendrun.health.top.view import Progress

HEAD = """# Measured values

This page lists what ascendrun measures, with its unit, its column in `top` and its Prometheus series. It is generated
by `python -m tests.lib.pages`; do not edit it.

How often the values are measured and how long they are kept: [samples](samples.md). `npu_*` are the names and units of
npu-exporter. Names are those in the JSON of `top`, where `name` of a device is `chip`.
"""
KINDS: Mapping[str, type[Any]] = {
    "Devices": DeviceSample,
    "Hosts": HostSample,
    "Ranks": RankSample,
    "Reported by programs": Progress,
}


def render_page() -> str:
    lines = [HEAD.rstrip()]
    for title, kind in KINDS.items():
        lines += ["", f"## {title}", "", "| Name | Meaning | Unit | Column | Series |", "|---|---|---|---|---|"]
        lines += render_rows(kind)
    return "\n".join(lines) + "\n"


def render_rows(kind: type[Any]) -> list[str]:
    rows = []
    for name, metric in metrics_of(kind).items():
        columns = dict.fromkeys(
            f"`{column.title}`" for column in (metric.column, metric.host_column) if column is not None
        )
        series = ", ".join(f"`{each}`" for each in metric.prometheus)
        rows.append(f"| `{name}` | {metric.meaning} | {metric.unit} | {', '.join(columns)} | {series} |")
    return rows
