"""logs: what the ranks of a job wrote, merged, folded, filtered; or followed."""

from __future__ import annotations

import re
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from ascendrun.cli.options import cli_command, output_option, parse_since

if TYPE_CHECKING:
    from ascendrun.cli.context import CliContext
    from ascendrun.cluster import JobDetail, JobView
    from ascendrun.query.log_view import LogView


@cli_command(
    "logs",
    examples="""
    ascendrun logs j-0001 --tail 50
    ascendrun logs -f quickstart --rank 0,8-15
    ascendrun logs j-0001 --grep 'Traceback|Error' --since 10m -t
    ascendrun logs j-0001 --grep warn -i -v --until 10:30               # what is no warning, until half past ten
    ascendrun logs j-0001 --first -t                                    # which rank complained first, and of what
    ascendrun logs j-0001 --files                                       # what else was gathered, and where it lies
    ascendrun logs j-0001 --rank 3 --stream err --raw > rank3.err       # every byte as it was written
""",
)
@click.argument("job")
@click.option("--follow", "-f", is_flag=True, help="Go on until the job has ended; exit as it did. ^C detaches.")
@click.option("--node", metavar="NODES", help="Only these nodes: npu[01-03].")
@click.option("--rank", metavar="RANKS", help="Only these ranks: 0,8-15.")
@click.option("--stream", type=click.Choice(["out", "err", "both"]), default="both", help="Standard output or error.")
@click.option("--since", metavar="TIME", help="Only lines since: 10m (ago), 10:30, 2026-11-20T10:30.")
@click.option("--until", metavar="TIME", help="Only lines until then; as --since.")
@click.option("--tail", "-n", type=click.IntRange(min=0), metavar="N", help="Only the last N lines of what is there.")
@click.option(
    "--grep",
    metavar="REGEX",
    multiple=True,
    help="Only lines in which it is found; given several times: one of them. Nodes look for themselves.",
)
@click.option("-i", "ignore_case", is_flag=True, help="--grep does not care for case.")
@click.option("-v", "invert", is_flag=True, help="Only lines in which --grep finds nothing.")
@click.option(
    "--first",
    is_flag=True,
    help="Of each rank the first such line, in order of time. Without --grep: the first that looks like an error.",
)
@click.option("--attempt", type=click.IntRange(min=1), metavar="N", help="Of this attempt.  [default: the newest]")
@click.option("--raw", is_flag=True, help="The exact bytes, rank after rank, neither merged nor folded.")
@click.option("--files", is_flag=True, help="List the files instead: output, metrics, and what was gathered.")
@click.option("--timestamps", "-t", is_flag=True, help="Begin each line with its arrival time, by our clock.")
@click.option("--no-prefix", is_flag=True, help="Lines without [ranks].")
@output_option
@click.pass_obj
def command(
    ctx: CliContext,
    /,
    job: str,
    follow: bool,
    attempt: int | None,
    raw: bool,
    files: bool,
    output: str | None,
    **choice: Any,
) -> int:
    """Print what the ranks of a job wrote, merged by time; lines that ranks share are shown once: [0-3] text.

    Numbers that were measured may differ between ranks: [0-63] step 120 loss 2.31±0.02. A rank whose number is far from
    the others' has its own line.
    """
    from ascendrun.query.log_sources import check_choice

    _refuse_nonsense(follow=follow, attempt=attempt, raw=raw, files=files, output=output, **choice)
    view = _make_view(**choice)
    detail = ctx.cluster.job(job)
    check_choice(detail, view)
    if follow:
        return _follow(ctx, job, detail.job, view)
    chosen = _choose_attempt(detail.job, attempt)
    if files:
        from ascendrun.cli.log_files import print_files

        print_files(ctx, detail.job, chosen, view, output)
    elif raw:
        _write_raw(ctx, detail.job, chosen, view)
    else:
        _print_lines(ctx, detail, chosen, view)
    return 0


def _follow(ctx: CliContext, ref: str, job: JobView, view: LogView) -> int:
    """A pipeline that goes on is followed stage after stage; of one that is over the stage that tells most is shown."""
    from ascendrun.cli.commands.submit import follow_stages, follow_to_the_end
    from ascendrun.cli.follow import has_ended

    whole = ctx.cluster.whole_pipeline(ref, job)
    if has_ended(whole or job):
        return follow_to_the_end(ctx, job.id, view=view)
    ctx.cluster.ensure_controller()
    return follow_to_the_end(ctx, job.id, view=view) if whole is None else follow_stages(ctx, whole, view=view)


