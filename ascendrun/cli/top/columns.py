"""Columns of `top`: their cells, their layout, and the order of omission in a narrow terminal."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Union

from ascendrun.cli.output import describe_seconds, sanitise_line, width_of
from ascendrun.cli.top.cells import LINK_DOWN, bar, describe, describe_pair, number, relative
from ascendrun.core.measurement import Metric, metrics_of
from ascendrun.core.metrics import seconds_left
from ascendrun.core.samples import DeviceSample, HostSample, RankSample
from ascendrun.health.top.view import HostLine, IdleHosts, JobRow, Progress, TopRow
from ascendrun.text import Text, enumerate_texts
from ascendrun.text.format import fold_hosts, fold_numbers, label_ranks

GAP = 2
UTILISATION = "util"
NUMBER = re.compile(r"[▏▎▍▌▋▊▉█]* *(\d+)%?")
"""A utilisation with its bar."""
NARROW, NOTE_WIDTH, NOTE_WIDTH_NARROW = 100, 24, 8
"""Minimum width of the note, the last truncated column; less if there are few columns."""
USUAL_WEIGHT = 25
"""In a pipe, without a known width, columns of less weight are shown only with -o wide."""
Line = Union[TopRow, IdleHosts]
CAUSES: Mapping[str, Text] = {
    "frequency": Text("top.cause-frequency", "low clock"),
    "temperature": Text("top.cause-temperature", "hot"),
    "link": Text("top.cause-link", "link"),
    "data": Text("top.cause-data", "waiting for data"),
    "cpu": Text("top.cause-cpu", "CPU shortage"),
    "shared": Text("top.cause-shared", "shared device"),
    "health": Text("top.cause-health", "unhealthy device"),
    "work": Text("top.cause-work", "busier device"),
}


@dataclass(frozen=True)
class TopColumn:
    """`cell`: the text for one row, "-" for unknown. `weight`: a narrow terminal omits the lowest first.

    A weight of 0 is for -o wide only. `of_device`: empty without devices.
    """

    key: str
    title: Text | str
    cell: Callable[[Any], str]
    weight: int
    is_right: bool = True
    of_device: bool = False


def host_cell(line: Line) -> str:
    if isinstance(line, IdleHosts):
        return fold_hosts(line.hosts)
    return line.host


def _device(line: Line) -> str:
    if isinstance(line, IdleHosts):
        return fold_numbers(line.devices)
    return "-" if line.device is None else str(line.device)


def _of_row(show: Callable[[TopRow], str]) -> Callable[[Line], str]:
    """Return a cell that is empty for folded idle hosts."""
    return lambda line: "" if isinstance(line, IdleHosts) else show(line)


# ---------------------------------------------------------------- columns of metrics


def metric_columns(kind: type[Any], path: str, *, of_device: bool = False) -> Iterator[TopColumn]:
    """Yield the columns of a kind of metrics. `path`: of the sample in a row."""
    sample_of = attrgetter(path)

    def cell(name: str, row: Metric) -> Callable[[Line], str]:
        def show(line: Line) -> str:
            if isinstance(line, IdleHosts):
                return _range(line.samples, name, row) if of_device else ""
            return describe_metric(sample_of(line), name, row if of_device else row._replace(beside=None))

        return show

    for name, row in metrics_of(kind).items():
        if row.column is not None:
            column = row.column
            yield TopColumn(column.key, column.title, cell(name, row), column.weight, column.is_right, of_device)


def describe_metric(sample: Any, name: str, row: Metric) -> str:
    """Return the value of a metric with the one that is shown beside it; "-" for unknown."""
    value = getattr(sample, name)
    return (
        describe(value, row.unit) if row.beside is None else describe_pair(value, getattr(sample, row.beside), row.unit)
    )


def _range(samples: Sequence[Any], name: str, row: Metric) -> str:
    """Return the values of several devices: 92-99W."""
    values = [value for value in (getattr(sample, name) for sample in samples) if value is not None]
    if not values:
        return "-"
    if row.beside is not None:
        return describe_metric(max(samples, key=lambda sample: getattr(sample, name) or 0), name, row)
    low, high = describe(min(values), row.unit), describe(max(values), row.unit)
    return low if low == high else f"{low.rstrip('%CW')}-{high}"


def host_columns(*kinds: type[Any]) -> Iterator[TopColumn]:
    """Yield the columns of hosts: metrics of their devices, folded, and their own."""

    def folded(name: str, row: Metric, fold: str) -> Callable[[HostLine], str]:
        return lambda line: FOLDS[fold](line, name, row)

    def own(name: str, row: Metric) -> Callable[[HostLine], str]:
        return lambda line: describe_metric(line.itself.metrics, name, row)

    for name, row in (item for kind in kinds for item in metrics_of(kind).items()):
        if row.host_column is not None:
            key, title, weight, fold, is_right = row.host_column
            cell = own(name, row) if fold is None else folded(name, row, fold)
            yield TopColumn(key, title, cell, weight, is_right, of_device=fold is not None)


def _samples_of(line: HostLine) -> list[DeviceSample]:
    """Return one sample per device, however many ranks share it."""
    return [row.metrics for row in {row.device: row for row in line.rows}.values()]


def _known(line: HostLine, name: str) -> list[Any]:
    return [value for value in (getattr(sample, name) for sample in _samples_of(line)) if value is not None]


def _each(line: HostLine, name: str, row: Metric) -> str:
    if not _has_device(line):
        return "-"
    values = (getattr(sample, name) for sample in _samples_of(line))
    return " ".join("  -" if value is None else f"{value:3.0f}" for value in values)


def _sum(line: HostLine, name: str, row: Metric) -> str:
    def total(each: str) -> Any:
        values = _known(line, each)
        return sum(values) if values else None

    if row.beside is None:
        return describe(total(name), row.unit)
    return describe_pair(total(name), total(row.beside), row.unit)


def _worst(line: HostLine, name: str, row: Metric) -> str:
    known = set(_known(line, name))
    return ",".join(sorted(known - {"OK"})) or ("OK" if known else "-")


def _down(line: HostLine, name: str, row: Metric) -> str:
    down = [row.device for row in line.rows if getattr(row.metrics, name) is False and row.device is not None]
    if down:
        return f"{LINK_DOWN} {fold_numbers(down)}"
    return describe(True if any(_known(line, name)) else None, "")


FOLDS: Mapping[str, Callable[[HostLine, str, Metric], str]] = {
    "each": _each,
    "sum": _sum,
    "max": lambda line, name, row: describe(max(_known(line, name), default=None), row.unit),
    "worst": _worst,
    "down": _down,
}
"""How the values of a host's devices become one cell."""


