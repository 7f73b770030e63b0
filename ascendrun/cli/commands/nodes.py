"""nodes: show whether hosts are reachable, and their state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ascendrun.cli.options import Duration, cli_command, hostfile_option, hosts_of, output_option
from ascendrun.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ascendrun.cli.context import CliContext
    from ascendrun.cli.output import Column
    from ascendrun.cluster import HostStatus

TIMEOUT_S = 90.0


@cli_command(
    "nodes",
    examples="""
    ascendrun nodes --hostfile hostfiles/cluster.hosts
    ascendrun nodes -H cluster.hosts --hosts 'npu[01-04]' -o wide
""",
)
@hostfile_option
@click.option("--hosts", "names", metavar="HOSTS", help="Only these hosts: npu[01-04] or @group.")
@click.option(
    "--timeout", type=Duration(), metavar="TIME", help="Stop waiting when no host replies for TIME.  [default: 90s]"
)
@output_option
@click.pass_obj
def command(ctx: CliContext, hostfile: str | None, names: str | None, timeout: float | None, output: str | None) -> int:
    """Show for each host whether it is reachable, its Python, CPUs, memory, disk, clock and job.

    Exit code 6: some hosts are unreachable.
    """
    from ascendrun.cli.output import print_rows
    from ascendrun.cluster import HostStatus

    hosts = hosts_of(ctx, hostfile=hostfile, names=names)
    screen = ctx.screen()
    replies: dict[str, HostStatus] = {}
    try:
        for status in ctx.cluster.nodes(hosts, timeout_s=timeout or TIMEOUT_S):
            replies[status.host] = status
            progress = Text("nodes.progress", "{count} of {total} hosts replied", count=len(replies), total=len(hosts))
            screen.progress(str(progress))
    finally:
        screen.close()
    rows = [replies[host.name] for host in hosts if host.name in replies]
    print_rows(rows, node_columns(), output, name="nodes", kind=HostStatus)
    return _print_unreached(ctx, rows)


def _print_unreached(ctx: CliContext, rows: Sequence[HostStatus]) -> int:
    """Print each hint a single time, for all its hosts."""
    from ascendrun.cli.output import labelled
    from ascendrun.text.format import fold_hosts

    missed = [row for row in rows if not row.reachable]
    if not missed:
        return 0
    hints: dict[str, list[str]] = {}
    for row in missed:
        if row.hint:
            hints.setdefault(str(row.hint), []).append(row.host)
    message = Text(
        "nodes.unreachable",
        "{count} of {total} hosts unreachable: {hosts:hosts}",
        count=len(missed),
        total=len(rows),
        hosts=tuple(row.host for row in missed),
    )
    ctx.error(message)
    for hint, names in hints.items():
        ctx.hint(labelled(fold_hosts(names), hint))
    return 6


REACHABLE = Text("nodes.state-reachable", "reachable")
UNREACHABLE = Text("nodes.state-unreachable", "UNREACHABLE")


def node_columns() -> list[Column]:
    from ascendrun.cli.output import Column, describe_memory

    def clock(status: HostStatus) -> str:
        return "-" if status.clock_offset_s is None else f"{status.clock_offset_s * 1000:+.0f} ms"

    return [
        Column("HOST", lambda status: status.host),
        Column("STATE", lambda status: str(REACHABLE if status.reachable else UNREACHABLE)),
        Column("HOSTNAME", lambda status: status.hostname or "-", is_wide=True),
        Column("PYTHON", lambda status: status.python_version or "-"),
        Column("CPUS", lambda status: "-" if status.cpus is None else str(status.cpus)),
        Column("MEMORY", lambda status: describe_memory(status.memory_bytes)),
        Column("DISK FREE", lambda status: describe_memory(status.free_bytes)),
        Column("CLOCK", clock, is_wide=True),
        Column("JOB", lambda status: status.job or "-"),
        Column("ERROR", lambda status: str(status.error or "")),
    ]
