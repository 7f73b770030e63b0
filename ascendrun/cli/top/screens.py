"""Scrolling pages of `top`: help, the last output of a rank, the events of a job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from textual import work
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import Footer, Static
from textual.worker import get_current_worker

from ascendrun.cli.outcome import first_failure_line
from ascendrun.cli.output import describe_time
from ascendrun.cli.sanitise import sanitise, sanitise_line
from ascendrun.cli.top.table import hidden_keys, plain
from ascendrun.cli.top.text import failure_of
from ascendrun.cluster import LogView
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.cluster import Cluster

LAST_LINES = 500
INTERVAL_S = 2.0
BACK = Text("top.key-back", "Back")


class TextScreen(Screen[None]):
    """A title and lines. Escape, q and backspace close it."""

    DEFAULT_CSS = """
    TextScreen #title { height: 1; text-style: bold; background: $primary-darken-2; padding: 0 1; }
    TextScreen VerticalScroll { height: 1fr; padding: 0 1; scrollbar-size-vertical: 1; }
    """
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
        self.query_one(VerticalScroll).focus()

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
        try:
            lines = self.read()
        except Exception as error:  # shown; the next reading may succeed
            lines = [str(Text("top.read-failed", "cannot read: {error}", error=failure_of(error)))]
        if not worker.is_cancelled:
            self.app.call_from_thread(self._show, lines)

    def _show(self, lines: Sequence[str]) -> None:
        self._is_reading = False
        if not self.is_attached:
            return
        view = self.query_one(VerticalScroll)
        was_at_end = not self.has_read or view.is_vertical_scroll_end
        self.has_read = True
        self.set_lines(lines)
        if was_at_end and self.follows:
            view.scroll_end(animate=False)

    follows = True

    def read(self) -> list[str]:
        raise NotImplementedError


class LogScreen(LiveScreen):
    """The last output of one rank, followed."""

    def __init__(self, cluster: Cluster, job: str, rank: int) -> None:
        super().__init__(cluster, f"{job} · rank {rank}")
        self._job, self._rank = job, rank

    def read(self) -> list[str]:
        lines = self.cluster.logs.lines(self._job, LogView(ranks=[self._rank], tail=LAST_LINES))
        return [line.text for line in lines] or [str(Text("top.no-output", "no output yet"))]


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