def _refuse_nonsense(
    *, follow: bool, attempt: int | None, raw: bool, files: bool, output: str | None, **choice: Any
) -> None:
    filters = choice["grep"] or choice["since"] or choice["until"] or choice["first"] or choice["tail"] is not None
    if raw and (follow or filters or choice["timestamps"]):
        raise click.UsageError("--raw gives exact bytes: only --node, --rank, --stream and --attempt go with it")
    if files and (follow or raw or filters):
        raise click.UsageError("--files lists files: only --node, --rank, --attempt and -o go with it")
    if output is not None and not files:
        raise click.UsageError("-o is for --files; lines are printed as they are")
    if follow and attempt is not None:
        raise click.UsageError("--follow shows the newest attempt and those to come; leave --attempt out")
    if follow and (choice["until"] or choice["first"]):
        raise click.UsageError("--follow goes on until the job has ended; leave --until and --first out")
    if (choice["invert"] or choice["ignore_case"]) and not choice["grep"]:
        raise click.UsageError("-i and -v say how --grep looks; give a pattern with --grep")


def _make_view(
    *,
    node: str | None,
    rank: str | None,
    stream: str,
    since: str | None,
    until: str | None,
    tail: int | None,
    grep: tuple[str, ...],
    ignore_case: bool,
    invert: bool,
    first: bool,
    timestamps: bool,
    no_prefix: bool,
) -> LogView:
    """Raises BadParameter naming the option whose text is wrong."""
    from ascendrun.core.logs.log_lines import parse_ranks
    from ascendrun.core.names import expand_names, split_list
    from ascendrun.query.log_view import LogView

    option = ""
    try:
        option = "--node"
        hosts = None if node is None else {name for piece in split_list(node) for name in expand_names(piece.strip())}
        option = "--rank"
        ranks = None if rank is None else parse_ranks(rank)
        option = "--since"
        since_s = None if since is None else parse_since(since, now_s=time.time())
        option = "--until"
        until_s = None if until is None else parse_since(until, now_s=time.time())
        option = "--grep"
        for pattern in grep:
            re.compile(pattern)
    except (ValueError, re.error) as error:
        raise click.BadParameter(str(error), param_hint=option) from error
    return LogView(
        hosts=hosts,
        ranks=ranks,
        streams=("out", "err") if stream == "both" else (stream,),
        since_s=since_s,
        until_s=until_s,
        patterns=grep,
        ignore_case=ignore_case,
        invert=invert,
        tail=tail,
        only_first=first,
        has_times=timestamps,
        has_prefix=not no_prefix,
    )


def _choose_attempt(job: JobView, attempt: int | None) -> int:
    from ascendrun.core.errors import NotFoundError

    if attempt is not None and attempt > job.attempt:
        raise NotFoundError(
            f"{job.id} has no attempt {attempt}", hint=f"it has had {job.attempt}: ascendrun show {job.id}"
        )
    return attempt or max(job.attempt, 1)


def _print_lines(ctx: CliContext, detail: JobDetail, attempt: int, view: LogView) -> None:
    """Streams lazily: memory does not grow with the logs, unless a filter and --tail are combined, and then by N."""
    from collections import deque
    from itertools import chain

    from ascendrun.cli.log_output import format_line, print_gaps
    from ascendrun.core.logs.folding import fold
    from ascendrun.core.logs.log_lines import merge_batches
    from ascendrun.query.log_sources import open_streams, why_nothing
    from ascendrun.query.log_view import FOLD_WINDOW_S, first_of_each_rank

    sources = open_streams(ctx.settings.state_dir, detail, attempt, view, warn=ctx.warn)
    if not sources:
        ctx.echo(why_nothing(detail, attempt))
        if detail.job.ended_at_s is not None:
            ctx.hint(f"ascendrun show {detail.job.id}")
        return
    lines = chain.from_iterable(merge_batches(sources))
    shown = fold(first_of_each_rank(lines) if view.only_first else lines, window_s=FOLD_WINDOW_S)
    screen = ctx.screen()
    for line in shown if view.tail is None else deque(shown, maxlen=view.tail):
        sys.stdout.write(format_line(view, line, screen) + "\n")
    sys.stdout.flush()
    print_gaps(ctx, detail.job.id, attempt, view)
    if attempt > 1:
        ctx.echo(f"this was attempt {attempt}; earlier ones: --attempt 1")


def _write_raw(ctx: CliContext, job: JobView, attempt: int, view: LogView) -> None:
    from ascendrun.cli.log_output import print_gaps
    from ascendrun.head.spool.spool_files import find_streams, read_bytes
    from ascendrun.head.state.settings import spool_dir

    sys.stdout.flush()
    folder = spool_dir(ctx.settings.state_dir, job.id, attempt)
    for files in find_streams(folder, attempt, hosts=view.hosts, ranks=view.ranks, streams=view.streams):
        for data in read_bytes(files):
            sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
    print_gaps(ctx, job.id, attempt, view)
