"""The data of `top` for programs: `-o json`, and the API of the dashboard."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ascendrun.core.measurement import metrics_of
from ascendrun.core.records import as_record
from ascendrun.core.samples import RankSample
from ascendrun.health.top.view import TopRow, TopView

_NOT_OF_DEVICE = ("at", "host", "device", "device_type", "name", "pids", "source")
_NOT_OF_HOST = ("at", "host", "disk_read_bytes_s", "disk_write_bytes_s")
_NOT_OF_RANK = ("at", "total_steps", "epoch", "own_s")
_NOT_OF_JOB = ("at", "own_s")
_MANY: Mapping[str, Any] = {"places": (), "progress": {}, "slow": {}, "liveness": {}, "ended_at_s": None}
"""Fields of a job that are in the rows of its ranks and hosts."""


def row_record(row: TopRow) -> dict[str, Any]:
    """Return one device or rank."""
    measured = {
        "device_type": row.device_type,
        "chip": row.metrics.name,
        **_without(as_record(row.metrics), _NOT_OF_DEVICE),
    }
    of_rank = {name: getattr(row.rank_metrics, name) for name, one in metrics_of(RankSample).items() if one.column}
    return _flat(row, sample=measured, rank_sample=of_rank, progress=_without(as_record(row.progress), _NOT_OF_RANK))


def view_record(view: TopView, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    record: dict[str, Any] = as_record(dataclasses.replace(view, jobs=(), hosts=(), rows=()))
    jobs = []
    for row in view.jobs:
        job = _without(as_record(dataclasses.replace(row.job, **_MANY)), (*_MANY, "ended_at"))
        jobs.append(_flat(row, job=job, progress=_without(as_record(row.progress), _NOT_OF_JOB)))
    hosts = [_flat(row, sample=_without(as_record(row.metrics), _NOT_OF_HOST)) for row in view.hosts]
    return {**record, "jobs": jobs, "hosts": hosts, "rows": rows}


def _flat(row: Any, **parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the row, with each of `parts` replaced by its own fields."""
    record: dict[str, Any] = {}
    for field in dataclasses.fields(row):
        record.update(parts[field.name] if field.name in parts else {field.name: as_record(getattr(row, field.name))})
    return record


def _without(record: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in names}


ROW_NAMES = tuple(row_record(TopRow("")))