def note(line: Line) -> str:
    """Return the problems of a row that have no column of their own."""
    is_bare = isinstance(line, TopRow) and line.device is None and line.rank is None
    found = [Text("top.idle", "idle")] if isinstance(line, IdleHosts) or is_bare else []
    for problem in line.problems:
        if problem == "stale":
            found.append(Text("top.problem-stale", "{age} old", age=describe_seconds(line.age_s)))
        elif isinstance(line, IdleHosts):
            continue
        elif problem == "slow":
            cause = CAUSES.get(line.slow_cause or "")
            slow = Text("top.problem-slow", "slow")
            found.append(slow if cause is None else Text("top.problem-slow-cause", "slow ({cause})", cause=cause))
        elif problem == "external":
            found.append(external(line, most=3))
        elif problem == "unreachable":
            found.append(Text("top.problem-unreachable", "host unreachable"))
    return enumerate_texts(found)


def external(row: TopRow, *, most: int | None = None) -> Text:
    """Return the processes on the device that belong to no rank; `most`: maximum number."""
    pids = row.external_pids or ()
    shown = ",".join(map(str, pids[:most])) + ("…" if most is not None and pids[most:] else "")
    return Text("top.problem-external", "external process {pids}", pids=shown)


def _age(line: Line) -> str:
    if isinstance(line, IdleHosts) or line.age_s is not None:
        return describe_seconds(line.age_s)
    return describe_seconds(line.rank_age_s if line.rank_age_s is not None else line.metrics_age_s)


