"""exec: run one command on many hosts; what several answer alike is shown once."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

from ascendrun.cli.options import Duration, cli_command, hostfile_option, hosts_of, output_option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ascendrun.cli.context import CliContext
    from ascendrun.cluster import ExecResult

RULE = "-" * 15
PROGRESS_S = 0.1
"""Between two folds of the names that are still awaited: one for each of hundreds of answers took longer than they."""


@cli_command(
    "exec",
    examples="""
    ascendrun exec -H hostfiles/cluster.hosts -- uname -r
    ascendrun exec -H cluster.hosts --on 'npu[01-04]' --timeout 5m -- bash -c 'df -h /data | tail -1'
""",
    takes_command=True,
)
@hostfile_option
@click.option("--on", "names", metavar="HOSTS", help="Only these: npu[01-04] or @group; without a hostfile: any names.")
@click.option("--timeout", type=Duration(), metavar="TIME", help="At most so long on each host.  [default: 60s]")
@output_option
@click.argument("argv", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
@click.pass_obj
def command(
    ctx: CliContext,
    hostfile: str | None,
    names: str | None,
    timeout: float | None,
    output: str | None,
    argv: tuple[str, ...],
) -> int:
    """Run COMMAND on every host at once, through no shell. Identical output is shown once under the folded names.

    Exits 0 when it was 0 everywhere, else 6, naming the hosts that failed.
    """
    hosts = hosts_of(ctx, hostfile=hostfile, names=names)
    timeout_s = ctx.settings.timeout_s if timeout is None else timeout
    results = _collect(ctx, ctx.cluster.execute(hosts, argv, timeout_s=timeout_s), [host.name for host in hosts])
    if output in (None, "table", "wide"):
        _print_folded(results)
    else:
        from ascendrun.cli.output import format_many
        from ascendrun.cluster import ExecResult

        assert output is not None
        sys.stdout.write(format_many(results, output, name="results", kind=ExecResult))
    return _tell_failures(ctx, results)


def _collect(ctx: CliContext, answers: object, names: Sequence[str]) -> list[ExecResult]:
    """Every answer in the order of the hosts; who is missing shows at the bottom of the terminal meanwhile."""
    from collections.abc import Iterable

    from ascendrun.core.names import fold_names

    assert isinstance(answers, Iterable)
    screen = ctx.screen()
    shown_s = 0.0
    found: dict[str, ExecResult] = {}
    try:
        for result in answers:
            found[result.host] = result
            if not screen.is_live or time.monotonic() - shown_s < PROGRESS_S:
                continue
            waiting = [name for name in names if name not in found]
            screen.progress(f"{len(found)}/{len(names)} done, waiting for {fold_names(waiting)}" if waiting else "")
            shown_s = time.monotonic()
    finally:
        screen.close()
    return [found[name] for name in names if name in found]


def _print_folded(results: Sequence[ExecResult]) -> None:
    """Standard output to stdout, standard error to stderr, each under the names that share it."""
    from ascendrun.cli.sanitise import sanitise
    from ascendrun.core.names import fold_names

    for stream, outputs in (
        (sys.stdout, [(one.stdout, one.host) for one in results]),
        (sys.stderr, [(one.stderr, one.host) for one in results]),
    ):
        for text, names in group_by_text(outputs):
            count = f" ({len(names)})" if len(names) > 1 else ""
            kind = " stderr" if stream is sys.stderr else ""
            body = sanitise(text.decode("utf-8", "replace")).rstrip("\n")
            stream.write(f"{RULE}\n{fold_names(names)}{count}{kind}\n{RULE}\n{body}\n")
        stream.flush()


def group_by_text(outputs: Sequence[tuple[bytes, str]]) -> list[tuple[bytes, list[str]]]:
    """Hosts that said the same together, the largest group first; who said nothing is left out."""
    groups: dict[bytes, list[str]] = {}
    for text, host in outputs:
        if text:
            groups.setdefault(text, []).append(host)
    return sorted(groups.items(), key=lambda group: -len(group[1]))


def _tell_failures(ctx: CliContext, results: Sequence[ExecResult]) -> int:
    from ascendrun.core.names import fold_names

    reasons: dict[str, list[str]] = {}
    for one in results:
        if one.exit_code is None:
            reasons.setdefault(one.error or "it gave no answer", []).append(one.host)
        elif one.exit_code != 0:
            reasons.setdefault(f"exit code {one.exit_code}", []).append(one.host)
    for reason, names in reasons.items():
        ctx.echo(f"error: {fold_names(names)}: {reason}")
    failed = sum(len(names) for names in reasons.values())
    if failed and len(results) > 1:
        ctx.echo(f"{failed} of {len(results)} hosts failed")
    return 6 if failed else 0
