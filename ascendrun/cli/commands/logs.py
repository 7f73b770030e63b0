"""logs: output of the ranks of a job, merged, folded, filtered; or followed. events: what happened to jobs."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import click

from ascendrun.cli.commands.submit import follow_stages, follow_to_the_end
from ascendrun.cli.context import CliContext
from ascendrun.cli.options import TIMES, Parsed, UsageError, check_alone, cli_command, exclusive, output_option
from ascendrun.cli.outcome import attempt_line, exit_code_of, format_line, print_files, print_gaps
from ascendrun.cli.output import describe_time, format_records, headline, sanitise_line
from ascendrun.cluster import JobDetail
from ascendrun.core.errors import DeadlineExceededError, UnreachableError
from ascendrun.core.events import EVENTS, JobEvent, fold_events
from ascendrun.core.jobs.roles import rank_labels, ranks_of_roles
from ascendrun.core.logs.log_lines import parse_ranks
from ascendrun.core.logs.log_view import LogView
from ascendrun.core.names import expand_names, split_list
from ascendrun.core.records import job_event_records
from ascendrun.text import Text, closest


def _parse_hosts(text: str) -> set[str]:
    return {name for piece in split_list(text) for name in expand_names(piece.strip())}


def _parse_pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(str(Text("logs.bad-pattern", "invalid regular expression ({error})", error=error))) from error
    return text


@cli_command("logs")
@click.argument("job")
@click.option("--follow", "-f", is_flag=True, help="Follow until the job ends; exit with its exit code. ^C detaches.")
@click.option("--hosts", type=Parsed("hosts", _parse_hosts), help="Print the output of these hosts only: npu[01-03].")
@click.option(
    "--rank", "ranks", type=Parsed("ranks", parse_ranks), help="Print the output of these ranks only: 0,8-15."
)
@click.option(
    "--role", "roles", multiple=True, metavar="NAME", help="Print the output of a role only, or of one rank: decode/0."
)
@click.option(
    "--stream", type=click.Choice(["out", "err", "both"]), default="both", help="Output or errors.  [default: both]"
)
@click.option("--since", "since_s", type=TIMES, help="Skip lines before: 10m (ago), 10:30, 2026-11-20T10:30.")
@click.option("--until", "until_s", type=TIMES, help="Skip lines after; same forms as --since.")
@click.option("--tail", "-n", type=click.IntRange(min=0), metavar="N", help="Print the last N stored lines.")
@click.option(
    "--grep",
    "patterns",
    type=Parsed("regex", _parse_pattern),
    multiple=True,
    help="Print lines that match; with several, lines that match one of them. Each node searches its own logs.",
)
@click.option("-i", "--ignore-case", is_flag=True, help="Match --grep without regard to case.")
@click.option("-v", "--invert-match", "invert", is_flag=True, help="Print the lines that --grep does not match.")
@click.option(
    "--first-per-rank",
    "only_first",
    is_flag=True,
    help="Print the first match of each rank, in order of time. Without --grep: its first error.",
)
@click.option(
    "--attempt", type=click.IntRange(min=1), metavar="N", help="Number of the attempt.  [default: the newest]"
)
@click.option("--raw", is_flag=True, help="Print the exact bytes, rank after rank, neither merged nor folded.")
@click.option("--files", is_flag=True, help="List the stored files instead: output, metrics, collected artifacts.")
@click.option(
    "--timestamps", "-t", "has_times", is_flag=True, help="Print the arrival time of each line (clock of this machine)."
)
@click.option("--no-prefix", is_flag=True, help="Omit the prefix [ranks].")
@output_option
def command(
    ctx: CliContext,
    /,
    job: str,
    follow: bool,
    attempt: int | None,
    raw: bool,
    files: bool,
    output: str | None,
    stream: str,
    no_prefix: bool,
    roles: tuple[str, ...],
    **choice: Any,
) -> int:
    """Print the output of a job's ranks, merged by time. Lines that ranks share are printed once: [0-3] text.

    Measured numbers may differ between ranks: [0-63] step 120 loss 2.31±0.02. A rank whose number is far from the
    others has its own line. With -o jsonl each line of each rank is a record: time, host, rank, stream, attempt, text.

    Examples:
    ascendrun logs j-0001 --tail 50
    ascendrun logs -f quickstart --rank 0,8-15
    ascendrun logs serving --role decode --role proxy/0                 # of a job with roles
    ascendrun logs j-0001 --grep 'Traceback|Error' --since 10m -t
    ascendrun logs j-0001 --grep warn -i -v --until 10:30               # lines without warnings, until 10:30
    ascendrun logs j-0001 --first-per-rank -t                           # the first error of each rank
    ascendrun logs j-0001 --files                                       # all stored files and where they are
    ascendrun logs j-0001 --rank 3 --stream err --raw > rank3.err       # the exact bytes
    ascendrun logs -f j-0001 -o jsonl | jq -r 'select(.rank == 3) | .text'
    ascendrun logs alice/j-0001 --tail 50        # of another user, whose job file has visible: group
    """
    streams = ("out", "err") if stream == "both" else (stream,)
    view = LogView(**choice, streams=streams, has_prefix=not no_prefix, folds=output is None)
    _check_options(view, follow=follow, attempt=attempt, raw=raw, files=files, output=output)
    detail = ctx.cluster.jobs.detail(job)
    if roles:
        check_alone("--role", {"--rank": view.ranks is not None})
        view = replace(view, ranks=ranks_of_roles(rank_labels(detail.nodes), roles))
    if follow:
        return _follow(ctx, job, detail, view)

    if files:
        print_files(ctx, ctx.cluster.logs.files(detail, view, attempt=attempt), output)
        return 0
    if raw:
        for data in ctx.cluster.logs.raw(detail, view, attempt=attempt):
            sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    elif not _print_lines(ctx, detail, attempt, view):
        return 0
    print_gaps(ctx, ctx.cluster.logs.gaps(detail, view, attempt=attempt))
    earlier = (attempt or detail.job.attempt) - 1
    if earlier > 0 and not raw:
        ctx.hint(Text("logs.earlier-attempts", "earlier attempts: --attempt {range}", range=f"1-{earlier}"))
    return 0


def _follow(ctx: CliContext, ref: str, detail: JobDetail, view: LogView) -> int:
    """Follow a live pipeline stage after stage; if it has ended, print its representative stage."""
    ctx.cluster.logs.lines(detail, view)  # raises for hosts and ranks that are not in the job
    job = detail.job
    whole = ctx.cluster.jobs.whole_pipeline(ref, job)
    if (whole or job).ended_at_s is not None:
        return follow_to_the_end(ctx, job.id, view=view)
    ctx.cluster.controller.ensure()
    return follow_to_the_end(ctx, job.id, view=view) if whole is None else follow_stages(ctx, whole, view=view)


def _check_options(
    view: LogView, *, follow: bool, attempt: int | None, raw: bool, files: bool, output: str | None
) -> None:
    filters = view.filters_lines or view.tail is not None
    if raw and (follow or filters or view.has_times):
        allowed = "--hosts, --rank, --stream, --attempt"
        raise UsageError.of("logs.raw-only", "--raw can be combined with {flags} only", flags=allowed)
    if files and (follow or raw or filters):
        allowed = "--hosts, --rank, --attempt, -o"
        raise UsageError.of("logs.files-only", "--files can be combined with {flags} only", flags=allowed)
    if output is not None and not files:
        check_alone("-o", {"--timestamps": view.has_times, "--no-prefix": not view.has_prefix})
        check_alone("--raw", {"-o": raw})
        if output != "jsonl":
            needs = Text("logs.output-needs-files", "-o {output} requires --files", output=output)
            raise UsageError(needs, hint=Text("logs.use-jsonl", "use -o jsonl for the lines of ranks"))
    if follow:
        others = {"--attempt": attempt is not None, "--until": view.until_s is not None}
        check_alone("--follow", {**others, "--first-per-rank": view.only_first})
    if (view.invert or view.ignore_case) and not view.patterns:
        raise UsageError.of("logs.need-grep", "-i and -v require --grep")


def _print_lines(ctx: CliContext, detail: JobDetail, attempt: int | None, view: LogView) -> bool:
    """Print the lines. False: no output to search, which is reported."""
    screen, labels, is_empty = ctx.screen, rank_labels(detail.nodes), True
    if detail.job.attempt > 1:
        ctx.echo(attempt_line(attempt or detail.job.attempt))
    for line in ctx.cluster.logs.lines(detail, view, attempt=attempt, warn=ctx.warn):
        sys.stdout.write(format_line(view, line, screen, labels) + "\n")
        is_empty = False
    sys.stdout.flush()
    kinds = {"out": "output", "err": "errors"}
    if not is_empty or any(
        file.kind in [kinds[stream] for stream in view.streams]
        for file in ctx.cluster.logs.files(detail, view, attempt=attempt).files
    ):
        return True
    job = detail.job
    attempt = attempt or max(job.attempt, 1)
    if attempt < job.attempt or job.ended_at_s is not None:
        ctx.say("logs.no-output", "{job}: no output in attempt {attempt}", job=job.id, attempt=attempt)
    else:
        ctx.say("logs.no-output-yet", "{job}: no output yet ({state})", job=job.id, state=job.state)
    if job.ended_at_s is not None:
        ctx.hint(f"ascendrun show {job.id}")
    return False


EVENTS_POLL_S = 0.25
WATCH_S = 5.0
"""Seconds between checks of a follower that live jobs have their controller."""
DAY_S = 86400.0
STYLES = {"FAILED": "bad", "SUCCEEDED": "good"}


@cli_command("events")
@click.argument("job", required=False)
@click.option("--follow", "-f", is_flag=True, help="Print new events as they come; with JOB, until it has ended.")
@click.option(
    "--since", "since_s", type=TIMES, help="Skip events before: 10m (ago), 10:30, 2026-11-20T10:30.  [default: 1d]"
)
@click.option(
    "--kind", "kinds", metavar="KINDS", multiple=True, help="Print these codes only: state-changed,straggler,…"
)
@click.option(
    "-o", "--output", type=click.Choice(["table", "json", "jsonl"]), help="Choose the format.  [default: table]"
)
def events_command(
    ctx: CliContext, job: str | None, follow: bool, since_s: float | None, kinds: tuple[str, ...], output: str | None
) -> int:
    """Print the events of jobs in order of time. Events of several hosts are merged into one.

    Examples:
    ascendrun events                          # all jobs, the last day
    ascendrun events -f                       # follow new events; ^C ends
    ascendrun events qwen32b --kind state-changed
    ascendrun events --since 2h --kind straggler,unreachable -o jsonl
    ascendrun events -f j-0007                # follow until the job ends; exit with its exit code
    """
    if follow and output == "json":
        raise UsageError(exclusive("--follow", "-o json"), hint=Text("events.use-jsonl", "use -o jsonl"))
    if since_s is None and job is None:
        since_s = time.time() - DAY_S
    stream = _Stream(ctx, job, since_s, _parse_kinds(ctx, kinds), output)
    stream.show(until_now=True)
    return stream.follow() if follow else 0


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
        self._since_s = since_s
        self._events = ctx.cluster.logs.events(ref, since_s=since_s, codes=kinds)
        self._watched_mono = time.monotonic()
        self._has_warned = False

    def show(self, *, until_now: bool = False) -> None:
        events = self._events.new_events()
        if self._output in ("json", "jsonl"):
            records = job_event_records(events, self._events.job_names())
            sys.stdout.write(format_records(records, self._output, name="events", names=()))
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
            time.sleep(EVENTS_POLL_S)

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
