"""templates/grafana: dashboards of a cluster, a job and a node, from the tables of the exporter."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ascendrun.query.prometheus import DEVICE_ROWS, HOST_ROWS, JOB_ROWS, RANK_ROWS, Row

DATA = {"type": "prometheus", "uid": "${datasource}"}
UNITS = {
    "%": "percent",
    "bytes": "bytes",
    "bytes/s": "Bps",
    "W": "watt",
    "°C": "celsius",
    "s": "s",
    "ratio": "percentunit",
}
NOT_CURVES = ("_total_bytes", "_total_steps", "_timestamp_seconds")
WORST = {"ascendrun_device_healthy": "min", "ascendrun_device_link_up": "min"}
SUMS = ("ascendrun_device_power_watts", "ascendrun_device_memory_used_bytes", "ascendrun_device_external_processes")
VARIABLES = {
    "job": ("Job", "label_values(ascendrun_job_ranks, job_id)"),
    "host": ("Host", "label_values(ascendrun_host_has_data, host)"),
}
WIDTH, HEIGHT = 8, 8


class Number(NamedTuple):
    """A number at the top of the dashboard of the cluster; red from 1 on if it counts problems."""

    title: str
    expr: str
    is_problem: bool = True


NUMBERS = (
    Number("Hosts with data", "sum(ascendrun_host_has_data)", is_problem=False),
    Number("Hosts without data", "sum(1 - ascendrun_host_has_data) or vector(0)"),
    Number("Unhealthy devices", "sum(1 - ascendrun_device_healthy) or vector(0)"),
    Number("Ports down", "sum(1 - ascendrun_device_link_up) or vector(0)"),
    Number("Stragglers", "sum(ascendrun_job_stragglers) or vector(0)"),
    Number("Running jobs", 'sum(ascendrun_jobs{state="RUNNING"})', is_problem=False),
)


def render_cluster() -> str:
    jobs = _panel(
        "table", "Live jobs", ["ascendrun_job_state == 1"], options={"showHeader": True}, width=24, instant=True
    )
    numbers = [
        _panel("stat", one.title, [one.expr], width=4, height=4, steps=(1.0,) if one.is_problem else ())
        for one in NUMBERS
    ]
    return _board(
        "cluster",
        {
            "Now": [*numbers, jobs],
            "Devices by host": _curves(DEVICE_ROWS, _of_hosts),
            "Hosts": _curves(HOST_ROWS, _of_host),
        },
        ("host",),
    )


def render_job() -> str:
    return _board(
        "job",
        {
            "Progress": _curves(JOB_ROWS, lambda name: (f'{name}{{job_id=~"$job"}}', "{{job_id}} {{job_name}}")),
            "Ranks": _curves(RANK_ROWS, lambda name: (f'{name}{{job_id=~"$job"}}', "{{job_id}} rank {{rank}}")),
            "Devices of its ranks": _curves(DEVICE_ROWS, _of_ranks),
        },
        ("job",),
    )


def render_node() -> str:
    return _board(
        "node",
        {
            "Devices": _curves(DEVICE_ROWS, lambda name: (f'{name}{{host=~"$host"}}', "{{host}} {{id}}")),
            "Host": _curves(HOST_ROWS, _of_host),
        },
        ("host",),
    )


def _of_host(name: str) -> tuple[str, str]:
    return f'{name}{{host=~"$host"}}', "{{host}}"


def _of_hosts(name: str) -> tuple[str, str]:
    fold = "sum" if name in SUMS else WORST.get(name, "max")
    return f'{fold} by (host) ({name}{{host=~"$host"}})', "{{host}}"


def _of_ranks(name: str) -> tuple[str, str]:
    rank = 'ascendrun_rank_device_info{job_id=~"$job"}'
    return f"{name} * on (host, id) group_left (job_id, rank) {rank}", "{{job_id}} rank {{rank}}"


def _curves(rows: Sequence[Row], expression: Callable[[str], tuple[str, str]]) -> list[dict[str, Any]]:
    """Return one panel for each series of a table."""
    found = []
    for name, description, _ in rows:
        if not name.endswith(NOT_CURVES):
            expr, legend = expression(name)
            meaning, _, unit = description.rpartition(", ")
            title = (meaning if unit in UNITS else description).partition(";")[0]
            found.append(
                _panel("timeseries", title[:1].upper() + title[1:], [expr], legend=legend, unit=UNITS.get(unit))
            )
    return found


def _panel(
    kind: str,
    title: str,
    expressions: Sequence[str],
    *,
    legend: str = "",
    unit: str | None = None,
    width: int = WIDTH,
    height: int = HEIGHT,
    steps: Sequence[float] = (),
    instant: bool = False,
    **more: Any,
) -> dict[str, Any]:
    colours = [{"color": "green", "value": None}, *({"color": "red", "value": value} for value in steps)]
    defaults = {"thresholds": {"mode": "absolute", "steps": colours}, **({"unit": unit} if unit else {})}
    table = {"instant": True, "format": "table"} if instant else {}
    targets = [
        {"refId": chr(65 + number), "datasource": DATA, "expr": expr, "legendFormat": legend, **table}
        for number, expr in enumerate(expressions)
    ]
    at = {"w": width, "h": height}
    return {
        "title": title,
        "type": kind,
        "datasource": DATA,
        "gridPos": at,
        "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        **more,
    }


def _board(name: str, sections: Mapping[str, Sequence[dict[str, Any]]], variables: Sequence[str]) -> str:
    board = {
        "title": f"ascendrun {name}",
        "uid": f"ascendrun-{name}",
        "description": "Metrics of `ascendrun metrics`. Generated by `python -m tests.lib.pages`.",
        "tags": ["ascendrun"],
        "links": [{"type": "dashboards", "tags": ["ascendrun"], "title": "ascendrun", "asDropdown": False}],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": list(_variables(variables))},
        "annotations": {"list": []},
        "panels": list(_placed(sections)),
    }
    return json.dumps(board, indent=1, ensure_ascii=False) + "\n"


def _variables(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "current": {}}
    for name in names:
        label, query = VARIABLES[name]
        yield {
            "name": name,
            "label": label,
            "type": "query",
            "datasource": DATA,
            "query": {"query": query, "refId": name},
            "definition": query,
            "refresh": 2,
            "includeAll": True,
            "multi": True,
            "allValue": ".*",
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
            "sort": 1,
        }


def _placed(sections: Mapping[str, Sequence[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yield the panels in rows from left to right, each section under its title."""
    number, y = 1, 0
    for title, panels in sections.items():
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "panels": [],
            "gridPos": _at(0, y, 24, 1),
        }
        number, y, x, tallest = number + 1, y + 1, 0, 0
        for panel in panels:
            width, height = panel["gridPos"]["w"], panel["gridPos"]["h"]
            if x + width > 24:
                x, y, tallest = 0, y + tallest, 0
            yield {"id": number, **panel, "gridPos": _at(x, y, width, height)}
            number, x, tallest = number + 1, x + width, max(tallest, height)
        y += tallest


def _at(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}
