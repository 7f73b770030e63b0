"""The columns of `top`: what stands in a cell, how it is laid, and which columns go first when there is little room."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union

from ascendrun.cli.output import describe_seconds, width_of
from ascendrun.cli.sanitise import sanitise_line
from ascendrun.cli.top.figures import beside, figure, gib, load, megabytes, memory, percent, seconds, short, size
from ascendrun.cli.top.words import title, word
from ascendrun.core.samples import DeviceSample
from ascendrun.health.top.rows import HostLine, IdleHosts
from ascendrun.health.top.view import JobRow, TopRow

GAP = 2
NARROW, NOTE_WIDTH, NOTE_WIDTH_NARROW = 100, 24, 8
"""What a note needs, it being the last column that may be cut; where there are few columns, less."""
USUAL_WEIGHT = 25
"""In a pipe, where there is no width, columns of less weight stand only in the wide form."""
Line = Union[TopRow, IdleHosts]


@dataclass(frozen=True)
class TopColumn:
    """`cell`: the text for one row in a language, "-" for what is not known. `weight`: the lowest go first when the
    terminal is narrow; 0: only in the wide form. `of_device`: says nothing where there are no devices at all."""

    key: str
    cell: Callable[[Any, str], str]
    weight: int
    is_right: bool = True
    of_device: bool = False


def _range(pair: tuple[float, float] | None, unit: str) -> str:
    if pair is None:
        return "-"
    low, high = f"{pair[0]:.0f}", f"{pair[1]:.0f}"
    return f"{low}{unit}" if low == high else f"{low}-{high}{unit}"


def _span(numbers: Sequence[int]) -> str:
    from ascendrun.core.logs.log_lines import fold_ranks

    return fold_ranks(numbers)


def host_cell(line: Line, _lang: str) -> str:
    if isinstance(line, IdleHosts):
        from ascendrun.core.names import fold_names

        return fold_names(line.hosts)
    return line.host


def _device(line: Line, _lang: str) -> str:
    if isinstance(line, IdleHosts):
        return _span(line.devices)
    return "-" if line.device is None else str(line.device)


def _util(line: Line, _lang: str) -> str:
    return _range(line.utilisation, "%") if isinstance(line, IdleHosts) else percent(line.figures.utilisation)


def _mem(line: Line, _lang: str) -> str:
    if isinstance(line, IdleHosts):
        return gib(None if line.memory_used_bytes is None else line.memory_used_bytes[1], line.memory_total_bytes)
    return gib(line.figures.memory_used_bytes, line.figures.memory_total_bytes)


def _power(line: Line, _lang: str) -> str:
    return _range(line.power_w, "W") if isinstance(line, IdleHosts) else figure(line.figures.power_w, "W")


def _temp(line: Line, _lang: str) -> str:
    return _range(line.temperature_c, "C") if isinstance(line, IdleHosts) else figure(line.figures.temperature_c, "C")


def _health(line: Line, _lang: str) -> str:
    return "OK" if isinstance(line, IdleHosts) else line.figures.health or "-"


def _link(line: Line, lang: str) -> str:
    link_up = line.link_up if isinstance(line, IdleHosts) else line.figures.link_up
    if link_up is None:
        return "-"
    return word(lang, "link-up" if link_up else "link-down")


def _of_row(show: Callable[[TopRow], str]) -> Callable[[Line, str], str]:
    """A cell that a line of folded idle hosts has nothing for."""
    return lambda line, _lang: "" if isinstance(line, IdleHosts) else show(line)


def note(line: Line, lang: str) -> str:
    """What is not well about a row, in a few words; what has a column of its own is not said again."""
    is_bare = isinstance(line, TopRow) and line.device is None and line.rank is None
    said = [word(lang, "idle")] if isinstance(line, IdleHosts) or is_bare else []
    for problem in line.problems:
        if problem == "stale":
            said.append(word(lang, "problem-stale", age=describe_seconds(line.age_s)))
        elif isinstance(line, IdleHosts):
            continue
        elif problem == "slow":
            sign = f" ({word(lang, f'sign-{line.slow_sign}')})" if line.slow_sign in SIGNS else ""
            said.append(word(lang, "problem-slow") + sign)
        elif problem == "foreign":
            pids = line.foreign_pids or ()
            said.append(word(lang, "problem-foreign", pids=",".join(map(str, pids[:3])) + ("…" if pids[3:] else "")))
        elif problem == "silent":
            said.append(word(lang, "problem-silent"))
    return ", ".join(said)


SIGNS = ("frequency", "temperature", "link", "data", "cpu", "shared", "health")


def _age(line: Line, _lang: str) -> str:
    if isinstance(line, IdleHosts) or line.age_s is not None:
        return describe_seconds(line.age_s)
    return describe_seconds(line.rank_age_s if line.rank_age_s is not None else line.metrics_age_s)


def _of_one(share: float | None) -> str:
    """A share of 1 in percent."""
    return percent(None if share is None else share * 100)


def _traffic(row: TopRow) -> str:
    sent, received = row.figures.link_tx_bytes_s, row.figures.link_rx_bytes_s
    return "-" if sent is None and received is None else f"{megabytes(sent)}/{megabytes(received)}"


ROW_COLUMNS: tuple[TopColumn, ...] = (
    TopColumn("host", host_cell, 99, is_right=False),
    TopColumn("device", _device, 98, of_device=True),
    TopColumn("chip", _of_row(lambda row: row.figures.name or "-"), 0, is_right=False, of_device=True),
    TopColumn("util", _util, 97, of_device=True),
    TopColumn("mem", _mem, 80, of_device=True),
    TopColumn("power", _power, 55, of_device=True),
    TopColumn("temp", _temp, 66, of_device=True),
    TopColumn("freq", _of_row(lambda row: figure(row.figures.frequency_mhz)), 20, of_device=True),
    TopColumn("health", _health, 75, is_right=False, of_device=True),
    TopColumn("link", _link, 50, is_right=False, of_device=True),
    TopColumn("job", _of_row(lambda row: row.job or "-"), 85, is_right=False),
    TopColumn("name", _of_row(lambda row: row.job_name or "-"), 15, is_right=False),
    TopColumn("rank", _of_row(lambda row: "-" if row.rank is None else str(row.rank)), 90),
    TopColumn("step", _of_row(lambda row: "-" if row.progress.step is None else str(row.progress.step)), 58),
    TopColumn("step_s", _of_row(lambda row: seconds(row.progress.step_s)), 64),
    TopColumn("others", _of_row(lambda row: beside(row.slower_by)), 70),
    TopColumn("loss", _of_row(lambda row: short(row.progress.loss)), 30),
    TopColumn("tokens", _of_row(lambda row: short(row.progress.tokens_per_s)), 25),
    TopColumn("mfu", _of_row(lambda row: _of_one(row.progress.mfu)), 28),
    TopColumn("cpu", _of_row(lambda row: percent(row.cpu)), 35),
    TopColumn("rss", _of_row(lambda row: memory(row.rss_bytes)), 32),
    TopColumn("traffic", _of_row(_traffic), 0, of_device=True),
    TopColumn("pid", _of_row(lambda row: "-" if row.pid is None else str(row.pid)), 10),
    TopColumn("age", _age, 40),
    TopColumn("note", note, 72, is_right=False),
)


# ---------------------------------------------------------------- one line a host


def _each(line: HostLine, show: Callable[[DeviceSample], float | None]) -> list[float | None]:
    """One figure for each device, however many ranks share it."""
    return [show(row.figures) for row in {row.device: row for row in line.rows}.values()]


def _utils(line: HostLine, _lang: str) -> str:
    if not _has_device(line):
        return "-"
    return " ".join("  -" if one is None else f"{one:3.0f}" for one in _each(line, lambda one: one.utilisation))


def _most(line: HostLine, show: Callable[[DeviceSample], float | None], unit: str) -> str:
    told = [one for one in _each(line, show) if one is not None]
    return f"{max(told):.0f}{unit}" if told else "-"


def _sum_power(line: HostLine, _lang: str) -> str:
    told = [one for one in _each(line, lambda one: one.power_w) if one is not None]
    return f"{sum(told):.0f}W" if told else "-"


def _memory_of_host(line: HostLine, _lang: str) -> str:
    used = [one for one in _each(line, lambda one: one.memory_used_bytes) if one is not None]
    total = [one for one in _each(line, lambda one: one.memory_total_bytes) if one is not None]
    return gib(sum(used) if used else None, sum(total) if total else None)


def _worst_health(line: HostLine, _lang: str) -> str:
    told = {row.figures.health for row in line.rows if row.figures.health is not None}
    return ",".join(sorted(told - {"OK"})) or ("OK" if told else "-")


def _link_of_host(line: HostLine, lang: str) -> str:
    down = [row.device for row in line.rows if row.figures.link_up is False and row.device is not None]
    if down:
        return f"{word(lang, 'link-down')} {_span(down)}"
    return word(lang, "link-up") if any(row.figures.link_up for row in line.rows) else "-"


def _jobs_of_host(line: HostLine, _lang: str) -> str:
    return ",".join(dict.fromkeys(row.job for row in line.rows if row.job)) or "-"


def _ranks_of_host(line: HostLine, _lang: str) -> str:
    return _span([row.rank for row in line.rows if row.rank is not None]) or "-"


def _slowest_of_host(line: HostLine, _lang: str) -> str:
    told = [row.slower_by for row in line.rows if row.slower_by is not None]
    return beside(max(told)) if told else "-"


def _notes_of_host(line: HostLine, lang: str) -> str:
    return ", ".join(dict.fromkeys(text for text in (note(row, lang) for row in line.rows) if text))


def _host_memory(line: HostLine, _lang: str) -> str:
    return gib(line.itself.figures.memory_used_bytes, line.itself.figures.memory_total_bytes)


HOST_COLUMNS: tuple[TopColumn, ...] = (
    TopColumn("host", lambda line, lang: line.host, 99, is_right=False),
    TopColumn("utils", _utils, 97, is_right=False, of_device=True),
    TopColumn("mem", _memory_of_host, 60, of_device=True),
    TopColumn("power", _sum_power, 50, of_device=True),
    TopColumn("hottest", lambda line, lang: _most(line, lambda one: one.temperature_c, "C"), 70, of_device=True),
    TopColumn("health", _worst_health, 80, is_right=False, of_device=True),
    TopColumn("link", _link_of_host, 55, is_right=False, of_device=True),
    TopColumn("job", _jobs_of_host, 85, is_right=False),
    TopColumn("ranks", _ranks_of_host, 65, is_right=False),
    TopColumn("others", _slowest_of_host, 75),
    TopColumn("cpu", lambda line, lang: percent(line.itself.figures.cpu), 58),
    TopColumn("load", lambda line, lang: load(line.itself.figures.load1), 30),
    TopColumn("rss", _host_memory, 57),
    TopColumn("disk", lambda line, lang: size(line.itself.figures.disk_free_bytes), 28),
    TopColumn("note", _notes_of_host, 72, is_right=False),
)


# ---------------------------------------------------------------- one line a job


def _step_of(row: JobRow, _lang: str) -> str:
    step, total = row.progress.step, row.progress.total_steps
    if step is None:
        return "-"
    return str(step) if total is None else f"{step}/{total}"


def _slowest(row: JobRow, lang: str) -> str:
    if row.slowest is None:
        return "-"
    return f"{word(lang, 'rank', n=row.slowest)} {beside(row.slower_by)}"


def _nodes(row: JobRow, _lang: str) -> str:
    from ascendrun.core.names import fold_names

    return fold_names(row.job.hosts)


JOB_COLUMNS: tuple[TopColumn, ...] = (
    TopColumn("job", lambda row, lang: row.job.id, 99, is_right=False),
    TopColumn("name", lambda row, lang: row.job.name, 80, is_right=False),
    TopColumn("state", lambda row, lang: row.job.state, 98, is_right=False),
    TopColumn("nodes", _nodes, 40, is_right=False),
    TopColumn("ranks", lambda row, lang: str(row.job.world_size or "-"), 50),
    TopColumn("step", _step_of, 90),
    TopColumn("loss", lambda row, lang: short(row.progress.loss), 70),
    TopColumn("step_s", lambda row, lang: seconds(row.progress.step_s), 75),
    TopColumn("tokens", lambda row, lang: short(row.progress.tokens_per_s), 65),
    TopColumn("mfu", lambda row, lang: _of_one(row.progress.mfu), 60),
    TopColumn("slowest", _slowest, 85, is_right=False),
    TopColumn("note", lambda row, lang: "" if row.job.state == "RUNNING" else row.job.reason, 84, is_right=False),
)


@dataclass(frozen=True)
class Laid:
    """A table ready to be drawn: the columns that are shown, their widths, and the cells' texts, made harmless."""

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
        laid = [lay(text, size, is_right=one.is_right) for text, size, one in zip(texts, self.sizes, self.columns)]
        return (" " * GAP).join(laid).rstrip()


