"""nodes: ask hosts how they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ascendrun.cli.options import Duration, cli_command, hostfile_option, hosts_of, output_option

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
    ascendrun nodes -H cluster.hosts --on 'npu[01-04]' -o wide
""",
)
@hostfile_option
@click.option("--on", "names", metavar="HOSTS", help="Only these: npu[01-04] or @group.")
@click.option("--timeout", type=Duration(), metavar="TIME", help="At most so long until the next answer.")
@output_option
@click.pass_obj
def command(ctx: CliContext, hostfile: str | None, names: str | None, timeout: float | None, output: str | None) -> int:
    """Ask every host how it is: reached or why not, Python, memory, disk, clock, job.

    Exits 6 when some do not answer.
    """
    from ascendrun.cli.output import print_rows
    from ascendrun.cluster import HostStatus

    hosts = hosts_of(ctx, hostfile=hostfile, names=names)
    screen = ctx.screen()
    answers: dict[str, HostStatus] = {}
    try:
        for status in ctx.cluster.nodes(hosts, timeout_s=timeout or TIMEOUT_S):
            answers[status.host] = status
            screen.progress(f"{len(answers)} of {len(hosts)} hosts answered")
    finally:
        screen.close()
    rows = [answers[host.name] for host in hosts if host.name in answers]
    print_rows(rows, node_columns(), output, name="nodes", kind=HostStatus)
    return _tell_unreached(ctx, rows)


def _tell_unreached(ctx: CliContext, rows: Sequence[HostStatus]) -> int:
    """Each way out is said once, for all hosts that share it."""
    from ascendrun.core.names import fold_names

    missed = [row for row in rows if not row.reachable]
    if not missed:
        return 0
    hints: dict[str, list[str]] = {}
    for row in missed:
        if row.hint:
            hints.setdefault(row.hint, []).append(row.host)
    ctx.echo(f"error: {len(missed)} of {len(rows)} not reached: {fold_names(row.host for row in missed)}")
    for hint, names in hints.items():
        ctx.echo(f"hint: {fold_names(names)}: {hint}")
    return 6


def node_columns() -> list[Column]:
    from ascendrun.cli.output import Column, describe_memory

    def clock(status: HostStatus) -> str:
        return "-" if status.clock_offset_s is None else f"{status.clock_offset_s * 1000:+.0f} ms"

    return [
        Column("HOST", lambda status: status.host),
        Column("STATE", lambda status: "reached" if status.reachable else "UNREACHED"),
        Column("HOSTNAME", lambda status: status.hostname or "-", is_wide=True),
        Column("PYTHON", lambda status: status.python_version or "-"),
        Column("CPUS", lambda status: "-" if status.cpus is None else str(status.cpus)),
        Column("MEMORY", lambda status: describe_memory(status.memory_bytes)),
        Column("DISK FREE", lambda status: describe_memory(status.free_bytes)),
        Column("CLOCK", clock, is_wide=True),
        Column("JOB", lambda status: status.job or "-"),
        Column("WHY", lambda status: status.error or ""),
    ]
