"""fetch: copy files of a job to this machine. cp: to and from hosts. bundle: for support. shell: next to a rank."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ascendrun.cli.context import CliContext
from ascendrun.cli.options import Parsed, UsageError, check_alone, cli_command, hostfile_option, output_option
from ascendrun.cli.outcome import copy_files, fetch_outputs, missing_texts, problem_hints, refused_texts
from ascendrun.cli.output import PEOPLE, Column, describe_memory, format_table, print_rows
from ascendrun.cluster import FetchReply
from ascendrun.text import Text

if TYPE_CHECKING:  # a bundle needs the store
    from ascendrun.cluster import Bundle


@cli_command("fetch")
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
def command(ctx: CliContext, job: str, paths: tuple[str, ...], output_dir: Path | None, output: str | None) -> int:
    """Fetch files that a job left on its nodes. Without a PATH: the `outputs` of its job file.

    A PATH is a file, a directory or a pattern (`**`: any depth), relative to the working directory of the ranks, or
    absolute. It is read from the host of rank 0, or with `outputs_from: all` from every host. A transfer that was cut
    off continues where it ended, and every file is verified by its hash. Exit code 4: no file matches a PATH; 6: a
    host is unreachable, or its files could not be fetched.

    Examples:
    ascendrun fetch j-0001                        # the `outputs` of its job file
    ascendrun fetch j-0001 out/best -O models     # models/out/best/…
    ascendrun fetch j-0001 'logs/**/*.csv'
    """
    _check_paths(paths)
    try:
        replies = fetch_outputs(ctx, ctx.cluster.files.fetch(job, paths, into=output_dir))
    except KeyboardInterrupt:
        return ctx.detach(Text("fetch.detached", "detached; the transfer continues"), f"fetch {job}")
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
    for refused in refused_texts(replies):
        ctx.warn(refused)
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


@cli_command("cp")
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.argument("destination", metavar="DIRECTORY")
@click.option("--rank", type=click.IntRange(min=0), metavar="N", help="Of a job: the host of this rank.  [default: 0]")
@hostfile_option
@output_option
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

    Examples:
    ascendrun cp j-0001:out/best models              # models/best/…
    ascendrun cp 'j-0001:logs/*.csv' --rank 8 .      # from the host of rank 8
    ascendrun cp tokens.bin data 'npu[01-04]:/data'  # /data/tokens.bin, /data/data/… on four hosts
    ascendrun cp patch.py j-0001:                    # into the working directory of the job's ranks
    """
    replies: list[FetchReply] = []
    try:
        for reply in _copies(ctx, sources, destination, rank, hostfile):
            replies += copy_files(ctx, reply)
    except KeyboardInterrupt:
        return ctx.detach(Text("cp.detached", "detached; the transfer that has started continues"))
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


LISTED_LEFT_OUT = 30


