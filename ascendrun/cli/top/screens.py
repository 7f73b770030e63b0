"""Widgets of `top`: the table of rows; pages: help, output of a rank, events of a job, all metrics of a device."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.segment import Segment
from rich.style import Style
from rich.text import Text as RichText
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.geometry import Region, Size
from textual.screen import Screen
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Footer, Static
from textual.worker import get_current_worker

from ascendrun.cli.outcome import first_failure_line
from ascendrun.cli.output import cut, describe_seconds, describe_time, sanitise, sanitise_line, width_of
from ascendrun.cli.top.cells import LINK_DOWN, LINK_UP, in_buckets, number, relative, sparkline
from ascendrun.cli.top.columns import UTILISATION, TableLayout, describe_metric, external, lay, note
from ascendrun.cli.top.text import attempt
from ascendrun.cluster import Cluster, LogView
from ascendrun.core.logs.log_lines import label_processes
from ascendrun.core.measurement import metrics_of
from ascendrun.core.samples import DeviceSample, HostSample, RankSample
from ascendrun.health.top.view import HostLine, HostRow, IdleHosts, Progress, TopRow, TopView
from ascendrun.text import Text

LAST_LINES = 500
INTERVAL_S = 2.0
BACK = Text("top.key-back", "Back")


STYLES = {"red": Style(color="red", bold=True), "yellow": Style(color="yellow"), "dim": Style(dim=True), None: Style()}
CURSOR = Style(reverse=True)
SCALE = ("blue", "cyan", "green")
"""Colours of utilisation from low to high, which are readable on light and on dark terminals."""


def plain(text: str) -> RichText:
    """Return text without markup and links."""
    return RichText(text, no_wrap=True)


def hidden_keys(actions: Mapping[str, str]) -> list[BindingType]:
    """Return bindings that the footer does not show, by key."""
    return [Binding(key, action, show=False) for key, action in actions.items()]


def key_of(line: Any) -> tuple[object, ...]:
    if isinstance(line, IdleHosts):
        return ("idle", line.samples[0].name, line.devices)
    if isinstance(line, HostLine):
        return ("host", line.host)
    return (line.host, line.device, line.job, line.rank) if isinstance(line, TopRow) else ("job", line.id)


class RowsTable(ScrollView, can_focus=True):
    BINDINGS = hidden_keys(
        {
            "j,down": "move(1)",
            "k,up": "move(-1)",
            "g,home": "move(-1000000)",
            "G,end": "move(1000000)",
            "pagedown,ctrl+d,space": "page(1)",
            "pageup,ctrl+u": "page(-1)",
        }
    )

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self.lines: Sequence[Any] = ()
        self.cursor = 0
        self._laid: TableLayout | None = None
        self._row_styles: Sequence[str | None] = ()
        self._empty = ""

    @property
    def selected(self) -> Any:
        """The line under the cursor; None: the table is empty."""
        return self.lines[self.cursor] if self.cursor < len(self.lines) else None

    def show(self, laid: TableLayout, lines: Sequence[Any], styles: Sequence[str | None], *, empty: str) -> None:
        before = self.selected
        keys = [key_of(line) for line in lines]
        self.lines, self._laid, self._row_styles, self._empty = lines, laid, styles, empty
        if before is not None and key_of(before) in keys:
            self.cursor = keys.index(key_of(before))
        self.cursor = max(0, min(self.cursor, len(lines) - 1))
        self.virtual_size = Size(1, len(lines))
        self._scroll_to_cursor()
        self.refresh()

    def reset(self) -> None:
        """Move the cursor to the first row."""
        self.lines, self.cursor = (), 0

    def render_line(self, y: int) -> Strip:
        width = self.scrollable_content_region.width
        index = y + self.scroll_offset.y
        if self._laid is None or index >= len(self.lines):
            text = self._empty if self._laid is not None and index == 0 else ""
            return self._strip(text, Style(dim=True), width)
        name, strip = self._row_styles[index], self._laid.text(index)
        if index == self.cursor or name is not None:
            return self._strip(strip, STYLES[name] + (CURSOR if index == self.cursor else Style()), width)
        found = self._strip(strip, Style(), width)
        for start, end, percent in self._laid.numbers(index, UTILISATION):
            scale = self.rich_style + Style(color=SCALE[min(len(SCALE) - 1, int(percent * len(SCALE) / 100))])
            middle = Strip(Segment(segment.text, scale) for segment in found.crop(start, end))
            found = Strip.join([found.crop(0, start), middle, found.crop(end)])
        return found

    def _strip(self, text: str, style: Style, width: int) -> Strip:
        return Strip([Segment(cut(text, width), self.rich_style + style)]).adjust_cell_length(
            width, self.rich_style + style
        )

    def action_move(self, by: int) -> None:
        self.cursor = max(0, min(self.cursor + by, len(self.lines) - 1))
        self._scroll_to_cursor()
        self.refresh()

    def action_page(self, by: int) -> None:
        self.action_move(by * max(1, self.size.height - 1))

    def on_click(self, event: Any) -> None:
        index = event.y + self.scroll_offset.y
        if index < len(self.lines):
            self.cursor = index
            self.refresh()

    def _scroll_to_cursor(self) -> None:
        self.scroll_to_region(Region(0, self.cursor, 1, 1), animate=False, force=True)


class TextScreen(Screen[None]):
    """A title and lines. Escape, q and backspace close it."""

    DEFAULT_CSS = """
    TextScreen #title { height: 1; text-style: bold reverse; padding: 0 1; }
    TextScreen #header { height: 1; text-style: bold reverse; padding: 0 1; }
    TextScreen #rows { height: 1fr; padding: 0 0 0 1; overflow-x: hidden; scrollbar-size-vertical: 1; }
    TextScreen VerticalScroll { height: 1fr; padding: 0 1; scrollbar-size-vertical: 1; }
    """
    BODY = "VerticalScroll"
    BINDINGS = hidden_keys(
        {"j": "scroll(1)", "k": "scroll(-1)", "g": "ends(0)", "G": "ends(1)", "backspace": "back", "q": "back"}
    )

    def __init__(self, title: str, lines: Sequence[str]) -> None:
        super().__init__()
        self._title_text = title
        self._lines = list(lines)
        self._bindings.bind("escape", "back", str(BACK))

    def compose(self) -> ComposeResult:
        yield Static(plain(sanitise_line(self._title_text)), id="title", markup=False)
        with VerticalScroll():
            yield Static(self._text(), id="text", markup=False)
        yield Footer(compact=True)

    def on_mount(self) -> None:
        self.query_one(self.BODY).focus()

    def _text(self) -> str:
        return "\n".join(sanitise(line) for line in self._lines)

    @property
    def text(self) -> str:
        return self._text()

    def set_lines(self, lines: Sequence[str]) -> None:
        if list(lines) != self._lines:
            self._lines = list(lines)
            self.query_one("#text", Static).update(self._text())

    def action_back(self) -> None:
        self.app.pop_screen()

    def action_scroll(self, by: int) -> None:
        self.query_one(VerticalScroll).scroll_relative(y=by, animate=False)

    def action_ends(self, is_last: int) -> None:
        view = self.query_one(VerticalScroll)
        view.scroll_end(animate=False) if is_last else view.scroll_home(animate=False)


class LiveScreen(TextScreen):
    """Lines that a thread reads again at an interval; subclasses define `read`."""

    def __init__(self, cluster: Cluster, title: str) -> None:
        super().__init__(title, [str(Text("top.loading", "loading …"))])
        self.cluster = cluster
        self._is_reading = False
        self.has_read = False

    def on_mount(self) -> None:
        super().on_mount()
        self.begin()
        self.set_interval(INTERVAL_S, self.begin)

    def begin(self) -> None:
        if not self._is_reading:
            self._is_reading = True
            self._read_in_thread()

    @work(thread=True, exit_on_error=False)
    def _read_in_thread(self) -> None:
        worker = get_current_worker()
        lines: Sequence[Any] | None
        lines, failure = attempt(self.read)
        if lines is None:
            lines = [str(Text("top.read-failed", "cannot read: {error}", error=failure))]
        if not worker.is_cancelled:
            self.app.call_from_thread(self._show, lines)

    def _show(self, lines: Sequence[Any]) -> None:
        self._is_reading = False
        if self.is_attached:
            self.show(lines)

    def show(self, lines: Sequence[Any]) -> None:
        view = self.query_one(VerticalScroll)
        was_at_end = not self.has_read or view.is_vertical_scroll_end
        self.has_read = True
        self.set_lines(lines)
        if was_at_end and self.follows:
            view.scroll_end(animate=False)

    follows = True

    def read(self) -> Sequence[Any]:
        """Return lines; for another kind of page what its `show` shows."""
        raise NotImplementedError


class LogScreen(LiveScreen):
    """The last output of one rank, or of all ranks, followed."""

    def __init__(self, cluster: Cluster, job: str, rank: int | None = None) -> None:
        super().__init__(cluster, f"{job} · {Text('top.key-logs', 'Logs') if rank is None else f'rank {rank}'}")
        self._job, self._rank = job, rank

    def read(self) -> list[str]:
        chosen = None if self._rank is None else [self._rank]
        lines = self.cluster.logs.lines(self._job, LogView(ranks=chosen, tail=LAST_LINES))
        return [line.text if chosen else f"[{label_processes(line.ranks, {})}] {line.text}" for line in lines] or [
            str(Text("top.no-output", "no output yet"))
        ]


class EventScreen(LiveScreen):
    """The events of a job, and its first failure."""

    def __init__(self, cluster: Cluster, job: str) -> None:
        super().__init__(cluster, f"{job} · {Text('top.key-events', 'Events')}")
        self._job = job

    def read(self) -> list[str]:
        detail = self.cluster.jobs.detail(self._job)
        job = detail.job
        lines = [f"{job.id}  {job.name}  {job.state}  {job.reason}".rstrip(), ""]
        if detail.first_failure is not None:
            lines += [str(first_failure_line(detail.first_failure, job)), ""]
        return lines + [f"{describe_time(event.at_s)}  {event.code:<13}  {event.message()}" for event in detail.events]


SPANS = ((600.0, "10m"), (3600.0, "1h"), (6 * 3600.0, "6h"), (86400.0, "24h"), (7 * 86400.0, "7d"))
NAME_WIDTH, VALUE_WIDTH = 14, 16
DEVICE, RELATIVE = Text("top.device", "device"), Text("top.metric-relative", "relative")


class DetailScreen(LiveScreen):
    """`[` and `]` show a shorter and a longer time span. `view`: the latest view of `top`."""

    follows = False

    def __init__(self, cluster: Cluster, row: TopRow, view: Callable[[], TopView | None]) -> None:
        super().__init__(cluster, row.host if row.device is None else f"{row.host} · {DEVICE} {row.device}")
        self._row, self._view = row, view
        self._span = 1
        self._bindings.bind("left_square_bracket", "span(-1)", str(Text("top.key-shorter", "Shorter")), key_display="[")
        self._bindings.bind("right_square_bracket", "span(1)", str(Text("top.key-longer", "Longer")), key_display="]")
        self._bindings.bind("l", "logs", str(Text("top.key-logs", "Logs")))

    def action_span(self, by: int) -> None:
        self._span = max(0, min(len(SPANS) - 1, self._span + by))
        self.begin()

    def action_logs(self) -> None:
        if self._row.job is not None and self._row.rank is not None:
            self.app.push_screen(LogScreen(self.cluster, self._row.job, self._row.rank))

    def read(self) -> list[str]:
        row, host = self._now()
        now_s = time.time()
        span_s, name = SPANS[self._span]
        series = self.cluster.samples.series(
            row.host, device=row.device, job=row.job, rank=row.rank, since_s=now_s - span_s, until_s=now_s
        )
        width = max(10, self.size.width - NAME_WIDTH - VALUE_WIDTH - 6)
        page = DetailPage(row, host, span=name, since_s=now_s - span_s, until_s=now_s, bars=width)
        return page.lines(*series)

    def _now(self) -> tuple[TopRow, HostRow | None]:
        """Return the current row, the last one if it is gone."""
        view = self._view()
        if view is None:
            return self._row, None
        for row in view.rows:
            if key_of(row) == key_of(self._row):
                self._row = row
                break
        return self._row, next((host for host in view.hosts if host.host == self._row.host), None)


@dataclass(frozen=True)
class DetailPage:
    """The text of the page; `bars`: characters of each sparkline."""

    row: TopRow
    host: HostRow | None
    span: str
    since_s: float
    until_s: float
    bars: int

    def lines(
        self, devices: tuple[DeviceSample, ...], hosts: tuple[HostSample, ...], ranks: tuple[RankSample, ...]
    ) -> list[str]:
        row, host = self.row, self.host
        lines = [*self._who(), ""]
        if row.device is not None:
            lines += [self._head(DEVICE), *self.metric_lines(DeviceSample, row.metrics, devices), ""]
        if row.rank is not None:
            lines += [self._head("rank"), *self.metric_lines(RankSample, row.rank_metrics, ranks)]
            lines += self.metric_lines(Progress, row.progress)
            lines += [self._plain(RELATIVE, relative(row.slower_by)), ""]
        if host is not None:
            lines += [self._head(Text("top.host", "host")), *self.metric_lines(HostSample, host.metrics, hosts)]
        return lines

    def _who(self) -> list[str]:
        row, now = self.row, self.row.metrics
        parts = [part for part in (now.name, now.health) if part]
        if now.link_up is not None:
            link = LINK_UP if now.link_up else LINK_DOWN
            port = Text("top.port", "port {link}", link=link)
            if now.link_downs is not None:
                port = Text("top.port-downs", "port {link} (went down {n} times)", link=link, n=now.link_downs)
            parts.append(str(port))
        if now.ecc_errors is not None:
            parts.append(f"ECC {now.ecc_errors}")
        if row.age_s is not None:
            parts.append(str(Text("top.age", "measured {age} ago", age=describe_seconds(row.age_s))))
        lines = [" · ".join(parts)]
        if row.job is not None:
            lines.append(f"{row.job} {row.job_name} · rank {row.rank_label or row.rank} · pid {number(row.pid)}")
        if row.external_pids:
            lines.append(str(external(row)))
        problems = note(row)
        return [*lines, f"! {problems}"] if problems else lines

    def metric_lines(self, kind: type[Any], now: Any, series: tuple[Any, ...] = ()) -> list[str]:
        """Return a line for each metric of the page, with its history if there is a series."""
        lines = []
        for name, row in metrics_of(kind).items():
            if row.detail is not None:
                line = self._plain(row.detail, describe_metric(now, name, row))
                low, high = row.scale
                if high is None and row.beside is not None and row.unit == "bytes":
                    high = getattr(now, row.beside)
                points = [(sample.at_s, getattr(sample, name)) for sample in series]
                buckets = in_buckets(points, since_s=self.since_s, until_s=self.until_s, count=self.bars)
                lines.append(f"{line}  {sparkline(buckets, low=low, high=high)}".rstrip())
        return lines

    def _head(self, name: Text | str) -> str:
        space = " " * max(1, NAME_WIDTH + VALUE_WIDTH - width_of(str(name)) + 2)
        return f"{name}{space}{Text('top.last-span', 'last {span}', span=self.span)}"

    def _plain(self, name: Text | str, value: str) -> str:
        return f"{lay(str(name), NAME_WIDTH, is_right=False)}{lay(value, VALUE_WIDTH, is_right=True)}"
