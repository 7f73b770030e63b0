"""fetch: copy files that a job left on its nodes to this machine. cp: copy files to and from hosts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ascendrun.cli.command import UsageError
from ascendrun.cli.options import cli_command, hostfile_option, output_option
from ascendrun.cli.outcome import copy_files, fetch_outputs, missing_texts, problem_hints
from ascendrun.cli.output import PEOPLE, Column, describe_memory, print_rows
from ascendrun.cluster import FetchReply
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.cli.context import CliContext


@cli_command(
    "fetch",
    examples="""
    ascendrun fetch j-0001                        # the `outputs` of its job file
    ascendrun fetch j-0001 out/best -O models     # models/out/best/…
    ascendrun fetch j-0001 'logs/**/*.csv'
""",
)
@click.argument("job")
@click.argument("paths", nargs=-1, metavar="[PATH]...")
@click.option(
    "-O",
    "--output-dir",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory on this machine.  [default: that of the job's outputs]",
)
@output_option
@click.pass_obj
def command(ctx: CliContext, job: str, paths: tuple[str, ...], output_dir: Path | None, output: str | None) -> int:
    """Fetch files that a job left on its nodes. Without a PATH: the `outputs` of its job file.

    A PATH is a file, a directory or a pattern (`**`: any depth), relative to the working directory of the ranks, or
    absolute. It is read from the host of rank 0, or with `outputs_from: all` from every host. A transfer that was cut
    off continues where it ended, and every file is verified by its hash. Exit code 4: no file matches a PATH; 6: a
    host is unreachable, or its files could not be fetched.
    """
    _check_paths(paths)
    try:
        replies = fetch_outputs(ctx, ctx.cluster.files.fetch(job, paths, into=output_dir))
    except KeyboardInterrupt:
        ctx.screen.close()
        ctx.say("fetch.detached", "detached; the transfer continues")
        ctx.hint(f"ascendrun fetch {job}")
        return 130
    say = partial(ctx.error, hint=f"ascendrun show {job}") if paths else ctx.warn
    return _print_ends(ctx, replies, output, say, missing_code=4 if paths else 0)


def _print_ends(
    ctx: CliContext, replies: list[FetchReply], output: str | None, say: Callable[[Text], None], *, missing_code: int
) -> int:
    """Print one row for each host, what is missing and the hints of problems; return the exit code."""
    columns = [
        Column("HOST", lambda reply: reply.host),
        Column("FILES", lambda reply: str(reply.files)),
        Column("SIZE", lambda reply: describe_memory(reply.done_bytes)),
        Column("DIRECTORY", lambda reply: reply.folder),
        Column("ERROR", lambda reply: str(reply.problem.message if reply.problem else "")),
    ]
    print_rows(replies, columns, output, name="hosts", kind=FetchReply)
    for missing in missing_texts(replies):
        say(missing)
    for hint in problem_hints(replies) if output in PEOPLE else ():
        ctx.hint(hint)
    if any(reply.problem is not None for reply in replies):
        return 6
    return missing_code if any(reply.missing for reply in replies) else 0


def _check_paths(paths: tuple[str, ...]) -> None:
    """Raise UsageError for a path that names what cannot be copied below a directory."""
    for path in paths:
        if not path or path.startswith("~") or ".." in path.split("/"):
            raise UsageError.of(
                "fetch.bad-path",
                "PATH {path:quote} is not supported",
                "write a path below the working directory, or an absolute path",
                path=path,
            )


REMOTE = re.compile(r"([^:/]+):(.*)", re.DOTALL)
"""A job or hosts, and a path there. A file of this machine with a colon in its name is written ./a:b."""


@cli_command(
    "cp",
    examples="""
    ascendrun cp j-0001:out/best models              # models/best/…
    ascendrun cp 'j-0001:logs/*.csv' --rank 8 .      # from the host of rank 8
    ascendrun cp tokens.bin data 'npu[01-04]:/data'  # /data/tokens.bin, /data/data/… on four hosts
    ascendrun cp patch.py j-0001:                    # into the working directory of the job's ranks
""",
)
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.argument("destination", metavar="DIRECTORY")
@click.option("--rank", type=click.IntRange(min=0), metavar="N", help="Of a job: the host of this rank.  [default: 0]")
@hostfile_option
@output_option
@click.pass_obj
def cp_command(
    ctx: CliContext,
    sources: tuple[str, ...],
    destination: str,
    rank: int | None,
    hostfile: str | None,
    output: str | None,
) -> int:
    """Copy files and directories into a directory, from hosts or to hosts.

    A file on a host is JOB:PATH or HOSTS:PATH; the other side is on this machine. PATH of a job is relative to the
    working directory of its ranks, PATH of hosts to your home directory there. Each source keeps the last part of its
    name. Directories are created, existing files are replaced. A transfer that was cut off continues where it ended,
    and every file is verified by its hash. Exit code 4: no file matches; 6: a host is unreachable, or a copy failed.
    """
    replies: list[FetchReply] = []
    try:
        for reply in _copies(ctx, sources, destination, rank, hostfile):
            replies += copy_files(ctx, reply)
    except KeyboardInterrupt:
        ctx.screen.close()
        ctx.say("cp.detached", "detached; the transfer that has started continues")
        return 130
    return _print_ends(ctx, replies, output, ctx.error, missing_code=4)


def _copies(
    ctx: CliContext, sources: tuple[str, ...], destination: str, rank: int | None, hostfile: str | None
) -> Iterator[Iterator[FetchReply]]:
    """Yield one transfer after the other. Raises UsageError before the first."""
    there, into = REMOTE.fullmatch(destination), Path(destination)
    remote = [match for match in map(REMOTE.fullmatch, sources) if match is not None]
    if bool(remote) == (there is not None) or len(remote) not in (0, len(sources)):
        raise UsageError.of(
            "cp.one-side",
            "either all sources or the directory must be on a host",
            "write JOB:PATH or HOSTS:PATH; a local file with a colon is ./a:b",
        )
    if there is not None:
        yield ctx.cluster.files.copy_to(sources, there[1], there[2] or ".", rank=rank, hostfile=hostfile)
        return
    if into.exists() and not into.is_dir():
        raise UsageError.of("cp.not-directory", "{path} is not a directory", path=destination)
    _check_paths(tuple(match[2] for match in remote))
    for match in remote:
        yield ctx.cluster.files.copy_from(match[1], match[2], into, rank=rank, hostfile=hostfile)
