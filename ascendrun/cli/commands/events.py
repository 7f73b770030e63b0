"""events: the events of one job or of all jobs, in the order of time."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import click

from ascendrun.cli.command import UsageError, exclusive
from ascendrun.cli.options import cli_command, parse_since
from ascendrun.cli.outcome import exit_code_of
from ascendrun.cli.output import describe_time, format_records, headline, sanitise_line
from ascendrun.core.errors import DeadlineExceededError, UnreachableError
from ascendrun.core.events import EVENTS, fold_events
from ascendrun.core.records import event_record
from ascendrun.text import Text, closest

if TYPE_CHECKING:
    from ascendrun.cli.context import CliContext
    from ascendrun.core.events import JobEvent

POLL_S = 0.25
WATCH_S = 5.0
"""Seconds between checks of a follower that live jobs have their controller."""
DAY_S = 86400.0
STYLES = {"FAILED": "bad", "SUCCEEDED": "good"}


@cli_command(
    "events",
    examples="""
    ascendrun events                          # all jobs, the last day
    ascendrun events -f                       # follow new events; ^C ends
    ascendrun events qwen32b --kind state-changed
    ascendrun events --since 2h --kind straggler,unreachable -o jsonl
    ascendrun events -f j-0007                # follow until the job ends; exit with its exit code
""",
)
@click.argument("job", required=False)
@click.option("--follow", "-f", is_flag=True, help="Print new events as they come; with JOB, until it has ended.")
@click.option("--since", metavar="TIME", help="Skip events before: 10m (ago), 10:30, 2026-11-20T10:30.  [default: 1d]")
@click.option(
    "--kind", "kinds", metavar="KINDS", multiple=True, help="Print these codes only: state-changed,straggler,…"
)
@click.option(
    "-o", "--output", type=click.Choice(["table", "json", "jsonl"]), help="Choose the format.  [default: table]"
)
@click.pass_obj
def command(
    ctx: CliContext, job: str | None, follow: bool, since: str | None, kinds: tuple[str, ...], output: str | None
) -> int:
    """Print the events of jobs in order of time. Events of several hosts are merged into one."""
    if follow and output == "json":
        raise UsageError(exclusive("--follow", "-o json"), hint=Text("events.use-jsonl", "use -o jsonl"))
    since_s = _since(since, has_job=job is not None)
    stream = _Stream(ctx, job, since_s, _parse_kinds(ctx, kinds), output)
    stream.show(until_now=True)
    return stream.follow() if follow else 0


def _since(text: str | None, *, has_job: bool) -> float | None:
    if text is None:
        return None if has_job else time.time() - DAY_S
    try:
        return parse_since(text, now_s=time.time())
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--since") from error


def _parse_kinds(ctx: CliContext, texts: Sequence[str]) -> frozenset[str] | None:
    names = [name.strip() for text in texts for name in text.split(",") if name.strip()]
    if not names:
        return None
    known = {*EVENTS, *ctx.cluster.logs.event_codes()}
    for name in names:
        if name not in known:
            message = Text("events.unknown-kind", "--kind: unknown kind {kind:quote}", kind=name)
            near = closest(name, known)
            meant = Text("cli.did-you-mean", "did you mean {flags}?", flags=near)
            raise UsageError(
                message, hint=meant if near else Text("events.kinds", "known: {kinds}", kinds=sorted(known))
            )
    return frozenset(names)


class _Stream:
    """Events already shown, and new events."""

    def __init__(
        self, ctx: CliContext, ref: str | None, since_s: float | None, kinds: Collection[str] | None, output: str | None
    ) -> None:
        self._ctx, self._output = ctx, output
        self._since_s, self._kinds = since_s, kinds
        self._events = ctx.cluster.logs.events(ref, since_s=since_s, codes=kinds)
        self._watched_mono = time.monotonic()
        self._has_warned = False

    def show(self, *, until_now: bool = False) -> None:
        events = self._events.new_events()
        if self._output in ("json", "jsonl"):
            sys.stdout.write(format_records(self._records(events), self._output, name="events", names=()))
            sys.stdout.flush()
            return
        self._print(events)
        if until_now and not events:
            self._ctx.say("events.none", "no events")
            if self._since_s is not None:
                self._ctx.hint(Text("events.earlier", "earlier events: --since 30d"))

    def follow(self) -> int:
        """Follow until the job has ended; without a job until ^C."""
        while True:
            ended = self._ended_code()
            self.show()
            if ended is not None:
                return ended
            time.sleep(POLL_S)

    def _ended_code(self) -> int | None:
        """Return the exit code of the followed job; None: it runs. Restart a missing controller."""
        is_due = time.monotonic() - self._watched_mono >= WATCH_S
        chosen = self._events.job or self._events.pipeline
        if chosen is None and not is_due:
            return None
        if is_due:
            self._watched_mono = time.monotonic()
        try:
            if chosen is None:
                self._ctx.cluster.jobs.list()
                return None
            job = self._ctx.cluster.jobs.detail(chosen).job
            whole = self._ctx.cluster.jobs.pipeline(chosen) if self._events.pipeline else None
        except (UnreachableError, DeadlineExceededError) as error:
            if not self._has_warned:
                self._ctx.warn(Text("events.retrying", "{problem}; jobs keep running; retrying", problem=error.message))
            self._has_warned = True
            return None
        shown = whole or job
        return None if shown.ended_at_s is None else exit_code_of(shown)

    def _records(self, events: Sequence[JobEvent]) -> list[dict[str, Any]]:
        names = self._events.job_names()
        return [
            {"number": item.number, "job": item.job, "name": names.get(item.job), **event_record(item.event)}
            for item in events
        ]

    def _print(self, events: Sequence[JobEvent]) -> None:
        names = self._events.job_names() if events else {}
        lines = []
        for item in fold_events(events):
            event, message = item.event, str(item.event.message())
            name = sanitise_line(names.get(item.job) or "")
            more = f" (ascendrun show {item.job})" if "\n" in message.strip() else ""
            line = (
                f"{describe_time(event.at_s)}  {item.job:<6}  {name:<12}  {event.code:<13}  {headline(message)}{more}"
            )
            style = STYLES.get(str(event.values.get("state"))) if event.code == "state-changed" else None
            lines.append(self._ctx.screen.paint(line, style) if style else line)
        self._ctx.screen.lines(lines)
