"""fetch: copy files that a job left on its nodes to this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ascendrun.cli.options import cli_command, output_option
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
    from ascendrun.cli.output import PEOPLE, Column, describe_memory, print_rows
    from ascendrun.cli.outputs import fetch_outputs, missing_text
    from ascendrun.cluster import FetchReply

    _check_paths(paths)
    screen = ctx.screen()
    try:
        replies = fetch_outputs(ctx.cluster.fetch(job, paths, into=output_dir), screen)
    except KeyboardInterrupt:
        screen.close()
        ctx.echo(Text("fetch.detached", "detached; the transfer continues"))
        ctx.hint(f"ascendrun fetch {job}")
        return 130
    columns = [
        Column("HOST", lambda reply: reply.host),
        Column("FILES", lambda reply: str(reply.files)),
        Column("SIZE", lambda reply: describe_memory(reply.done_bytes)),
        Column("DIRECTORY", lambda reply: reply.folder),
        Column("ERROR", lambda reply: str(reply.problem.message if reply.problem else "")),
    ]
    print_rows(replies, columns, output, name="hosts", kind=FetchReply)
    for reply in replies:
        if reply.missing:
            (ctx.error if paths else ctx.warn)(missing_text(reply), f"ascendrun show {job}" if paths else None)
        if reply.problem is not None and reply.problem.hint is not None and output in PEOPLE:
            ctx.hint(reply.problem.hint)
    if any(reply.problem is not None for reply in replies):
        return 6
    return 4 if paths and any(reply.missing for reply in replies) else 0


def _check_paths(paths: tuple[str, ...]) -> None:
    """Raise UsageError for a path that names what cannot be copied below a directory."""
    from ascendrun.cli.command import UsageError

    for path in paths:
        if not path or path.startswith("~") or ".." in path.split("/"):
            raise UsageError(
                Text("fetch.bad-path", "PATH {path:quote} is not supported", path=path),
                hint=Text("fetch.bad-path.hint", "write a path below the working directory, or an absolute path"),
            )
