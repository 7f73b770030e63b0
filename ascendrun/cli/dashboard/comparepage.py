"""Data of the comparison of jobs: their curves on one axis, what differs in their options, their main values."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ascendrun.cli.dashboard.overview import job_row
from ascendrun.cli.report.charts import chart_json, chart_title
from ascendrun.cli.report.page import list_tiles
from ascendrun.core.errors import InvalidInputError, Problem
from ascendrun.core.names import split_list
from ascendrun.core.records import flattened
from ascendrun.health.report.charts import Chart, Line, thin
from ascendrun.text import Text, language

if TYPE_CHECKING:
    from ascendrun.cli.dashboard.jobpage import Kept
    from ascendrun.cluster import Cluster
    from ascendrun.health.report.data import Report

MOST = 8
REPORT_S = 5.0
ENDED_OFFERED = 30
UNSET = "–"


def read_comparison(cluster: Cluster, kept: Kept, asked: Sequence[str]) -> Mapping[str, Any]:
    """Return the comparison of these jobs, and the jobs that can be chosen. Raises NotFoundError, and InvalidInputError
    for more than MOST."""
    refs = list(dict.fromkeys(ref for text in asked for ref in split_list(text)))
    if len(refs) > MOST:
        too_many = Text("dashboard.too-many-jobs", "at most {count} jobs can be compared", count=MOST)
        raise InvalidInputError([Problem("jobs", None, None, too_many)])
    details = [cluster.jobs.detail(ref) for ref in refs]
    reports = [
        kept.get(
            ("report", one.job.id, one.job.attempt, one.job.state, language()),
            lambda one=one: cluster.diagnosis.report(one.job.id),  # type: ignore[misc]
            seconds=REPORT_S,
        )
        for one in details
    ]
    names = [f"{one.job.name} {one.job.id}" for one in details]
    charts = list(join_charts(names, reports))
    offered = cluster.jobs.list(ended=ENDED_OFFERED)
    return {
        "jobs": [job_row(one.job, time.time()) for one in details],
        "offered": [(job.id, job.name) for job in offered if job.id not in refs],
        "chosen": ",".join(refs),
        "charts": chart_json(charts, time.time()),
        "chart_titles": [chart_title(chart) for chart in charts],
        "options": list(differing([one.spec for one in details])),
        "results": list(_by_name([{label: value for value, label in list_tiles(one)} for one in reports])),
    }


def join_charts(names: Sequence[str], reports: Sequence[Report]) -> Iterator[Chart]:
    """Yield each chart over steps that at least one job has, with one line for each job that has it."""
    found: dict[str, dict[str, Mapping[float, float | None]]] = {}
    units = {}
    for name, report in zip(names, reports):
        for chart in report.charts:
            if chart.x == "step" and not chart.is_band:
                units[chart.name] = chart.unit
                found.setdefault(chart.name, {})[name] = dict(thin(list(zip(chart.xs, chart.lines[0].ys))))
    for chart_name, values in found.items():
        xs = sorted({x for line in values.values() for x in line})
        lines = tuple(Line(name, tuple(line.get(x) for x in xs)) for name, line in values.items())
        yield Chart(chart_name, "step", units[chart_name], tuple(xs), lines)


def differing(specs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the options that are not equal in all jobs, with the value of each."""
    yield from _by_name([dict(flattened(spec)) for spec in specs])


def _by_name(rows: Sequence[Mapping[str, str]]) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield each name with its value in every row, where the values differ."""
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name, UNSET) for row in rows]
        if len(set(values)) > 1:
            yield name, values
