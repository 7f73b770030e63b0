"""The page of jobs of `top`: live and ended ones, with their logs, diagnosis, events and `stop` behind keys."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from textual.app import ComposeResult
from textual.widgets import Footer, Static

from ascendrun.cli import output as out
from ascendrun.cli.explanation import explanation_lines
from ascendrun.cli.job_columns import job_columns
from ascendrun.cli.top.cells import bar
from ascendrun.cli.top.columns import TopColumn, lay_out
from ascendrun.cli.top.screens import EventScreen, LiveScreen, LogScreen, RowsTable, TextScreen, hidden_keys, plain
from ascendrun.cli.top.text import NO_ROWS, attempt
from ascendrun.cluster import Cluster, JobView
from ascendrun.text import Text

ENDED = 20
STOP = Text("top.key-stop", "Stop")
KEYS = (
    ("l", "page('logs')", Text("top.key-logs", "Logs")),
    ("x", "page('explain')", Text("top.key-explain", "Explain")),
    ("e", "page('events')", Text("top.key-events", "Events")),
    ("S", "stop", STOP),
)
STYLES = {"FAILED": "red", "UNKNOWN": "yellow", "BACKOFF": "yellow", "SUCCEEDED": "dim", "STOPPED": "dim"}


def columns(now_s: float) -> list[TopColumn]:
    """Return the columns of `ps`, and the fraction of the steps as a bar; the text of the progress is omitted first."""
    found = [
        TopColumn(one.title, out.title_of(one), one.cell, 9 if one.title == "PROGRESS" else 99 - 9 * one.dropped, False)
        for one in job_columns(now_s)
        if not one.is_wide
    ]
    return [*found[:3], TopColumn("bar", "", _bar, 95, is_right=False), *found[3:]]


def _bar(job: JobView) -> str:
    step, total = ((job.progress or {}).get(name) for name in ("step", "total_steps"))
    return f"{bar(100 * step / total, 10)} {step}/{total}" if isinstance(step, (int, float)) and total else ""


class ExplainScreen(LiveScreen):
    """The first failing rank of a job, the cause and a fix."""

    follows = False

    def __init__(self, cluster: Cluster, job: str) -> None:
        super().__init__(cluster, f"{job} · {Text('top.key-explain', 'Explain')}")
        self._job = job

    def read(self) -> list[str]:
        lines, _ = explanation_lines(self.cluster.diagnosis.explain(self._job), max(20, self.size.width - 4))
        return "\n".join(lines).split("\n")


PAGES: dict[str, Any] = {"logs": LogScreen, "explain": ExplainScreen, "events": EventScreen}


class StopScreen(TextScreen):
    """Asks whether a job is to be stopped: only y stops it."""

    BINDINGS = hidden_keys({"y": "stop"})

    def __init__(self, cluster: Cluster, job: JobView) -> None:
        name = out.named(job.id, job.name)
        sure = Text("top.sure-stop", "Stop {job}? It saves a checkpoint first. y: stop", job=name)
        super().__init__(str(STOP), [str(sure)])
        self._cluster, self._job = cluster, job

    def action_stop(self) -> None:
        self.app.pop_screen()
        _, failure = attempt(lambda: self._cluster.jobs.stop(self._job.id))
        if failure is not None:
            self.app.notify(failure, severity="error", markup=False)


class JobsScreen(LiveScreen):
    """Live jobs, and the newest that have ended."""

    BODY = "#rows"

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster, "")
        for key, action, name in KEYS:
            self._bindings.bind(key, action, str(name))

    def compose(self) -> ComposeResult:
        yield Static(id="header", markup=False)
        yield RowsTable(id="rows")
        yield Footer(compact=True)

    def read(self) -> Sequence[Any]:
        return self.cluster.jobs.list(ended=ENDED, folded=True)

    def show(self, lines: Sequence[Any]) -> None:
        """Show the jobs, or the line that tells why they cannot be read."""
        jobs = [line for line in lines if isinstance(line, JobView)]
        laid = lay_out(columns(time.time()), jobs, self.size.width - 2)
        self.query_one("#header", Static).update(plain(out.cut(laid.header, self.size.width - 2)))
        why = next((line for line in lines if isinstance(line, str)), str(NO_ROWS))
        self.query_one(RowsTable).show(laid, jobs, [STYLES.get(job.state) for job in jobs], empty=why)

    @property
    def selected(self) -> JobView | None:
        found: JobView | None = self.query_one(RowsTable).selected
        return found

    def action_page(self, name: str) -> None:
        if self.selected is not None:
            self.app.push_screen(PAGES[name](self.cluster, self.selected.id))

    def action_stop(self) -> None:
        if self.selected is not None and self.selected.ended_at_s is None:
            self.app.push_screen(StopScreen(self.cluster, self.selected))