def lay_out(
    columns: Sequence[TopColumn], lines: Sequence[Any], lang: str, width: int | None, *, is_wide: bool = False
) -> Laid:
    """With the columns that fit into `width` (None: all of the usual weight), in their order. What no row can tell
    goes before all else; columns of devices are left out where there is none."""
    cells = {one.key: [clean(one.cell(line, lang)) for line in lines] for one in columns}
    has_devices = any(_has_device(line) for line in lines)
    shown = [one for one in columns if is_wide or (one.weight and (has_devices or not one.of_device))]
    sizes = {one.key: max([width_of(title(lang, one.key)), *map(width_of, cells[one.key])]) for one in shown}
    if not is_wide:
        says = {one.key: any(text not in ("", "-") for text in cells[one.key]) for one in shown}
        shown = [
            one
            for one in shown
            if (one.key != "note" or says["note"]) and (width is not None or one.weight >= USUAL_WEIGHT)
        ]
        if width is not None:
            shown = _fitting(shown, sizes, says, width)
    return Laid(
        tuple(shown),
        tuple(sizes[one.key] for one in shown),
        tuple(title(lang, one.key) for one in shown),
        tuple(zip(*(cells[one.key] for one in shown))),
    )


def _has_device(line: Any) -> bool:
    if isinstance(line, HostLine):
        return any(row.device is not None for row in line.rows)
    return isinstance(line, IdleHosts) or getattr(line, "device", None) is not None


def _fitting(
    columns: Sequence[TopColumn], sizes: Mapping[str, int], says: Mapping[str, bool], width: int
) -> list[TopColumn]:
    left = list(columns)
    of_note = NOTE_WIDTH if width >= NARROW else NOTE_WIDTH_NARROW

    def room() -> int:
        return sum(min(sizes[one.key], of_note) if one.key == "note" else sizes[one.key] for one in left)

    def value(one: TopColumn) -> int:
        return one.weight if one.weight > 95 or says[one.key] else one.weight - 100

    while len(left) > 1 and room() + GAP * (len(left) - 1) > width:
        left.remove(min(left, key=value))
    return left


def clean(text: str) -> str:
    return text if text.isascii() and text.isprintable() else sanitise_line(text)


def lay(text: str, width: int, *, is_right: bool) -> str:
    """The text in `width` cells, Chinese counted as two each."""
    space = " " * (width - width_of(text))
    return space + text if is_right else text + space
