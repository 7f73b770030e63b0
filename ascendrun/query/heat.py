"""Ranks over time: the load of each rank's device and its step times, to see a straggler at a glance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from ascendrun.core.dataclass import dataclass
from ascendrun.core.metrics import progress_pattern
from ascendrun.core.samples import RankSample
from ascendrun.head.spool.metrics_reader import find_progress, iter_lines
from ascendrun.head.state.sample_store import SampleStore
from ascendrun.head.state.state_dir import spool_dir

if TYPE_CHECKING:
    from ascendrun.query.views import JobDetail

COLUMNS = 60
LONGEST_S = 1800.0
READ_BYTES = 4 << 20
"""Bytes of metrics that are read, those of all ranks together."""
LEAST_BYTES = 4096

Row = tuple["float | None", ...]


@dataclass(frozen=True)
class HeatMap:
    """The newest attempt, up to now or to its end. A row has COLUMNS values of `column_s` seconds each, from `since_s`
    on; None: not measured. `load`: utilisation of the rank's device, without one the CPU of its processes, in percent.
    `step_s`: mean step time."""

    since_s: float
    column_s: float
    ranks: tuple[int, ...]
    load: tuple[Row, ...]
    step_s: tuple[Row, ...]


def read_heat(state_dir: Path, detail: JobDetail, *, now_s: float) -> HeatMap:
    """Read the last LONGEST_S of an attempt. Raises StoreUnusableError."""
    job = detail.job
    until_s = now_s if job.ended_at_s is None else job.ended_at_s
    since_s = max(until_s - LONGEST_S, job.started_at_s or job.created_at_s)
    column_s = max(until_s - since_s, 1.0) / COLUMNS

    def row(points: Iterable[tuple[float | None, float | None]]) -> Row:
        cells: dict[int, list[float]] = {}
        for at_s, value in points:
            if at_s is not None and value is not None and since_s <= at_s <= until_s:
                cells.setdefault(min(COLUMNS - 1, int((at_s - since_s) / column_s)), []).append(value)
        return tuple(mean(cells[number]) if number in cells else None for number in range(COLUMNS))

    loads = _read_loads(state_dir, detail, since_s, until_s, row)
    steps: dict[int, Row] = {}
    files = find_progress(spool_dir(state_dir, job.id, max(job.attempt, 1)))
    each = max(LEAST_BYTES, READ_BYTES // max(1, len(files)))
    for rank, paths in files.items():
        lines = iter_lines(paths, last_bytes=each, pattern=progress_pattern(detail.spec))
        steps[rank] = row((line.at_s, line.step_s) for line in lines)
    ranks = sorted({*loads, *steps})
    empty = (None,) * COLUMNS
    return HeatMap(
        since_s,
        column_s,
        tuple(ranks),
        tuple(loads.get(rank, empty) for rank in ranks),
        tuple(steps.get(rank, empty) for rank in ranks),
    )


def _read_loads(
    state_dir: Path,
    detail: JobDetail,
    since_s: float,
    until_s: float,
    row: Callable[[Iterable[tuple[float | None, float | None]]], Row],
) -> Mapping[int, Row]:
    span = {"since_s": since_s, "until_s": until_s, "every_s": (until_s - since_s) / COLUMNS}
    of_ranks: dict[int, list[RankSample]] = {}
    of_devices: dict[tuple[str, int], list[tuple[float | None, float | None]]] = {}
    with SampleStore.open_for_reading(state_dir) as store:
        for sample in store.rank_series(job=detail.job.id, attempt=detail.job.attempt, **span):
            of_ranks.setdefault(sample.rank, []).append(sample)
        for host in {sample.host for samples in of_ranks.values() for sample in samples[-1:]}:
            for device in store.device_series(host=host, **span):
                of_devices.setdefault((host, device.device), []).append((device.at_s, device.utilisation))
    found: dict[int, Row] = {}
    for rank, samples in of_ranks.items():
        last = samples[-1]
        points = None if last.device is None else of_devices.get((last.host, last.device))
        found[rank] = row(points or [(sample.at_s, sample.cpu) for sample in samples])
    return found
