"""Columns of `top`: their cells, their layout, and the order of omission in a narrow terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union

from ascendrun.cli.output import describe_seconds, width_of
from ascendrun.cli.sanitise import sanitise_line
from ascendrun.cli.top.cells import GIB, gib, megabytes, memory, number, percent, relative, seconds, short
from ascendrun.core.samples import DeviceSample
from ascendrun.health.top.rows import HostLine, IdleHosts
from ascendrun.health.top.view import JobRow, TopRow
from ascendrun.text import Text

GAP = 2
NARROW, NOTE_WIDTH, NOTE_WIDTH_NARROW = 100, 24, 8
"""Minimum width of the note, the last truncated column; less if there are few columns."""
USUAL_WEIGHT = 25
"""In a pipe, without a known width, columns of less weight are shown only with -o wide."""
Line = Union[TopRow, IdleHosts]
LINK_UP, LINK_DOWN = Text("top.link-up", "up"), Text("top.link-down", "DOWN")
CAUSES: Mapping[str, Text] = {
    "frequency": Text("top.cause-frequency", "low clock"),
    "temperature": Text("top.cause-temperature", "hot"),
    "link": Text("top.cause-link", "link"),
    "data": Text("top.cause-data", "waiting for data"),
    "cpu": Text("top.cause-cpu", "CPU shortage"),
    "shared": Text("top.cause-shared", "shared device"),
    "health": Text("top.cause-health", "unhealthy device"),
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


def _range(pair: tuple[float, float] | None, unit: str) -> str:
    if pair is None:
        return "-"
    low, high = f"{pair[0]:.0f}", f"{pair[1]:.0f}"
    return f"{low}{unit}" if low == high else f"{low}-{high}{unit}"


def _span(numbers: Sequence[int]) -> str:
    from ascendrun.text.format import fold_numbers

    return fold_numbers(numbers)


def host_cell(line: Line) -> str:
    if isinstance(line, IdleHosts):
        from ascendrun.text.format import fold_hosts

        return fold_hosts(line.hosts)
    return line.host


def _device(line: Line) -> str:
    if isinstance(line, IdleHosts):
        return _span(line.devices)
    return "-" if line.device is None else str(line.device)


def _util(line: Line) -> str:
    return _range(line.utilisation, "%") if isinstance(line, IdleHosts) else percent(line.metrics.utilisation)


def _mem(line: Line) -> str:
    if isinstance(line, IdleHosts):
        return gib(None if line.memory_used_bytes is None else line.memory_used_bytes[1], line.memory_total_bytes)
    return gib(line.metrics.memory_used_bytes, line.metrics.memory_total_bytes)


def _power(line: Line) -> str:
    return _range(line.power_w, "W") if isinstance(line, IdleHosts) else number(line.metrics.power_w, "W")


def _temp(line: Line) -> str:
    return _range(line.temperature_c, "C") if isinstance(line, IdleHosts) else number(line.metrics.temperature_c, "C")


def _health(line: Line) -> str:
    return "OK" if isinstance(line, IdleHosts) else line.metrics.health or "-"


def _link(line: Line) -> str:
    link_up = line.link_up if isinstance(line, IdleHosts) else line.metrics.link_up
    if link_up is None:
        return "-"
    return str(LINK_UP if link_up else LINK_DOWN)


def _of_row(show: Callable[[TopRow], str]) -> Callable[[Line], str]:
    """Return a cell that is empty for folded idle hosts."""
    return lambda line: "" if isinstance(line, IdleHosts) else show(line)


_chip = _of_row(lambda row: row.metrics.name or "-")
_frequency = _of_row(lambda row: number(row.metrics.frequency_mhz))


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
    return ", ".join(map(str, found))


def external(row: TopRow, *, most: int | None = None) -> Text:
    """Return the processes on the device that belong to no rank; `most`: maximum number."""
    pids = row.external_pids or ()
    shown = ",".join(map(str, pids[:most])) + ("…" if most is not None and pids[most:] else "")
    return Text("top.problem-external", "external process {pids}", pids=shown)


def _age(line: Line) -> str:
    if isinstance(line, IdleHosts) or line.age_s is not None:
        return describe_seconds(line.age_s)
    return describe_seconds(line.rank_age_s if line.rank_age_s is not None else line.metrics_age_s)


def _ratio(value: float | None) -> str:
    return percent(None if value is None else value * 100)


def _traffic(row: TopRow) -> str:
    sent, received = row.metrics.link_tx_bytes_s, row.metrics.link_rx_bytes_s
    return "-" if sent is None and received is None else f"{megabytes(sent)}/{megabytes(received)}"


ROW_COLUMNS: tuple[TopColumn, ...] = (
    TopColumn("host", Text("top.column-host", "HOST"), host_cell, 99, is_right=False),
    TopColumn("device", Text("top.column-device", "DEV"), _device, 98, of_device=True),
    TopColumn("chip", Text("top.column-chip", "CHIP"), _chip, 0, is_right=False, of_device=True),
    TopColumn("util", Text("top.column-util", "UTIL"), _util, 97, of_device=True),
    TopColumn("mem", Text("top.column-mem", "MEM GiB"), _mem, 80, of_device=True),
    TopColumn("power", Text("top.column-power", "POWER"), _power, 55, of_device=True),
    TopColumn("temp", Text("top.column-temp", "TEMP"), _temp, 66, of_device=True),
    TopColumn("freq", Text("top.column-freq", "MHz"), _frequency, 20, of_device=True),
    TopColumn("health", Text("top.column-health", "HEALTH"), _health, 75, is_right=False, of_device=True),
    TopColumn("link", Text("top.column-link", "LINK"), _link, 50, is_right=False, of_device=True),
    TopColumn("job", Text("top.column-job", "JOB"), _of_row(lambda row: row.job or "-"), 85, is_right=False),
    TopColumn("name", Text("top.column-name", "NAME"), _of_row(lambda row: row.job_name or "-"), 15, is_right=False),
    TopColumn("rank", "RANK", _of_row(lambda row: number(row.rank)), 90),
    TopColumn("step", Text("top.column-step", "STEP"), _of_row(lambda row: number(row.progress.step)), 58),
    TopColumn("step_s", Text("top.column-step-s", "S/STEP"), _of_row(lambda row: seconds(row.progress.step_s)), 64),
    TopColumn("relative", Text("top.column-relative", "REL"), _of_row(lambda row: relative(row.slower_by)), 70),
    TopColumn("loss", "LOSS", _of_row(lambda row: short(row.progress.loss)), 30),
    TopColumn("tokens", "TOK/S", _of_row(lambda row: short(row.progress.tokens_per_s)), 25),
    TopColumn("mfu", "MFU", _of_row(lambda row: _ratio(row.progress.mfu)), 28),
    TopColumn("cpu", "CPU", _of_row(lambda row: percent(row.cpu)), 35),
    TopColumn("rss", Text("top.column-rss", "RSS"), _of_row(lambda row: memory(row.rss_bytes)), 32),
    TopColumn("traffic", Text("top.column-traffic", "TX/RX MB/s"), _of_row(_traffic), 0, of_device=True),
    TopColumn("pid", "PID", _of_row(lambda row: number(row.pid)), 10),
    TopColumn("age", Text("top.column-age", "AGE"), _age, 40),
    TopColumn("note", Text("top.column-note", "NOTE"), note, 72, is_right=False),
)


# ---------------------------------------------------------------- one line per host


def _each(line: HostLine, show: Callable[[DeviceSample], float | None]) -> list[float]:
    """Return the known values, one per device, however many ranks share it."""
    return [value for value in _each_or_none(line, show) if value is not None]


def _each_or_none(line: HostLine, show: Callable[[DeviceSample], float | None]) -> list[float | None]:
    return [show(row.metrics) for row in {row.device: row for row in line.rows}.values()]


def _utils(line: HostLine) -> str:
    if not _has_device(line):
        return "-"
    values = _each_or_none(line, lambda sample: sample.utilisation)
    return " ".join("  -" if value is None else f"{value:3.0f}" for value in values)


def _maximum_temperature(line: HostLine) -> str:
    return number(max(_each(line, lambda sample: sample.temperature_c), default=None), "C")


def _sum_power(line: HostLine) -> str:
    return number(_sum(_each(line, lambda sample: sample.power_w)), "W")


def _sum(values: Sequence[float]) -> float | None:
    return sum(values) if values else None


def _memory_of_host(line: HostLine) -> str:
    used = _each(line, lambda sample: sample.memory_used_bytes)
    return gib(_sum(used), _sum(_each(line, lambda sample: sample.memory_total_bytes)))


def _worst_health(line: HostLine) -> str:
    known = {row.metrics.health for row in line.rows if row.metrics.health is not None}
    return ",".join(sorted(known - {"OK"})) or ("OK" if known else "-")


def _link_of_host(line: HostLine) -> str:
    down = [row.device for row in line.rows if row.metrics.link_up is False and row.device is not None]
    if down:
        return f"{LINK_DOWN} {_span(down)}"
    return str(LINK_UP) if any(row.metrics.link_up for row in line.rows) else "-"


def _jobs_of_host(line: HostLine) -> str:
    return ",".join(dict.fromkeys(row.job for row in line.rows if row.job)) or "-"


def _ranks_of_host(line: HostLine) -> str:
    return _span([row.rank for row in line.rows if row.rank is not None]) or "-"


def _slowest_of_host(line: HostLine) -> str:
    known = [row.slower_by for row in line.rows if row.slower_by is not None]
    return relative(max(known, default=None))


def _notes_of_host(line: HostLine) -> str:
    return ", ".join(dict.fromkeys(text for text in (note(row) for row in line.rows) if text))


def _disk_of_host(line: HostLine) -> str:
    return number(line.itself.metrics.disk_free_bytes, "G", scale=GIB)


def _host_memory(line: HostLine) -> str:
    return gib(line.itself.metrics.memory_used_bytes, line.itself.metrics.memory_total_bytes)


HOST_COLUMNS: tuple[TopColumn, ...] = (
    TopColumn("host", Text("top.column-host", "HOST"), lambda line: line.host, 99, is_right=False),
    TopColumn("utils", Text("top.column-utils", "UTIL PER DEVICE"), _utils, 97, is_right=False, of_device=True),
    TopColumn("mem", Text("top.column-mem", "MEM GiB"), _memory_of_host, 60, of_device=True),
    TopColumn("power", Text("top.column-power", "POWER"), _sum_power, 50, of_device=True),
    TopColumn("hottest", Text("top.column-hottest", "TEMP"), _maximum_temperature, 70, of_device=True),
    TopColumn("health", Text("top.column-health", "HEALTH"), _worst_health, 80, is_right=False, of_device=True),
    TopColumn("link", Text("top.column-link", "LINK"), _link_of_host, 55, is_right=False, of_device=True),
    TopColumn("job", Text("top.column-job", "JOB"), _jobs_of_host, 85, is_right=False),
    TopColumn("ranks", Text("top.column-ranks", "RANKS"), _ranks_of_host, 65, is_right=False),
    TopColumn("relative", Text("top.column-relative", "REL"), _slowest_of_host, 75),
    TopColumn("cpu", "CPU", lambda line: percent(line.itself.metrics.cpu), 58),
    TopColumn("load", Text("top.column-load", "LOAD"), lambda line: number(line.itself.metrics.load1, digits=1), 30),
    TopColumn("rss", Text("top.column-rss", "RSS"), _host_memory, 57),
    TopColumn("disk", Text("top.column-disk", "DISK"), _disk_of_host, 28),
    TopColumn("note", Text("top.column-note", "NOTE"), _notes_of_host, 72, is_right=False),
)


# ---------------------------------------------------------------- one line per job


def _step_of(row: JobRow) -> str:
    step, total = row.progress.step, row.progress.total_steps
    if step is None:
        return "-"
    return str(step) if total is None else f"{step}/{total}"


def _slowest(row: JobRow) -> str:
    if row.slowest is None:
        return "-"
    return f"rank {row.slowest} {relative(row.slower_by)}"


def _reason(row: JobRow) -> str:
    is_silent = any(state in ("UNKNOWN", "UNREACHABLE") for state in row.job.liveness.values())
    if is_silent or row.job.state != "RUNNING":
        return str(row.job.reason)
    return "" if row.progress.phase is None else str(Text("top.phase", "phase {name}", name=row.progress.phase))


def _nodes(row: JobRow) -> str:
    from ascendrun.text.format import fold_hosts

    return fold_hosts(row.job.hosts)


JOB_COLUMNS: tuple[TopColumn, ...] = (
    TopColumn("job", Text("top.column-job", "JOB"), lambda row: row.job.id, 99, is_right=False),
    TopColumn("name", Text("top.column-name", "NAME"), lambda row: row.job.name, 80, is_right=False),
    TopColumn("state", Text("top.column-state", "STATE"), lambda row: row.job.state, 98, is_right=False),
    TopColumn("nodes", Text("top.column-nodes", "NODES"), _nodes, 40, is_right=False),
    TopColumn("ranks", Text("top.column-ranks", "RANKS"), lambda row: str(row.job.world_size or "-"), 50),
    TopColumn("step", Text("top.column-step", "STEP"), _step_of, 90),
    TopColumn("loss", "LOSS", lambda row: short(row.progress.loss), 70),
    TopColumn("step_s", Text("top.column-step-s", "S/STEP"), lambda row: seconds(row.progress.step_s), 75),
    TopColumn("tokens", "TOK/S", lambda row: short(row.progress.tokens_per_s), 65),
    TopColumn("mfu", "MFU", lambda row: _ratio(row.progress.mfu), 60),
    TopColumn("slowest", Text("top.column-slowest", "SLOWEST"), _slowest, 85, is_right=False),
    TopColumn("note", Text("top.column-note", "NOTE"), _reason, 84, is_right=False),
)


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
