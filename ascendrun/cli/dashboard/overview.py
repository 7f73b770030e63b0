"""Data of the overview: jobs, queue, nodes as a grid of devices, and what needs a person now."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ascendrun.cli import output as out
from ascendrun.cli.dashboard.cells import FRESH_S, PROBLEMS, cell
from ascendrun.core.metrics import seconds_left
from ascendrun.core.reachability import UNKNOWN
from ascendrun.health.top.view import TopView, rows_by_host
from ascendrun.text import Text
from ascendrun.text.format import fold_hosts, grouped

if TYPE_CHECKING:
    from ascendrun.cluster import Cluster, JobView
    from ascendrun.core.hosts import Host

ENDED_SHOWN = 20
VIEW_S = 1.0
"""Age up to which pages share one view of `top`."""
DAY_S = 86400.0
QUEUED = ("QUEUED", "BACKOFF")


class SharedTop:
    """The view of `top`, at most VIEW_S old, for all pages: its source serves one caller at a time."""

    def __init__(self, cluster: Cluster, hosts: Sequence[Host], *, with_progress: bool) -> None:
        self._source = cluster.samples.top(hosts, with_progress=with_progress)
        self._lock = threading.Lock()
        self._view: TopView | None = None

    def refresh(self, *, now_s: float) -> TopView:
        with self._lock:
            if self._view is None or now_s - self._view.at_s > VIEW_S:
                self._view = self._source.refresh(now_s=now_s)
            return self._view


def read_overview(cluster: Cluster, view: TopView) -> Mapping[str, Any]:
    now_s = time.time()
    listed = (*cluster.jobs.found_attempts(), *cluster.jobs.list(folded=True, ended=ENDED_SHOWN))
    causes = {job.id: cluster.diagnosis.known_cause(job) for job in listed if job.state == "FAILED"}
    rows = {job.id: job_row(job, now_s, causes.get(job.id)) for job in listed}
    live = [job for job in listed if job.ended_at_s is None]
    return {
        "jobs": [rows[job.id] for job in live if job.state not in QUEUED],
        "queue": [rows[job.id] for job in sorted(live, key=lambda job: -job.priority) if job.state in QUEUED],
        "ended": [rows[job.id] for job in listed if job.ended_at_s is not None],
        "nodes": grid(view),
        "totals": view.totals,
        "attention": [*_of_jobs(listed, rows, now_s), *_of_devices(view), *_of_machines(cluster)],
    }


def job_row(job: JobView, now_s: float, cause: str | None = None) -> Mapping[str, Any]:
    """Return what a line shows of a job. `progress` is that of a job which runs now, or of one that has ended."""
    progress = job.progress or {}
    ended_at_s = now_s if job.ended_at_s is None else job.ended_at_s
    is_running = job.state == "RUNNING"
    return {
        "id": job.id,
        "name": job.name,
        "state": job.state,
        "attempt": job.attempt,
        "is_held": job.held_by is not None,
        "hosts": fold_hosts(job.hosts) or str(job.nodes),
        "ranks": job.world_size,
        "ran_s": None if job.started_at_s is None else ended_at_s - job.started_at_s,
        "left_s": seconds_left(*map(progress.get, ("step", "total_steps", "step_s"))) if is_running else None,
        "progress": progress,
        "reason": out.headline(cause or str(job.reason)),
    }


def grid(view: TopView) -> Sequence[Mapping[str, Any]]:
    """Return every host with a cell for each device, or for each rank of a host without devices."""
    lines: list[Mapping[str, Any]] = [
        {
            "host": line.host,
            "why": line.itself.why,
            "detail": line.itself.detail,
            "cells": [cell(row) for row in line.rows if row.device is not None or row.rank is not None],
        }
        for line in rows_by_host(view.rows, view.hosts)
    ]
    shown = {line["host"] for line in lines}
    bare = [row for row in view.hosts if row.host not in shown]
    return [*lines, *({"host": row.host, "why": row.why, "detail": row.detail, "cells": ()} for row in bare)]


Item = Mapping[str, Any]
"""What needs a person: `is_bad`, `subject`, `text`, `job` or None, `command` or None."""


def _item(subject: str, text: object, *, job: str | None = None, command: str | None = None, bad: bool = True) -> Item:
    return {"subject": subject, "text": text, "job": job, "command": command, "is_bad": bad}


def _of_jobs(jobs: Sequence[JobView], rows: Mapping[str, Any], now_s: float) -> Iterator[Item]:
    for job in jobs:
        is_recent = job.ended_at_s is not None and now_s - job.ended_at_s < DAY_S
        if job.state in (UNKNOWN, "FOUND") or (job.state == "FAILED" and is_recent):
            command = f"ascendrun stop {job.id}" if job.state == "FOUND" else None
            yield _item(
                out.named(job.id, job.name),
                out.labelled(job.state, rows[job.id]["reason"]),
                job=None if job.state == "FOUND" else job.id,
                command=command,
            )
        elif job.unreachable_hosts:
            text = Text("dashboard.job-silent", "{hosts:hosts} does not respond", hosts=job.unreachable_hosts)
            yield _item(out.named(job.id, job.name), text, job=job.id)


def _of_devices(view: TopView) -> Iterator[Item]:
    found = grouped(
        (name, row)
        for row in view.rows
        for name in row.problems
        if name in PROBLEMS and name != "unreachable" and row.age_s is not None and row.age_s <= FRESH_S
    )
    for name, rows in found.items():
        places = [row.host if row.device is None else f"{row.host}:{row.device}" for row in rows]
        yield _item(fold_hosts(places), PROBLEMS[name], bad=name in ("health", "link"))
    silent = grouped((host.why, host) for host in view.hosts if host.why in ("unreachable", "no-reply"))
    for hosts in silent.values():
        yield _item(fold_hosts([host.host for host in hosts]), hosts[0].detail or PROBLEMS["unreachable"])


def _of_machines(cluster: Cluster) -> Iterator[Item]:
    for machine in cluster.hosts.held():
        for hold in machine.holds:
            fix = f"ascendrun stop {hold.tag}" if hold.is_found else f"ascendrun release {hold.host}"
            yield _item(hold.host, hold.reason(), command=fix)
