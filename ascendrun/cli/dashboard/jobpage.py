"""Data of the page of one job: state, cause, attempts, ranks over time, curves, events, outputs."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

from ascendrun.cli import output as out
from ascendrun.cli.dashboard.overview import job_row
from ascendrun.cli.report import page as report_page
from ascendrun.cli.report.charts import chart_json, chart_title
from ascendrun.core.errors import AscendrunError, NotFoundError
from ascendrun.core.jobs.roles import rank_labels
from ascendrun.text import language

if TYPE_CHECKING:
    from ascendrun.cluster import Cluster, JobDetail

EVENTS_SHOWN = 50
FILES_SHOWN = 500
CHECKPOINTS_SHOWN = 20
HEAT_S, REPORT_S = 10.0, 5.0
"""Age up to which the heat map and the curves of a job that runs are shown again."""

COST_RATIO = 50
"""A value is kept for this many times the duration of its reading: large jobs cost the head no more than small ones."""

Value = TypeVar("Value")


class Kept:
    """Values that are costly to read, by key, each for some seconds or longer. Who asks while one is read gets that
    value, or the error of that reading; others do not wait for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readings: dict[object, _Reading] = {}

    def get(self, key: object, read: Callable[[], Value], *, seconds: float) -> Value:
        with self._lock:
            now_s = time.monotonic()
            self._readings = {known: one for known, one in self._readings.items() if now_s < one.until_s}
            reading = self._readings.get(key)
            is_new = reading is None
            if reading is None:
                reading = self._readings[key] = _Reading()
        if is_new:
            reading.work(read, seconds)
        value: Value = reading.value.result()
        return value


class _Reading:
    """A value that is read or was read, and until when it is shown."""

    def __init__(self) -> None:
        self.value: Future[Any] = Future()
        self.until_s = math.inf

    def work(self, read: Callable[[], Any], seconds: float) -> None:
        began_s = time.monotonic()
        try:
            value = read()
        except BaseException as error:
            self.until_s = 0.0
            self.value.set_exception(error)  # for those who wait
            raise
        read_s = time.monotonic()
        self.until_s = read_s + max(seconds, COST_RATIO * (read_s - began_s))
        self.value.set_result(value)


def read_job(cluster: Cluster, kept: Kept, ref: str) -> Mapping[str, Any]:
    detail = cluster.jobs.detail(ref)
    job, labels = detail.job, rank_labels(detail.nodes)
    mark = (job.id, job.attempt, job.state, job.confidence, language())
    report = kept.get(("report", *mark), lambda: cluster.diagnosis.report(job.id), seconds=REPORT_S)
    heat = kept.get(("heat", *mark), lambda: _heat(cluster, detail, labels), seconds=HEAT_S)
    return {
        "job": job_row(job, time.time()),
        "id": job.id,
        "name": job.name,
        "stages": [
            {"id": one.job.id, "name": one.job.stage, "state": one.job.state.value} for one in _stages(cluster, detail)
        ],
        "tiles": report_page.list_tiles(report),
        "diagnosis": _diagnosis(cluster, kept, detail, mark),
        "nodes": detail.nodes if job.ended_at_s is None else (),
        "labels": labels,
        "attempts": report_page.attempt_rows(report),
        "checkpoints": kept.get(("checkpoints", *mark), lambda: _checkpoints(cluster, detail), seconds=REPORT_S),
        "charts": chart_json(report.charts, report.made_at_s),
        "chart_titles": [chart_title(chart) for chart in report.charts],
        "heat": heat,
        "events": [
            {"at_s": event.at_s, "code": event.code, "severity": event.severity.value, "message": str(event.message())}
            for event in detail.events[: -EVENTS_SHOWN - 1 : -1]
        ],
        "files": list(list_outputs(detail)),
    }


def _checkpoints(cluster: Cluster, detail: JobDetail) -> list[Any]:
    """Return the newest checkpoints that the newest attempt reported, the newest first."""
    lines = cluster.samples.metrics(detail.job.id)
    return [line for line in lines if line.event == "checkpoint"][: -CHECKPOINTS_SHOWN - 1 : -1]


def _stages(cluster: Cluster, detail: JobDetail) -> tuple[Any, ...]:
    return cluster.jobs.stages(detail.job.pipeline) if detail.job.pipeline is not None else ()


def _diagnosis(cluster: Cluster, kept: Kept, detail: JobDetail, mark: object) -> Mapping[str, Any] | None:
    """Return why the newest attempt failed; None: it did not, or it is not known yet."""
    job = detail.job
    if job.state not in ("FAILED", "BACKOFF") and detail.first_failure is None:
        return None
    try:
        found = kept.get(
            ("explain", mark), lambda: cluster.diagnosis.explain(job.id, attempt=max(job.attempt, 1)), seconds=REPORT_S
        ).diagnosis
    except AscendrunError:
        return None
    return {
        **report_page.diagnosis_values(found),
        "is_preliminary": job.confidence == "preliminary",
        "proofs": [
            {"place": proof.file, "text": out.headline(str(proof.text)), "at_s": proof.at_s, "rank": proof.rank}
            for proof in found.evidence[: report_page.SHOWN_EVIDENCE]
        ],
    }


def _heat(cluster: Cluster, detail: JobDetail, labels: Mapping[int, str]) -> str | None:
    """Return JSON of the heat map: load, and step time relative to its column's median, in percent. None: no data."""
    try:
        heat = cluster.samples.heat(detail)
    except AscendrunError:
        return None
    if not heat.ranks:
        return None
    medians = [median([value for value in column if value is not None] or [0.0]) for column in zip(*heat.step_s)]
    data = {
        "since_s": heat.since_s,
        "column_s": heat.column_s,
        "ranks": [labels.get(rank, rank) for rank in heat.ranks],
        "load": [[None if value is None else round(value) for value in row] for row in heat.load],
        "step": [
            [
                None if value is None or not middle else round(100 * value / middle)
                for value, middle in zip(row, medians)
            ]
            for row in heat.step_s
        ],
    }
    return json.dumps(data, separators=(",", ":"))


def list_outputs(detail: JobDetail) -> Iterator[Mapping[str, Any]]:
    """Yield the files of a job's outputs on this machine, by path, at most FILES_SHOWN."""
    if detail.outputs is None:
        return
    root = Path(detail.outputs)
    files = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    for path in files[:FILES_SHOWN]:
        yield {"path": str(path.relative_to(root)), "bytes": path.stat().st_size}


def find_output(detail: JobDetail, name: str) -> Path:
    """Return one of the files. Raises NotFoundError for any other path."""
    if detail.outputs is not None:
        root = Path(detail.outputs).resolve()
        path = (root / name).resolve()
        if path.is_relative_to(root) and path.is_file():
            return path
    raise NotFoundError.of("dashboard.no-output", "{job}: no output {path}", job=detail.job.id, path=name)
