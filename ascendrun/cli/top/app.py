"""`top` with keys, on textual: a table of devices that is looked at anew, a filter, an order, details behind enter."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from textual import work
from textual.app import App, ComposeResult
from textual.containers import Vertical
from textual.widgets import Footer, Input, Static
from textual.worker import get_current_worker

from ascendrun.cli.output import cut
from ascendrun.cli.top.columns import HOST_COLUMNS, JOB_COLUMNS, ROW_COLUMNS, lay_out
from ascendrun.cli.top.order import SORT_NAMES, Order, arrange
from ascendrun.cli.top.table import RowsTable, plain
from ascendrun.cli.top.text import clock, host_style, reason, row_style, totals_line, what_failed
from ascendrun.cli.top.words import key_word, word
from ascendrun.health.top.rows import Choice, HostLine, IdleHosts, fold_idle, rows_by_host
from ascendrun.health.top.view import TopRow, TopView

if TYPE_CHECKING:
    from ascendrun.cli.context import CliContext
    from ascendrun.insight import TopSource

MOST_JOBS = 5
MOST_WITHOUT = 3
LATE_S = 5.0
"""A look that takes longer is told of."""


def run_app(ctx: CliContext, source: TopSource, choice: Choice, order: Order, *, lang: str, every_s: float) -> int:
    if not ctx.has_color(sys.stdout):
        os.environ["NO_COLOR"] = "1"  # the only way to tell textual
    TopApp(source, choice, order, lang=lang, every_s=every_s).run()
    return 0


def _keys(lang: str) -> list[tuple[str, str, str, str | None, bool]]:
    """(key, action, word, sign, shown): what people know from nvitop, htop and k9s; the footer has those shown."""
    shown = (
        ("q", "quit", "quit"),
        ("question_mark", "help", "help"),
        ("slash", "filter", "filter"),
        ("s", "next_sort", "sort"),
        ("enter", "detail", "detail"),
        ("l", "logs", "logs"),
        ("e", "events", "events"),
        ("a", "toggle_busy", "all"),
        ("u", "toggle_bad", "bad"),
        ("h", "toggle_hosts", "hosts"),
    )
    hidden = (
        ("r", "reverse", "reverse"),
        ("p", "pause", "pause"),
        ("colon", "command", "command"),
        ("escape", "clear", "back"),
    )
    signs = {"question_mark": "?", "slash": "/", "colon": ":"}
    return [
        (key, action, key_word(lang, name), signs.get(key), (key, action, name) in shown)
        for key, action, name in (*shown, *hidden)
    ]


class TopApp(App[None]):
    """`source` is looked at in a thread, one look at a time: a slow one never holds up a key."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layout: vertical; }
    #totals { height: 1; text-style: bold; background: $primary-darken-2; padding: 0 1; }
    #jobs { height: auto; padding: 0 1; margin-bottom: 1; }
    #header { height: 1; text-style: bold; color: $text; background: $surface; padding: 0 1; }
    #rows { height: 1fr; padding: 0 0 0 1; overflow-x: hidden; scrollbar-size-vertical: 1; }
    #without { height: auto; color: $text-muted; padding: 0 1; }
    #state { height: 1; color: $text-muted; padding: 0 1; }
    #prompt { height: 1; border: none; padding: 0 1; display: none; }
    #prompt.-shown { display: block; }
    """

    def __init__(self, source: TopSource, choice: Choice, order: Order, *, lang: str, every_s: float) -> None:
        super().__init__()
        self.source, self.choice, self.order, self.lang, self.every_s = source, choice, order, lang, every_s
        self.view: TopView | None = None
        self.failure: str | None = None
        self.is_paused = False
        self._look_began_s: float | None = None
        self._prompt = ""
        for key, action, said, sign, is_shown in _keys(lang):
            self.bind(key, action, description=said, show=is_shown, key_display=sign)

    def compose(self) -> ComposeResult:
        yield Static(id="totals", markup=False)
        with Vertical():
            yield Static(id="jobs", markup=False)
            yield Static(id="header", markup=False)
            yield RowsTable(id="rows")
            yield Static(id="without", markup=False)
        yield Static(id="state", markup=False)
        yield Input(id="prompt", compact=True)
        yield Footer(compact=True)

    def on_mount(self) -> None:
        self.title = "ascendrun top"
        self.query_one(RowsTable).focus()
        self.begin_look()
        self.set_interval(self.every_s, self.begin_look)
        self.set_interval(1.0, self.show_state)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """The keys of the table are the table's: behind a row, a page has its own."""
        return len(self.screen_stack) < 2 or action not in {name for _, name, *_ in _keys(self.lang)}

    # Looking

    def begin_look(self) -> None:
        if self._look_began_s is None and not self.is_paused:
            self._look_began_s = time.monotonic()
            self._look()

    @work(thread=True, exclusive=False, exit_on_error=False)
    def _look(self) -> None:
        worker = get_current_worker()
        view, failure = None, None
        try:
            view = self.source.look(now_s=time.time())
        except Exception as error:  # one of ours too: it is said, and the next look is made
            failure = what_failed(error)
        if not worker.is_cancelled:
            self.call_from_thread(self._seen, view, failure)

    def _seen(self, view: TopView | None, failure: str | None) -> None:
        self._look_began_s = None
        self.failure = failure
        if view is not None:
            self.view = view
        self.draw()

    # Drawing

    def on_resize(self) -> None:
        self.draw()

    def draw(self) -> None:
        """Everything, from the newest view; cheap enough for each key."""
        if self.view is None or not self.screen_stack or not self.query("#rows"):
            return
        view = arrange(self.view, self.choice, self.order)
        width = self.size.width - 2
        self.query_one("#totals", Static).update(
            plain(cut(f"{clock(self.view.at_s)}  {totals_line(self.view.totals, self.lang)}", width))
        )
        jobs = lay_out(JOB_COLUMNS, view.jobs[:MOST_JOBS], self.lang, width)
        text = plain(cut(jobs.header, width))
        text.stylize("bold")
        for index in range(len(jobs.cells)):
            text.append("\n" + cut(jobs.text(index), width))
        self.query_one("#jobs", Static).update(text)
        self.query_one("#jobs", Static).display = bool(view.jobs)
        self._draw_rows(view, width)
        silent = [host for host in view.hosts if host.why is not None]
        lines = [cut(f"{host.host}  {reason(host, self.lang)}", width) for host in silent[:MOST_WITHOUT]]
        if len(silent) > MOST_WITHOUT:
            lines[-1] += f"  (+{len(silent) - MOST_WITHOUT})"
        self.query_one("#without", Static).update(plain("\n".join(lines)))
        self.query_one("#without", Static).display = bool(lines)
        self.show_state()

    def _draw_rows(self, view: TopView, width: int) -> None:
        if self.order.by_host:
            lines: list[Any] = list(rows_by_host(view.rows, view.hosts))
            laid, styles = lay_out(HOST_COLUMNS, lines, self.lang, width - 1), [host_style(one) for one in lines]
        else:
            lines = list(fold_idle(view.rows))
            laid, styles = lay_out(ROW_COLUMNS, lines, self.lang, width - 1), [row_style(one) for one in lines]
        self.query_one("#header", Static).update(plain(cut(laid.header, width)))
        self.query_one(RowsTable).show(laid, lines, styles, empty=word(self.lang, "nothing"))

    def show_state(self) -> None:
        """What is shown of what there is, and how old it is."""
        if self.view is None or not self.query("#state"):
            return
        parts = [f"{key_word(self.lang, 'sort')}: {self.order.by}{' ↑' if self.order.is_reversed else ''}"]
        rows = len(arrange(self.view, self.choice, self.order).rows)
        if rows != len(self.view.rows):
            parts.append(word(self.lang, "shown", n=rows, all=len(self.view.rows)))
        if self.choice.text:
            parts.append(f"/{self.choice.text}")
        if self.choice.job:
            parts.append(self.choice.job)
        if self.choice.only_bad:
            parts.append(key_word(self.lang, "bad"))
        if self.is_paused:
            parts.append(key_word(self.lang, "pause"))
        failure = self.failure or self.view.trouble
        if failure is not None:
            parts.append(word(self.lang, "failed", why=failure))
        waits_s = 0.0 if self._look_began_s is None else time.monotonic() - self._look_began_s
        if waits_s > LATE_S:
            parts.append(word(self.lang, "late", n=int(waits_s)))
        self.query_one("#state", Static).update(plain(cut(" · ".join(parts), self.size.width - 2)))

    # Keys

    @property
    def selected(self) -> TopRow | None:
        """The row under the cursor; of a host's line its first, None: none or folded hosts."""
        line = self.query_one(RowsTable).selected
        if isinstance(line, HostLine):
            return line.rows[0]
        return None if line is None or isinstance(line, IdleHosts) else line

    def choose(self, **changes: Any) -> None:
        self.choice = replace(self.choice, **changes)
        self.draw()

    def arrange_by(self, **changes: Any) -> None:
        """In a new order one wants to see what comes first."""
        self.order = replace(self.order, **changes)
        self.query_one(RowsTable).forget()
        self.draw()

    def action_next_sort(self) -> None:
        self.arrange_by(by=SORT_NAMES[(SORT_NAMES.index(self.order.by) + 1) % len(SORT_NAMES)])

    def action_reverse(self) -> None:
        self.arrange_by(is_reversed=not self.order.is_reversed)

    def action_toggle_hosts(self) -> None:
        self.arrange_by(by_host=not self.order.by_host)

    def action_toggle_busy(self) -> None:
        self.choose(only_busy=not self.choice.only_busy)

    def action_toggle_bad(self) -> None:
        self.choose(only_bad=not self.choice.only_bad)

    def action_pause(self) -> None:
        self.is_paused = not self.is_paused
        self.show_state()

    def action_filter(self) -> None:
        self._ask("/", self.choice.text)

    def action_command(self) -> None:
        self._ask(":", "")

    def action_clear(self) -> None:
        if self.query_one("#prompt").has_class("-shown"):
            self._close_prompt()
            if self._prompt == "/":
                self.choose(text="")
        else:
            self.choose(text="", only_bad=False, only_busy=False)

    def action_help(self) -> None:
        from ascendrun.cli.top.screens import TextScreen
        from ascendrun.cli.top.words import HELP

        self.push_screen(TextScreen("ascendrun top", HELP[self.lang == "zh"].splitlines(), self.lang))

    def action_detail(self) -> None:
        from ascendrun.cli.top.detail import DetailScreen

        row = self.selected
        if row is not None:
            self.push_screen(DetailScreen(self, row))

    def action_logs(self) -> None:
        from ascendrun.cli.top.screens import LogScreen

        row = self.selected
        if row is not None and row.job is not None and row.rank is not None:
            self.push_screen(LogScreen(self, row.job, row.rank))
        else:
            self.notify(word(self.lang, "no-rank-here"), markup=False)

    def action_events(self) -> None:
        from ascendrun.cli.top.screens import StoryScreen

        row = self.selected
        jobs = self.view.jobs if self.view is not None else ()
        job = row.job if row is not None and row.job is not None else jobs[0].job.id if jobs else None
        if job is not None:
            self.push_screen(StoryScreen(self, job))
        else:
            self.notify(word(self.lang, "no-rank-here"), markup=False)

    # The line at the bottom

    def _ask(self, prompt: str, text: str) -> None:
        self._prompt = prompt
        field = self.query_one("#prompt", Input)
        field.value = text
        field.placeholder = word(self.lang, "ask-filter" if prompt == "/" else "ask-command")
        field.add_class("-shown")
        field.focus()

    def _close_prompt(self) -> None:
        self.query_one("#prompt", Input).remove_class("-shown")
        self.query_one(RowsTable).focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        if self._prompt == "/":
            self.choose(text=event.value.strip())

    def on_input_submitted(self, event: Input.Submitted) -> None:
        text, prompt = event.value.strip(), self._prompt
        self._close_prompt()
        if prompt == ":" and text:
            self.obey(text)

    def obey(self, text: str) -> None:
        """q · sort NAME · job JOB · host GLOB · all."""
        name, _, value = text.partition(" ")
        value = value.strip()
        jobs = {name for row in (self.view.jobs if self.view else ()) for name in (row.job.id, row.job.name)}
        if name in ("q", "quit", "exit"):
            self.exit()
        elif name == "all" and not value:
            self.choose(job=None, hosts=(), text="", only_bad=False, only_busy=False)
        elif name == "sort" and value in SORT_NAMES:
            self.arrange_by(by=value)
        elif name == "job" and value in jobs:
            self.choose(job=value)
        elif name == "host" and value:
            self.choose(hosts=tuple(value.split(",")))
        else:
            self.notify(word(self.lang, "bad-command", text=text), severity="error", markup=False)
