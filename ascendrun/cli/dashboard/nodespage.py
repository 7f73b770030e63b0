"""Data of the pages of nodes: every machine that the head knows, the history of one, and a check of all."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ascendrun.cli import output as out
from ascendrun.cli.dashboard.overview import grid, job_row
from ascendrun.cli.report.charts import chart_json, chart_title
from ascendrun.core.errors import AscendrunError, NotFoundError
from ascendrun.core.findings import SEVERITIES, Severity
from ascendrun.core.machines import MachineState
from ascendrun.health.report.charts import make_charts
from ascendrun.health.top.view import natural_key
from ascendrun.text import language

if TYPE_CHECKING:
    from ascendrun.cli.dashboard.jobpage import Kept
    from ascendrun.cluster import Cluster, MachineView
    from ascendrun.core.hosts import Host
    from ascendrun.health.comparison import DoctorReport
    from ascendrun.health.top.view import TopView

OPEN = (MachineState.FREE, MachineState.HELD, MachineState.SPARE)
CLASSES = {Severity.FAIL: "error", Severity.WARN: "warning", Severity.NOTE: "info"}
"""How the style sheet names the severity of a row."""
SERIES_S = 6 * 3600.0
CURVES_S = 10.0
JOBS_READ, JOBS_SHOWN = 300, 50
CHECK_S = 600.0
"""Age up to which the result of a check is shown again, unless another one is asked for."""


def read_nodes(cluster: Cluster, view: TopView) -> Mapping[str, Any]:
    machines = {name: machine for machine in cluster.hosts.machines() for name in machine.names}
    lines = {str(line["host"]): line for line in grid(view)}
    rows = [_row(host, machines.get(host), lines.get(host)) for host in sorted({*machines, *lines}, key=natural_key)]
    return {"rows": rows, "closed": [row for row in rows if row["is_closed"]]}


def _row(host: str, machine: MachineView | None, line: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return what a line shows of a host: its state here, and its devices now."""
    state = MachineState.FREE if machine is None else machine.state
    told = None if machine is None else machine.reason or machine.finding
    return {
        "host": host,
        "state": state.value,
        "is_closed": state not in OPEN,
        "address": "" if machine is None else machine.address,
        "jobs": () if machine is None else machine.jobs,
        "since_s": None if machine is None else machine.since_s,
        "until_s": None if machine is None else machine.until_s,
        "by": None if machine is None else machine.by,
        "seen_s": None if machine is None else machine.heard_at_s or None,
        "examined_s": None if machine is None else machine.examined_at_s,
        "reason": "" if told is None else out.headline(str(told)),
        "cells": () if line is None else line["cells"],
        "detail": None if line is None or not line["why"] else line["detail"],
    }


def read_node(cluster: Cluster, kept: Kept, view: TopView, host: str) -> Mapping[str, Any]:
    """Return the state of one host, its curves, and the jobs that ran there. Raises NotFoundError."""
    row = next((one for one in read_nodes(cluster, view)["rows"] if one["host"] == host), None)
    if row is None:
        raise NotFoundError.of("dashboard.no-node", "{host}: no such node", host=host)
    charts = kept.get(("node", host, language()), lambda: _charts(cluster, host, len(row["cells"])), seconds=CURVES_S)
    ran = kept.get(("ran", host, language()), lambda: _ran(cluster, host), seconds=5)
    return {"row": row, "host": host, **charts, "ran": ran}


def _charts(cluster: Cluster, host: str, devices: int) -> Mapping[str, Any]:
    until_s = time.time()
    span = (until_s - SERIES_S, until_s)
    try:
        series = [cluster.samples.series(host, since_s=span[0], until_s=until_s, device=one) for one in range(devices)]
        _, of_host, _ = cluster.samples.series(host, since_s=span[0], until_s=until_s)
    except AscendrunError:
        return {"charts": None, "chart_titles": ()}
    charts = make_charts({}, [sample for found, _, _ in series for sample in found], of_host, span)
    return {"charts": chart_json(charts, until_s), "chart_titles": [chart_title(chart) for chart in charts]}


def _ran(cluster: Cluster, host: str) -> Sequence[Mapping[str, Any]]:
    """Return jobs of the newest JOBS_READ whose present or last attempt used the host, with the cause of a failure."""
    now_s = time.time()
    jobs = [job for job in cluster.jobs.list(ended=JOBS_READ) if host in job.hosts][:JOBS_SHOWN]
    causes = {job.id: cluster.diagnosis.known_cause(job) for job in jobs if job.state == "FAILED"}
    return [job_row(job, now_s, causes.get(job.id)) for job in jobs]


def read_check(cluster: Cluster, kept: Kept, given: Sequence[Host], asked: str, *, is_live: bool) -> Mapping[str, Any]:
    """Return the findings of `doctor` on all hosts, the worst first; it runs for the live part of the page. `asked`: a
    new text runs it again."""
    hosts = {host.name: host for host in (*cluster.hosts.every(), *given)}
    if not is_live or not hosts:
        return {"report": None, "error": None, "count": len(hosts), "rows": ()}
    try:
        report = kept.get(
            ("check", asked, *hosts), lambda: cluster.checks.doctor(tuple(hosts.values())), seconds=CHECK_S
        )
    except AscendrunError as error:
        return {"report": None, "error": error.message, "count": len(hosts), "rows": ()}
    return {
        "error": None,
        "report": report,
        "count": len(hosts),
        "rows": list(_findings(report)),
        "now": int(time.time()),
    }


def _findings(report: DoctorReport) -> Iterator[Mapping[str, Any]]:
    for host, failure in report.unreached.items():
        yield {"severity": "error", "nodes": host, "message": str(failure.message), "hint": failure.hint, "fix": None}
    for one in sorted(report.findings, key=lambda one: SEVERITIES.index(one.severity)):
        yield {**vars(one), "severity": CLASSES[one.severity], "evidence": [str(line) for line in one.evidence[:3]]}
