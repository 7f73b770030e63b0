"""Interactive `top` on textual: a table of devices with filter, sort orders and detail pages."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from typing import Any, Callable

from textual import work
from textual.app import App, ComposeResult
from textual.containers import Vertical
from textual.widgets import Footer, Input, Static
from textual.worker import get_current_worker

from ascendrun.cli.context import CliContext
from ascendrun.cli.output import cut
from ascendrun.cli.top.columns import BAR_COLUMNS, HOST_COLUMNS, JOB_COLUMNS, lay_out
from ascendrun.cli.top.jobs import JobsScreen
from ascendrun.cli.top.screens import DetailScreen, EventScreen, LogScreen, RowsTable, TextScreen, plain
from ascendrun.cli.top.text import NO_ROWS, attempt, clock, host_style, row_style, totals_line, why_no_data
from ascendrun.cluster import Cluster, TopSource
from ascendrun.health.top import view as model
from ascendrun.text import Text

MOST_JOBS = 5
MOST_WITHOUT_DATA = 3
LATE_S = 5.0
"""Seconds: a refresh that takes longer is shown."""


def run_app(ctx: CliContext, source: TopSource, choice: model.Choice, order: model.Order, *, interval_s: float) -> int:
    if not ctx.has_color(sys.stdout):
        os.environ["NO_COLOR"] = "1"  # the only way to tell textual
    TopApp(ctx.cluster, source, choice, order, interval_s=interval_s).run()
    return 0


KEY_SORT, KEY_PROBLEMS = Text("top.key-sort", "Sort"), Text("top.key-problems", "Problems")
KEY_PAUSE = Text("top.key-pause", "Pause")
KEYS: tuple[tuple[str, str, Text, str | None, bool], ...] = (
    ("q", "quit", Text("top.key-quit", "Quit"), None, True),
    ("question_mark", "open('help')", Text("top.key-help", "Help"), "?", True),
    ("slash", "prompt('/')", Text("top.key-filter", "Filter"), "/", True),
    ("s", "next_sort", KEY_SORT, None, True),
    ("enter", "detail", Text("top.key-detail", "Detail"), None, True),
    ("t", "open('jobs')", Text("top.key-jobs", "Jobs"), None, True),
    ("l", "logs", Text("top.key-logs", "Logs"), None, True),
    ("e", "events", Text("top.key-events", "Events"), None, False),
    ("a", "flip('only_busy')", Text("top.key-busy", "Busy"), None, True),
    ("u", "flip('only_problems')", KEY_PROBLEMS, None, True),
    ("h", "turn('by_host')", Text("top.key-hosts", "Hosts"), None, True),
    ("r", "turn('is_reversed')", Text("top.key-reverse", "Reverse"), None, False),
    ("p", "pause", KEY_PAUSE, None, False),
    ("colon", "prompt(':')", Text("top.key-command", "Command"), ":", False),
    ("escape", "clear", Text("top.key-back", "Back"), None, False),
)
"""(key, action, name, symbol, in the footer); the keys of nvitop, htop and k9s."""
NO_RANK = Text("top.no-rank", "no rank on this row")
FILTER_HINT = Text("top.filter-hint", "host, job, chip, health … or a glob")
COMMAND_HINT = Text("top.command-hint", "sort NAME · job JOB · host GLOB · all · q")
HELP = Text(
    "top.help",
    """\
q              quit                       ?        this page
up down j k    row                        g G      first and last row
PgUp PgDn      page                       enter    all metrics of the row, with history
/              filter: host, job, chip, health, problem, rank3, or a glob; escape clears
s              next sort order: host, util, mem, power, temp, step, job, age
r              reverse the order          p        pause
a              only devices with a job    u        only rows with problems
h              one line per host          l        last output of the rank
e              events of the job          t        jobs: logs, explain, events, stop
:              command

:sort NAME     sort order                 :job JOB   only this job
:host GLOB     only these hosts           :all       show all rows