ROW_COLUMNS: tuple[TopColumn, ...] = (
    TopColumn("host", Text("top.column-host", "HOST"), host_cell, 99, is_right=False),
    TopColumn("device", Text("top.column-device", "DEV"), _device, 98, of_device=True),
    *metric_columns(DeviceSample, "metrics", of_device=True),
    TopColumn("job", Text("top.column-job", "JOB"), _of_row(lambda row: row.job or "-"), 85, is_right=False),
    TopColumn("name", Text("top.column-name", "NAME"), _of_row(lambda row: row.job_name or "-"), 15, is_right=False),
    TopColumn("rank", "RANK", _of_row(lambda row: row.rank_label or number(row.rank)), 90),
    *metric_columns(Progress, "progress"),
    TopColumn("relative", Text("top.column-relative", "REL"), _of_row(lambda row: relative(row.slower_by)), 70),
    *metric_columns(RankSample, "rank_metrics"),
    TopColumn("pid", "PID", _of_row(lambda row: number(row.pid)), 10),
    TopColumn("age", Text("top.column-age", "AGE"), _age, 40),
    TopColumn("note", Text("top.column-note", "NOTE"), note, 72, is_right=False),
)


# ---------------------------------------------------------------- one line per host


def _jobs_of_host(line: HostLine) -> str:
    return ",".join(dict.fromkeys(row.job for row in line.rows if row.job)) or "-"


def _ranks_of_host(line: HostLine) -> str:
    ranks = {row.rank: row.rank_label for row in line.rows if row.rank is not None}
    return label_ranks(ranks, {rank: label for rank, label in ranks.items() if label}) or "-"


def _slowest_of_host(line: HostLine) -> str:
    known = [row.slower_by for row in line.rows if row.slower_by is not None]
    return relative(max(known, default=None))


def _notes_of_host(line: HostLine) -> str:
    return enumerate_texts(dict.fromkeys(text for text in (note(row) for row in line.rows) if text))


HOST_COLUMNS: tuple[TopColumn, ...] = (
    TopColumn("host", Text("top.column-host", "HOST"), lambda line: line.host, 99, is_right=False),
    *host_columns(DeviceSample),
    TopColumn("job", Text("top.column-job", "JOB"), _jobs_of_host, 85, is_right=False),
    TopColumn("ranks", Text("top.column-ranks", "RANKS"), _ranks_of_host, 65, is_right=False),
    TopColumn("relative", Text("top.column-relative", "REL"), _slowest_of_host, 75),
    *host_columns(HostSample),
    TopColumn("note", Text("top.column-note", "NOTE"), _notes_of_host, 72, is_right=False),
)


# ---------------------------------------------------------------- one line per job


def _of_job(name: str, metric: Metric) -> Callable[[JobRow], str]:
    return lambda row: describe_metric(row.progress, name, metric)


def _slowest(row: JobRow) -> str:
    if row.slowest is None:
        return "-"
    return f"rank {row.slowest} {relative(row.slower_by)}"


def _left(row: JobRow) -> str:
    done = row.progress
    is_running = row.job.state == "RUNNING"
    return describe_seconds(seconds_left(done.step, done.total_steps, done.step_s) if is_running else None)


def _reason(row: JobRow) -> str:
    is_silent = any(state in ("UNKNOWN", "UNREACHABLE") for state in row.job.liveness.values())
    if is_silent or row.job.state != "RUNNING":
        return str(row.job.reason)
    return "" if row.progress.phase is None else str(Text("top.phase", "phase {name}", name=row.progress.phase))


JOB_COLUMNS: tuple[TopColumn, ...] = (
    TopColumn("job", Text("top.column-job", "JOB"), lambda row: row.job.id, 99, is_right=False),
    TopColumn("name", Text("top.column-name", "NAME"), lambda row: row.job.name, 80, is_right=False),
    TopColumn("state", Text("top.column-state", "STATE"), lambda row: row.job.state, 98, is_right=False),
    TopColumn("nodes", Text("top.column-nodes", "NODES"), lambda row: fold_hosts(row.job.hosts), 40, is_right=False),
    TopColumn("ranks", Text("top.column-ranks", "RANKS"), lambda row: str(row.job.world_size or "-"), 50),
    *(
        TopColumn(row.column.key, row.column.title, _of_job(name, row), row.column.job_weight)
        for name, row in metrics_of(Progress).items()
        if row.column is not None and row.column.job_weight
    ),
    TopColumn("left", Text("top.column-left", "LEFT"), _left, 88),
    TopColumn("slowest", Text("top.column-slowest", "SLOWEST"), _slowest, 85, is_right=False),
    TopColumn("note", Text("top.column-note", "NOTE"), _reason, 84, is_right=False),
)