def parse_size(text: str) -> int:
    """Return the bytes of 100M, 2G, 500K or plain bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", text.strip(), re.I)
    if not found:
        expected = "expected a size such as 500K, 100M or 2G, got {value:quote}"
        raise ValueError(str(Text("cli.bad-size", expected, value=text)))
    return int(float(found.group(1)) * 1024 ** " KMG".index(found.group(2).upper() or " "))


@cli_command("bundle")
@click.argument("job")
@click.option(
    "-O", "--output-file", "path", metavar="FILE.tar.gz", help="Write this file.  [default: LAYOUT-JOB.tar.gz]"
)
@click.option(
    "--layout",
    type=click.Choice(["ascendrun", "ascend-fd"]),
    default="ascendrun",
    show_default=True,
    help="Choose the layout of the archive.",
)
@click.option("--no-logs", is_flag=True, help="Omit the output of the ranks.")
@click.option(
    "--max-size",
    type=Parsed("size", parse_size),
    default="100M",
    show_default=True,
    metavar="SIZE",
    help="Limit the size before compression; the middle of long files is removed.",
)
@click.option("--dry-run", is_flag=True, help="List the contents; write nothing.")
def bundle_command(
    ctx: CliContext, job: str, path: str | None, layout: str, no_logs: bool, max_size: int, dry_run: bool
) -> int:
    """Pack the records of a job into one archive: state, events, logs, samples, diagnosis.

    Credentials are masked, by value and by form. MANIFEST.json in the archive lists the size of each file, whether it
    was truncated, and how many values were masked. Check the archive before you send it.

    Examples:
    ascendrun bundle j-0007                        # ascendrun-j-0007.tar.gz
    ascendrun bundle j-0007 --dry-run              # list the contents; write nothing
    ascendrun bundle j-0007 -O /tmp/for-support.tar.gz --max-size 20M --no-logs
    ascendrun bundle j-0007 --layout ascend-fd     # input of Huawei's `ascend-fd parse`
    """

    check_alone("--layout ascend-fd", {"--no-logs": no_logs and layout == "ascend-fd"})
    bundle = ctx.cluster.diagnosis.bundle(
        job,
        path=Path(path) if path else None,
        layout=layout,
        with_logs=not no_logs,
        max_bytes=max_size,
        is_dry=dry_run,
        environ=ctx.environ,
    )
    _print_bundle(ctx, bundle)
    return 0 if all(result.code == 0 for result in bundle.parsed) else 6


def _print_bundle(ctx: CliContext, bundle: Bundle) -> None:
    contents = bundle.contents
    columns = [
        Column("FILE", lambda one: one.name),
        Column("SIZE", lambda one: describe_memory(one.bytes)),
        Column("OF", lambda one: describe_memory(one.of_bytes) if one.is_cut else "-"),
        Column("REDACTED", lambda one: str(one.redactions) if one.redactions else "-"),
    ]
    print(format_table(contents.packed, columns), end="", flush=True)
    for what, why in contents.left_out[:LISTED_LEFT_OUT]:
        ctx.say("bundle.skipped", "skipped: {what}: {why}", what=what, why=why)
    if len(contents.left_out) > LISTED_LEFT_OUT:
        more = len(contents.left_out) - LISTED_LEFT_OUT
        ctx.say("bundle.skipped-more", "skipped: {count} more, listed in MANIFEST.json", count=more)
    ctx.say(
        "bundle.summary",
        "{files:plural file files}, {size:bytes}; {secrets:plural secret secrets} masked in"
        " {places:plural place places}",
        files=len(contents.packed),
        size=sum(packed.bytes for packed in contents.packed),
        secrets=contents.secrets,
        places=sum(packed.redactions for packed in contents.packed),
    )
    if bundle.path is None:
        ctx.say("bundle.dry-run", "dry run: no file was written")
        return
    ctx.say(
        "bundle.written",
        "wrote {path} ({size:bytes}, sha256 {sha256})",
        path=str(bundle.path),
        size=bundle.archive_bytes,
        sha256=bundle.sha256,
    )
    ctx.hint(Text("bundle.check", "check the archive before you send it; some secrets may not be recognised"))
    for result in bundle.parsed:
        if result.code == 0:
            ctx.say("bundle.parsed", "ascend-fd parse succeeded on the logs of {node}", node=result.node)
        else:
            failed = Text(
                "bundle.parse-failed",
                "ascend-fd parse of the logs of {node}: {why}",
                node=result.node,
                why=result.output,
            )
            ctx.error(failed)
    if bundle.parsed_dir is not None:
        ctx.hint(f"ascend-fd diag -i {bundle.parsed_dir} -o REPORT_DIR")


@cli_command("shell")
@click.argument("job")
@click.option("--rank", type=click.IntRange(min=0), default=0, metavar="N", help="Rank.  [default: 0]")
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
def shell_command(ctx: CliContext, job: str, rank: int, argv: tuple[str, ...]) -> int:
    """Open a shell on the host of a running rank, with its environment and in its directory.

    The shell is not a part of the job: it is not stopped with it, and it has no ASCENDRUN_RUN_ID and no
    ASCENDRUN_METRICS_FILE. With COMMAND this is run instead of a shell. Exits with the exit code of the shell or the
    command. Exit code 4: the job has no such rank; 5: its host is unreachable; 7: the rank does not run.

    Examples:
    ascendrun shell j-0001 --rank 3
    ascendrun shell j-0001 -- py-spy dump --pid 4711
    ascendrun shell j-0001 --rank 3 -- python -c 'import torch; print(torch.__file__)'
    """
    has_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    line = ctx.cluster.files.shell(job, rank, argv, has_terminal=has_terminal)
    sys.stdout.flush()
    process = subprocess.Popen(line)
    while True:
        try:
            code = process.wait()
            return code if code >= 0 else 128 - code
        except KeyboardInterrupt:  # ^C is for what runs there
            continue
