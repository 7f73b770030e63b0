"""exec: run one command on many hosts; identical output is printed once."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import click

from ascendrun.cli.context import CliContext
from ascendrun.cli.options import DURATIONS, cli_command, hostfile_option, hosts_of, output_option
from ascendrun.cli.output import PEOPLE, format_many, sanitise
from ascendrun.cluster import ExecResult
from ascendrun.text import Text
from ascendrun.text.format import fold_hosts, grouped

RULE = "-" * 15


@cli_command("exec", takes_command=True)
@hostfile_option
@click.option("--hosts", "names", metavar="HOSTS", help="Run on these hosts only: npu[01-04] or @group.")
@click.option("--timeout", type=DURATIONS, help="Limit of the time on each host.  [default: 60s]")
@output_option
@click.argument("argv", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
def command(
    ctx: CliContext,
    hostfile: str | None,
    names: str | None,
    timeout: float | None,
    output: str | None,
    argv: tuple[str, ...],
) -> int:
    """Run COMMAND on all hosts in parallel, without a shell. Identical output is printed once.

    Exits 0 when the command exited 0 on every host, else 6; the hosts that failed are listed.

    Examples:
    ascendrun exec -H hostfiles/cluster.hosts -- uname -r
    ascendrun exec -H cluster.hosts --hosts 'npu[01-04]' --timeout 5m -- bash -c 'df -h /data | tail -1'
    """
    hosts = hosts_of(ctx, hostfile=hostfile, names=names)
    results = _collect(ctx, ctx.cluster.hosts.execute(hosts, argv, timeout_s=timeout), [host.name for host in hosts])

    if output is None or output in PEOPLE:
        _print_folded(results)
    else:
        sys.stdout.write(format_many(results, output, name="results", kind=ExecResult))
    return _print_failures(ctx, results)


def _collect(ctx: CliContext, replies: Iterable[ExecResult], names: Sequence[str]) -> list[ExecResult]:
    """Return every result in the order of the hosts; missing hosts are shown at the bottom of the terminal."""

    def progress(found: Sequence[ExecResult]) -> Text | str:
        done = {result.host for result in found}
        values = {"done": len(done), "count": len(names), "hosts": [name for name in names if name not in done]}
        text = Text("exec.progress", "{done}/{count} done, waiting for {hosts:hosts}", **values)
        return text if values["hosts"] else ""

    found = {result.host: result for result in ctx.gather(replies, progress)}
    return [found[name] for name in names if name in found]


def _print_folded(results: Sequence[ExecResult]) -> None:
    """Print standard output to stdout, standard error to stderr, each under its hosts, the largest group first."""
    for stream, outputs in (
        (sys.stdout, [(one.stdout, one.host) for one in results]),
        (sys.stderr, [(one.stderr, one.host) for one in results]),
    ):
        groups = grouped(output for output in outputs if output[0])
        for text, names in sorted(groups.items(), key=lambda group: -len(group[1])):
            count = f" ({len(names)})" if len(names) > 1 else ""
            kind = " stderr" if stream is sys.stderr else ""
            body = sanitise(text.decode("utf-8", "replace")).rstrip("\n")
            stream.write(f"{RULE}\n{fold_hosts(names)}{count}{kind}\n{RULE}\n{body}\n")
        stream.flush()


def _print_failures(ctx: CliContext, results: Sequence[ExecResult]) -> int:
    reasons: dict[tuple[Text | str, bool], list[str]] = {}
    for result in results:
        if result.exit_code is None:
            reason = result.error or Text("exec.no-response", "no response")
            reasons.setdefault((reason, result.error_host == result.host), []).append(result.host)
        elif result.exit_code != 0:
            reason = Text("exec.exit-code", "exit code {code}", code=result.exit_code)
            reasons.setdefault((reason, False), []).append(result.host)
    for (reason, is_named), names in reasons.items():
        message = Text("cli.at", "{place}: {message}", place=fold_hosts(names), message=reason)
        ctx.error(reason if is_named else message)
    failed = sum(len(names) for names in reasons.values())
    if failed and len(results) > 1:
        ctx.say("exec.failed", "{failed} of {count} hosts failed", failed=failed, count=len(results))
    return 6 if failed else 0