def _with_bar(column: TopColumn) -> TopColumn:
    def cell(line: Line) -> str:
        text = column.cell(line)
        return f"{bar(float(text[:-1]))} {text}" if text[:-1].isdigit() else text

    return replace(column, cell=cell) if column.key == UTILISATION else column


BAR_COLUMNS = tuple(map(_with_bar, ROW_COLUMNS))


@dataclass(frozen=True)
class TableLayout:
    """A table ready to be drawn: the shown columns, their widths, and the sanitised texts of the cells."""

    columns: tuple[TopColumn, ...]
    sizes: tuple[int, ...]
    titles: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]

    def text(self, index: int) -> str:
        return self._join(self.cells[index])

    @property
    def header(self) -> str:
        return self._join(self.titles)

    def numbers(self, index: int, key: str) -> list[tuple[int, int, float]]:
        """Return where in the text of a line the numbers of a column are, with their bars: (start, end, number)."""
        for at, column in enumerate(self.columns):
            if column.key == key:
                start = sum(self.sizes[:at]) + GAP * at
                cell = lay(self.cells[index][at], self.sizes[at], is_right=column.is_right)
                return [(start + m.start(), start + m.end(), float(m[1])) for m in NUMBER.finditer(cell)]
        return []

    def _join(self, texts: Sequence[str]) -> str:
        laid = [
            lay(text, size, is_right=column.is_right) for text, size, column in zip(texts, self.sizes, self.columns)
        ]
        return (" " * GAP).join(laid).rstrip()


def lay_out(
    columns: Sequence[TopColumn], lines: Sequence[Any], width: int | None, *, is_wide: bool = False
) -> TableLayout:
    """Lay out the columns that fit into `width`, None: those of at least USUAL_WEIGHT.

    Columns without a value in any row are omitted first, and device columns without devices.
    """
    cells = {column.key: [clean(column.cell(line)) for line in lines] for column in columns}
    has_devices = any(_has_device(line) for line in lines)
    shown = [column for column in columns if is_wide or (column.weight and (has_devices or not column.of_device))]
    sizes = {column.key: max([width_of(str(column.title)), *map(width_of, cells[column.key])]) for column in shown}
    if not is_wide:
        filled = {column.key: any(text not in ("", "-") for text in cells[column.key]) for column in shown}
        shown = [
            column
            for column in shown
            if (column.key != "note" or filled["note"]) and (width is not None or column.weight >= USUAL_WEIGHT)
        ]
        if width is not None:
            shown = _fitting(shown, sizes, filled, width)
    return TableLayout(
        tuple(shown),
        tuple(sizes[column.key] for column in shown),
        tuple(str(column.title) for column in shown),
        tuple(zip(*(cells[column.key] for column in shown))),
    )


def _has_device(line: Any) -> bool:
    if isinstance(line, HostLine):
        return any(row.device is not None for row in line.rows)
    return isinstance(line, IdleHosts) or getattr(line, "device", None) is not None


def _fitting(
    columns: Sequence[TopColumn], sizes: Mapping[str, int], filled: Mapping[str, bool], width: int
) -> list[TopColumn]:
    left = list(columns)
    of_note = NOTE_WIDTH if width >= NARROW else NOTE_WIDTH_NARROW

    def room() -> int:
        return sum(min(sizes[column.key], of_note) if column.key == "note" else sizes[column.key] for column in left)

    def value(column: TopColumn) -> int:
        return column.weight if column.weight > 95 or filled[column.key] else column.weight - 100

    while len(left) > 1 and room() + GAP * (len(left) - 1) > width:
        left.remove(min(left, key=value))
    return left


def clean(text: str) -> str:
    return text if text.isascii() and text.isprintable() else sanitise_line(text)


def lay(text: str, width: int, *, is_right: bool) -> str:
    """Pad the text to `width` terminal cells; Chinese characters use two."""
    space = " " * (width - width_of(text))
    return space + text if is_right else text + space