"-"            unknown, never 0
REL            step time of the rank, compared with the median of the job's other ranks
MEM GiB        used / total of the device
AGE            age of the data
red            health, network port, unreachable host
yellow         slow rank, external process
dim            no job, or old data
""",
)


class Prompt(Input):
    """The line at the bottom. `sign`: / filters the rows with each key, : runs a command."""

    def __init__(self, *, on_filter: Callable[[str], None], on_command: Callable[[str], None]) -> None:
        super().__init__(id="prompt", compact=True)
        self._on_filter, self._on_command = on_filter, on_command
        self.sign = ""

    def begin(self, sign: str, text: str) -> None:
        self.sign, self.value = sign, text
        self.placeholder = str(FILTER_HINT if sign == "/" else COMMAND_HINT)
        self.add_class("-shown")
        self.focus()

    def end(self) -> None:
        self.remove_class("-shown")
        self.app.query_one(RowsTable).focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        if self.sign == "/":
            self._on_filter(event.value.strip())

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.end()
        if self.sign == ":" and event.value.strip():
            self._on_command(event.value.strip())


class TopApp(App[None]):
    """A thread refreshes from `source`, one refresh at a time, so that a slow one never delays a key."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layout: vertical; }
    #totals { height: 1; text-style: bold reverse; padding: 0 1; }
    #jobs { height: auto; padding: 0 1; margin-bottom: 1; }
    #header { height: 1; text-style: bold; color: $text; background: $surface; padding: 0 1; }
    #rows { height: 1fr; padding: 0 0 0 1; overflow-x: hidden; scrollbar-size-vertical: 1; }
    #without-data { height: auto; color: $text-muted; padding: 0 1; }
    #state { height: 1; color: $text-muted; padding: 0 1; }
    #prompt { height: 1; border: none; padding: 0 1; display: none; }
    #prompt.-shown { display: block; }
    """

    def __init__(
        self, cluster: Cluster, source: TopSource, choice: model.Choice, order: model.Order, *, interval_s: float
    ) -> None:
        super().__init__()
        self.cluster = cluster
        self.source, self.choice, self.order, self.interval_s = source, choice, order, interval_s
        self.view: model.TopView | None = None
        self.failure: str | None = None
        self.is_paused = False
        self._refresh_started_s: float | None = None
        for key, action, name, sign, is_shown in KEYS:
            self.bind(key, action, description=str(name), show=is_shown, key_display=sign)

    def compose(self) -> ComposeResult:
        yield Static(id="totals", markup=False)
        with Vertical():
            yield Static(id="jobs", markup=False)
            yield Static(id="header", markup=False)
            yield RowsTable(id="rows")
            yield Static(id="without-data", markup=False)
        yield Static(id="state", markup=False)
        yield Prompt(on_filter=lambda text: self.choose(text=text), on_command=self.run_command)
        yield Footer(compact=True)

    def on_mount(self) -> None:
        self.title, self.theme = "ascendrun top", "ansi-dark"  # the colours of the terminal, light or dark
        self.query_one(RowsTable).focus()
        self.begin_refresh()
        self.set_interval(self.interval_s, self.begin_refresh)
        self.set_interval(1.0, self.show_state)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Disable the keys of the table while a page with its own keys is open."""
        return len(self.screen_stack) < 2 or action not in {name.partition("(")[0] for _, name, *_ in KEYS}

    # Refreshing

    def begin_refresh(self) -> None:
        if self._refresh_started_s is None and not self.is_paused:
            self._refresh_started_s = time.monotonic()
            self._refresh()

    @work(thread=True, exclusive=False, exit_on_error=False)
    def _refresh(self) -> None:
        worker = get_current_worker()
        view, failure = attempt(lambda: self.source.refresh(now_s=time.time()))
        if not worker.is_cancelled:
            self.call_from_thread(self._refreshed, view, failure)

    def _refreshed(self, view: model.TopView | None, failure: str | None) -> None:
        self._refresh_started_s = None
        self.failure = failure
        if view is not None:
            self.view = view
        self.draw()

    # Drawing

    def on_resize(self) -> None:
        self.draw()

    def draw(self) -> None:
        """Draw everything from the latest view."""
        if self.view is None or not self.screen_stack or not self.query("#rows"):
            return
        view = model.arrange(self.view, self.choice, self.order)
        width = self.size.width - 2
        self.query_one("#totals", Static).update(
            plain(cut(f"{clock(self.view.at_s)}  {totals_line(self.view.totals)}", width))
        )
        jobs = lay_out(JOB_COLUMNS, view.jobs[:MOST_JOBS], width)
        text = plain(cut(jobs.header, width))
        text.stylize("bold")
        for index in range(len(jobs.cells)):
            text.append("\n" + cut(jobs.text(index), width))
        self.query_one("#jobs", Static).update(text)
        self.query_one("#jobs", Static).display = bool(view.jobs)
        self._draw_rows(view, width)
        without = [host for host in view.hosts if host.why is not None]
        lines = [cut(f"{host.host}  {why_no_data(host)}", width) for host in without[:MOST_WITHOUT_DATA]]
        if len(without) > MOST_WITHOUT_DATA:
            lines[-1] += f"  (+{len(without) - MOST_WITHOUT_DATA})"
        self.query_one("#without-data", Static).update(plain("\n".join(lines)))
        self.query_one("#without-data", Static).display = bool(lines)
        self.show_state()

    def _draw_rows(self, view: model.TopView, width: int) -> None:
        if self.order.by_host:
            lines: list[Any] = list(model.rows_by_host(view.rows, view.hosts))
            laid, styles = lay_out(HOST_COLUMNS, lines, width - 1), [host_style(line) for line in lines]
        else:
            lines = list(model.fold_idle(view.rows))
            laid, styles = lay_out(BAR_COLUMNS, lines, width - 1), [row_style(line) for line in lines]
        self.query_one("#header", Static).update(plain(cut(laid.header, width)))
        self.query_one(RowsTable).show(laid, lines, styles, empty=str(NO_ROWS))

    def show_state(self) -> None:
        """Show the sort order, filters, and whether the last refresh failed or is late."""
        if self.view is None or not self.query("#state"):
            return
        parts = [f"{KEY_SORT}: {self.order.by}{' ↑' if self.order.is_reversed else ''}"]
        rows = len(model.arrange(self.view, self.choice, self.order).rows)
        if rows != len(self.view.rows):
            parts.append(str(Text("top.shown-rows", "{n} of {total} rows", n=rows, total=len(self.view.rows))))
        if self.choice.text:
            parts.append(f"/{self.choice.text}")
        if self.choice.job:
            parts.append(self.choice.job)
        if self.choice.only_problems:
            parts.append(str(KEY_PROBLEMS))
        if self.is_paused:
            parts.append(str(KEY_PAUSE))
        failure = self.failure or self.view.samples_error
        if failure is not None:
            parts.append(str(Text("top.refresh-failed", "refresh failed: {error}", error=failure)))
        waiting_s = 0.0 if self._refresh_started_s is None else time.monotonic() - self._refresh_started_s
        if waiting_s > LATE_S:
            parts.append(str(Text("top.refreshing", "refreshing for {n} s", n=int(waiting_s))))
        self.query_one("#state", Static).update(plain(cut(" · ".join(parts), self.size.width - 2)))

    # Keys

    @property
    def selected(self) -> model.TopRow | None:
        """The row under the cursor, the first of a host's line; None for folded hosts and an empty table."""
        line = self.query_one(RowsTable).selected
        if isinstance(line, model.HostLine):
            return line.rows[0]
        return None if line is None or isinstance(line, model.IdleHosts) else line

    def choose(self, **changes: Any) -> None:
        self.choice = replace(self.choice, **changes)
        self.draw()

    def arrange_by(self, **changes: Any) -> None:
        """Sort, and move to the first row."""
        self.order = replace(self.order, **changes)
        self.query_one(RowsTable).reset()
        self.draw()

    def action_next_sort(self) -> None:
        names = list(model.SORTS)
        self.arrange_by(by=names[(names.index(self.order.by) + 1) % len(names)])

    def action_turn(self, name: str) -> None:
        self.arrange_by(**{name: not getattr(self.order, name)})

    def action_flip(self, name: str) -> None:
        self.choose(**{name: not getattr(self.choice, name)})

    def action_pause(self) -> None:
        self.is_paused = not self.is_paused
        self.show_state()

    def action_prompt(self, sign: str) -> None:
        self.query_one(Prompt).begin(sign, self.choice.text if sign == "/" else "")

    def action_clear(self) -> None:
        prompt = self.query_one(Prompt)
        if prompt.has_class("-shown"):
            prompt.end()
            if prompt.sign == "/":
                self.choose(text="")
        else:
            self.choose(text="", only_problems=False, only_busy=False)

    def action_open(self, page: str) -> None:
        help_page = TextScreen("ascendrun top", str(HELP).splitlines())
        self.push_screen(JobsScreen(self.cluster) if page == "jobs" else help_page)

    def action_detail(self) -> None:
        row = self.selected
        if row is not None:
            self.push_screen(DetailScreen(self.cluster, row, lambda: self.view))

    def action_logs(self) -> None:
        row = self.selected
        if row is not None and row.job is not None and row.rank is not None:
            self.push_screen(LogScreen(self.cluster, row.job, row.rank))
        else:
            self.notify(str(NO_RANK), markup=False)

    def action_events(self) -> None:
        row = self.selected
        jobs = self.view.jobs if self.view is not None else ()
        job = row.job if row is not None and row.job is not None else jobs[0].job.id if jobs else None
        if job is not None:
            self.push_screen(EventScreen(self.cluster, job))
        else:
            self.notify(str(NO_RANK), markup=False)

    def run_command(self, text: str) -> None:
        """Run a command: q · sort NAME · job JOB · host GLOB · all."""
        name, _, value = text.partition(" ")
        value = value.strip()
        jobs = {name for row in (self.view.jobs if self.view else ()) for name in (row.job.id, row.job.name)}
        if name in ("q", "quit", "exit"):
            self.exit()
        elif name == "all" and not value:
            self.choose(job=None, hosts=(), text="", only_problems=False, only_busy=False)
        elif name == "sort" and value in model.SORTS:
            self.arrange_by(by=value)
        elif name == "job" and value in jobs:
            self.choose(job=value)
        elif name == "host" and value:
            self.choose(hosts=tuple(value.split(",")))
        else:
            message = Text("top.unknown-command", "unknown command: {text}", text=text)
            self.notify(str(message), severity="error", markup=False)
