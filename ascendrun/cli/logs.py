"""logs: what the ranks of a job wrote, merged, folded, filtered; or followed."""

from __future__ import annotations

import re
import sys
import time
from typing import TYPE_CHECKING, Optional

import click

from ascendrun.cli.options import parse_since, verb

if TYPE_CHECKING:
    from ascendrun.cli.face import Face
    from ascendrun.cli.logview import LogView
    from ascendrun.cluster import JobDetail, JobView


@verb("logs", examples="""
    ascendrun logs j-0001 --tail 50
    ascendrun logs -f quickstart --rank 0,8-15
    ascendrun logs j-0001 --grep 'Traceback|Error' --since 10m -t
    ascendrun logs j-0001 --rank 3 --stream err --raw > rank3.err     # every byte as it was written
""")
@click.argument("job")
@click.option("--follow", "-f", is_flag=True, help="Go on until the job has ended; exit as it did. ^C detaches.")
@click.option("--node", metavar="NODES", help="Only these nodes: npu[01-03].")
@click.option("--rank", metavar="RANKS", help="Only these ranks: 0,8-15.")
@click.option("--stream", type=click.Choice(["out", "err", "both"]), default="both", help="Standard output or error.")
@click.option("--since", metavar="TIME", help="Only lines since: 10m (ago), 10:30, 2026-11-20T10:30.")
@click.option("--tail", "-n", type=click.IntRange(min=0), metavar="N", help="Only the last N lines of what is there.")
@click.option("--grep", metavar="REGEX", help="Only lines in which the regular expression is found.")
@click.option("--attempt", type=click.IntRange(min=1), metavar="N", help="Of this attempt.  [default: the newest]")
@click.option("--raw", is_flag=True, help="The exact bytes, rank after rank, neither merged nor folded.")
@click.option("--timestamps", "-t", is_flag=True, help="Begin each line with its arrival time on the node.")
@click.option("--no-prefix", is_flag=True, help="Lines without [ranks].")
@click.pass_obj
def command(
    face: Face, job: str, follow: bool, node: Optional[str], rank: Optional[str], stream: str, since: Optional[str],
    tail: Optional[int], grep: Optional[str], attempt: Optional[int], raw: bool, timestamps: bool, no_prefix: bool,
) -> int:
    """Print what the ranks of a job wrote, merged by time; lines that ranks share are shown once: [0-3] text."""
    if raw and (follow or grep or since or tail is not None or timestamps):
        raise click.UsageError("--raw gives exact bytes: only --node, --rank, --stream and --attempt go with it")
    if follow and attempt is not None:
        raise click.UsageError("--follow shows the newest attempt and those to come; leave --attempt out")
    view = _make_view(node, rank, stream, since, tail, grep, timestamps, no_prefix)
    detail = face.cluster.job(job)
    if follow:
        from ascendrun.cli.follow import has_ended
        from ascendrun.cli.submit import follow_to_the_end

        if not has_ended(detail.job):
            face.cluster.ensure_controller()
        return follow_to_the_end(face, detail.job.id, view=view)
    chosen = _choose_attempt(detail.job, attempt)
    if raw:
        _write_raw(face, detail.job, chosen, view)
    else:
        _print_lines(face, detail, chosen, view)
    return 0


def _make_view(
    node: Optional[str], rank: Optional[str], stream: str, since: Optional[str], tail: Optional[int],
    grep: Optional[str], timestamps: bool, no_prefix: bool,
) -> LogView:
    """Raises BadParameter naming the option whose text is wrong."""
    from ascendrun.cli.logview import LogView
    from ascendrun.core.loglines import parse_ranks
    from ascendrun.core.names import expand_names, split_list

    option = ""
    try:
        option = "--node"
        hosts = None if node is None else {name for piece in split_list(node) for name in expand_names(piece.strip())}
        option = "--rank"
        ranks = None if rank is None else parse_ranks(rank)
        option = "--since"
        since_s = None if since is None else parse_since(since, now_s=time.time())
        option = "--grep"
        pattern = None if grep is None else re.compile(grep)
    except (ValueError, re.error) as error:
        raise click.BadParameter(str(error), param_hint=option) from error
    return LogView(
        hosts=hosts, ranks=ranks, streams=("out", "err") if stream == "both" else (stream,), since_s=since_s,
        pattern=pattern, tail=tail, has_times=timestamps, has_prefix=not no_prefix,
    )


def _choose_attempt(job: JobView, attempt: Optional[int]) -> int:
    from ascendrun.core.errors import NotFound

    if attempt is not None and attempt > job.attempt:
        raise NotFound(f"{job.id} has no attempt {attempt}", hint=f"it has had {job.attempt}: ascendrun show {job.id}")
    return attempt or max(job.attempt, 1)


def _print_lines(face: Face, detail: JobDetail, attempt: int, view: LogView) -> None:
    """Streams lazily: memory does not grow with the logs, unless a filter and --tail are combined, and then by N."""
    from collections import deque

    from ascendrun.cli.logview import FOLD_WINDOW_S
    from ascendrun.core.folding import fold
    from ascendrun.core.loglines import merge
    from ascendrun.head.logreader import read_all
    from ascendrun.head.settings import spool_dir
    from ascendrun.head.spoolfiles import find_streams

    folder = spool_dir(face.settings.state_dir, detail.job.id, attempt)
    found = find_streams(folder, attempt, hosts=view.hosts, ranks=view.ranks, streams=view.streams)
    if not found:
        face.say(_why_nothing(detail, attempt, view))
        return
    tail = None if view.filters_lines else view.tail
    shown = fold(view.choose(merge(read_all(files, tail=tail) for files in found)), window_s=FOLD_WINDOW_S)
    screen = face.screen()
    for line in shown if view.tail is None else deque(shown, maxlen=view.tail):
        sys.stdout.write(view.format(line, screen) + "\n")
    if attempt > 1:
        sys.stdout.flush()
        face.say(f"this was attempt {attempt}; earlier ones: --attempt 1")


def _why_nothing(detail: JobDetail, attempt: int, view: LogView) -> str:
    job = detail.job
    if view.hosts is not None and not set(view.hosts) & set(job.hosts):
        return f"{job.id} has no such node; it runs on {', '.join(job.hosts)}"
    if view.ranks is not None and all(rank >= job.world_size for rank in view.ranks):
        return f"{job.id} has no such rank; its ranks are 0-{job.world_size - 1}"
    return f"{job.id}, attempt {attempt}: no output yet ({job.state}{': ' + job.reason if job.reason else ''})"


def _write_raw(face: Face, job: JobView, attempt: int, view: LogView) -> None:
    from ascendrun.head.settings import spool_dir
    from ascendrun.head.spoolfiles import find_streams, read_bytes

    sys.stdout.flush()
    folder = spool_dir(face.settings.state_dir, job.id, attempt)
    for files in find_streams(folder, attempt, hosts=view.hosts, ranks=view.ranks, streams=view.streams):
        for data in read_bytes(files):
            sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
