"""nodes: whether hosts are reachable, and their state. drain, undrain, lost, release: change it. trust: host keys."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence

import click

from ascendrun.cli import options
from ascendrun.cli.context import CliContext, print_held, report_unreached
from ascendrun.cli.errors import describe_error
from ascendrun.cli.output import (
    PEOPLE,
    Column,
    describe_memory,
    describe_time,
    format_table,
    labelled,
    print_for_programs,
    print_rows,
)
from ascendrun.cluster import DeviceUse, HostKeyScan, HostStatus, MachineView
from ascendrun.core.errors import AscendrunError, UnreachableError
from ascendrun.core.findings import Severity
from ascendrun.core.hosts import Host
from ascendrun.core.machines import address_of
from ascendrun.text import Text
from ascendrun.text.format import fold_hosts, format_clock, grouped

TIMEOUT_S = 90.0


@options.cli_command("nodes")
@options.hostfile_option
@click.option("--hosts", "names", metavar="HOSTS", help="Only these hosts: npu[01-04] or @group.")
@click.option("--timeout", type=options.DURATIONS, help="Stop waiting when no host replies for TIME.  [default: 90s]")
@click.option("--all", "everything", is_flag=True, help="Show every known machine and its state; query none.")
@options.output_option
def command(
    ctx: CliContext,
    hostfile: str | None,
    names: str | None,
    timeout: float | None,
    everything: bool,
    output: str | None,
) -> int:
    """Show for each host whether it is reachable, its Python, CPUs, memory, disk, clock and job.

    HELD: no job starts there, since processes of an earlier job may live (unconfirmed) or do live (leftovers), or since
    it is drained or quarantined. DISK USED, with -o wide and for programs, is what ascendrun stores there for you:
    logs, working directories, checkpoints, staged code. Exit code 6: some hosts are unreachable.

    Examples:
    ascendrun nodes --hostfile hostfiles/cluster.hosts
    ascendrun nodes -H cluster.hosts --hosts 'npu[01-04]' -o wide
    ascendrun nodes --all                                # every machine that jobs have used, and its state
    """
    if everything:
        columns = [
            Column("HOST", lambda machine: ",".join(machine.names)),
            Column("STATE", lambda machine: machine.state.value),
            Column("HELD BY", lambda machine: ",".join(machine.jobs) or "-"),
            Column("SINCE", lambda machine: describe_time(machine.since_s)),
            Column("UNTIL", lambda machine: describe_time(machine.until_s), is_wide=True),
            Column("ADDRESS", lambda machine: machine.address, is_wide=True),
            Column("SEEN", lambda machine: describe_time(machine.heard_at_s or None), is_wide=True),
            Column("CHECKED", lambda machine: describe_time(machine.examined_at_s), is_wide=True),
            Column("REASON", lambda machine: str(machine.reason or machine.finding or "")),
        ]
        print_rows(ctx.cluster.hosts.machines(), columns, output, name="machines", kind=MachineView)
        return 0
    hosts = options.hosts_of(ctx, hostfile=hostfile, names=names)

    def progress(found: Sequence[HostStatus]) -> Text:
        return Text("nodes.progress", "{count} of {total} hosts replied", count=len(found), total=len(hosts))

    has_usage = output not in (None, "table")
    statuses = ctx.cluster.hosts.nodes(hosts, timeout_s=timeout or TIMEOUT_S, with_usage=has_usage)
    replies = {status.host: status for status in ctx.gather(statuses, progress)}
    rows = [replies[host.name] for host in hosts if host.name in replies]
    print_rows(rows, NODE_COLUMNS, output, name="nodes", kind=HostStatus)
    if output in PEOPLE:
        print_held(ctx, (hold for row in rows for hold in row.holds))
    return _print_unreached(ctx, rows)


@options.cli_command("release")
@click.argument("hosts", nargs=-1, required=True, metavar="HOST...")
@options.output_option
def release_command(ctx: CliContext, hosts: tuple[str, ...], output: str | None) -> int:
    """State that no process of a job is left on hosts that are held, so that jobs may start there.

    A host that responds is queried first: it is not released while it shows processes of the job (exit code 7).

    Examples:
    ascendrun release npu07               # it was replaced, or no process is left there
    ascendrun release 'npu[01-04]'
    """
    code, chosen = 0, options.parse_host_names(list(hosts))
    for host in chosen:
        try:
            ctx.cluster.hosts.release(host.name)
        except AscendrunError as error:
            ctx.echo("\n".join(describe_error(error)))
            code = code or error.exit_code
        else:
            ctx.say("release.done", "{host} released", host=host.name)
    _print_machines(ctx, chosen, output)
    return code


def _print_machines(ctx: CliContext, hosts: Iterable[Host], output: str | None) -> None:
    """Print the states of hosts for programs."""
    if output not in PEOPLE:
        names = {host.name for host in hosts}
        machines = [machine for machine in ctx.cluster.hosts.machines() if names & set(machine.names)]
        print_for_programs(machines, output, name="machines", kind=MachineView)


@options.cli_command("drain")
@click.argument("hosts", metavar="HOSTS")
@click.option("--reason", default="", metavar="TEXT", help="Shown to the jobs that wait.")
@click.option("--at", "at_s", type=options.FUTURE, help="Begin then: 2h (from now), 18:00, 2026-11-20T18:00.")
@click.option("--for", "for_s", type=options.DURATIONS, help="End the drain after TIME.  [default: undrain]")
@click.option("--now", is_flag=True, help="Stop the jobs there that may restart; they continue on other hosts.")
@options.output_option
def drain_command(
    ctx: CliContext, hosts: str, reason: str, at_s: float | None, for_s: float | None, now: bool, output: str | None
) -> None:
    """Place no new jobs on hosts. Running jobs continue.

    HOSTS are names in the hostfile of a job or of the setting: npu07 or npu[01-04]. With --now, jobs without
    restart.max_restarts keep running. With --at, jobs with a `timeouts.run_s` that ends before start there until then.
    For an administrator of a shared queue, this holds for jobs of all its users.

    Examples:
    ascendrun drain npu07 --reason optics             # running jobs continue
    ascendrun drain 'npu[01-04]' --for 2h --now       # jobs that may restart continue on other hosts
    ascendrun drain npu07 --at 18:00 --for 4h         # a maintenance window
    """
    if now and at_s is not None:
        raise options.UsageError(options.exclusive("--now", "--at"))
    until_s = None if for_s is None else (time.time() if at_s is None else at_s) + for_s
    drained = ctx.cluster.hosts.drain(hosts, reason=reason, until_s=until_s, now=now, at_s=at_s)
    names = {host.name for host in drained}
    _print_machines(ctx, drained, output)
    _report_queue(ctx, drained)
    if at_s is not None:
        ctx.say("drain.planned", "{hosts:hosts} to be drained at {at_s:clock}", hosts=sorted(names), at_s=at_s)
        return
    ctx.say("drain.done", "{hosts:hosts} drained", hosts=sorted(names))
    for machine in ctx.cluster.hosts.machines():
        if machine.state.value == "draining" and names & set(machine.names):
            ctx.say("drain.busy", "{host} is still used by {jobs}", host=machine.names[0], jobs=list(machine.jobs))


def _report_queue(ctx: CliContext, hosts: Iterable[Host]) -> bool:
    """Print to an administrator of a shared queue what a drain means for the others; return whether this user is."""
    try:
        if not ctx.cluster.queue.is_admin():
            return False
    except UnreachableError as error:  # after `lost`, which does not require the queue
        ctx.warn(error.message, error.hint)
        return False
    addresses = {address_of(host): host.name for host in hosts}
    drains = [one for one in ctx.cluster.queue.drain(()) if one.places & set(addresses)]
    unknown = sorted({name for one in drains if one.key is None for at, name in addresses.items() if at in one.places})
    ctx.say("drain.for-all", "{hosts:hosts} closed to jobs of all users of the queue", hosts=sorted(addresses.values()))
    if unknown:
        english = "{hosts:hosts} did not respond: open to users whose hostfile has another address of it"
        hint = Text("drain.not-identified.hint", "run `ascendrun drain` with the other addresses too")
        ctx.warn(Text("drain.not-identified", english, hosts=unknown), hint)
    return True


@options.cli_command("undrain")
@click.argument("hosts", metavar="HOSTS")
@click.option("--no-check", is_flag=True, help="Open the hosts without a check.")
@options.output_option
def undrain_command(ctx: CliContext, hosts: str, no_check: bool, output: str | None) -> int:
    """Place jobs on hosts again: ends a drain and a quarantine.

    The checks of `doctor --quick` run first. A host on which one fails, or that is unreachable, stays closed (exit code
    3).

    Examples:
    ascendrun undrain npu07
    ascendrun undrain 'npu[01-04]' --no-check
    """
    chosen = ctx.cluster.hosts.known(hosts)
    refused: set[str] = set()
    if not no_check:
        report, refused = ctx.cluster.checks.before_opening(chosen)
        for found in report.findings:
            if found.severity is not Severity.NOTE:
                ctx.echo(labelled(f"{found.severity.value} {found.nodes}".strip(), found.message))
    ready = [host for host in chosen if host.name not in refused]
    if ready:
        ctx.cluster.hosts.undrain(ready)
        ctx.say("undrain.done", "{hosts:hosts} open to jobs", hosts=sorted({host.name for host in ready}))
    if refused:
        ctx.error(Text("undrain.refused", "{hosts:hosts} not ready", hosts=sorted(refused)))
        ctx.hint(
            Text("undrain.refused.hint", "run `ascendrun undrain --no-check {hosts:hosts}`", hosts=sorted(refused))
        )
    _print_machines(ctx, chosen, output)
    return 3 if refused else 0


@options.cli_command("lost")
@click.argument("hosts", metavar="HOSTS")
@click.option("--reason", default="", metavar="TEXT", help="Shown with the state of the host.")
@click.option("--force", is_flag=True, help="Also hosts that respond: what runs there may damage the checkpoints.")
@options.output_option
def lost_command(ctx: CliContext, hosts: str, reason: str, force: bool, output: str | None) -> None:
    """State that hosts are gone with all their processes. Their jobs end or restart; the hosts are drained.

    State it only of hosts that are certainly off: a process that still runs there could write into the checkpoints of
    the restarted job. A host that answers within 5 s is refused (exit code 7); --force does not ask it. Only your own
    jobs end by this; for an administrator of a shared queue, the hosts are drained for all its users.

    Examples:
    ascendrun lost npu07          # powered off, or taken out of the rack
    ascendrun lost 'npu[01-04]' --reason rack3-off
    """
    gone = ctx.cluster.hosts.lost(hosts, reason=reason, force=force)
    names = sorted({host.name for host in gone})
    ctx.say("lost.done", "{hosts:hosts} lost; drained until `ascendrun undrain`", hosts=names)
    if _report_queue(ctx, gone):
        ctx.say("lost.only-own", "jobs of other users there do not end: each user runs `ascendrun lost`")
    _print_machines(ctx, gone, output)


@options.cli_command("leases")
@click.argument("hosts", nargs=-1, metavar="[HOST...]")
@options.hostfile_option
@options.output_option
def leases_command(ctx: CliContext, hosts: tuple[str, ...], hostfile: str | None, output: str | None) -> int:
    """List what uses devices and ports on each host: runs of all users and head nodes, and other processes on NPUs
    and GPUs.

    A running attempt has its devices, MASTER_PORT (port) and 32 ports of HCCL (hccl) for itself. CPUs are not leased.
    Exit code 6: some hosts are unreachable.

    Examples:
    ascendrun leases 'npu[01-04]'
    ascendrun leases -H cluster.hosts -o json
    """
    chosen = options.hosts_of(ctx, hostfile=hostfile, names=",".join(hosts) or None)
    rows, unreached = ctx.cluster.hosts.leases(chosen)
    columns = [
        Column("HOST", lambda row: row.host),
        Column("TYPE", lambda row: row.type),
        Column("ID", lambda row: row.key if row.device is None else str(row.device)),
        Column("USER", lambda row: row.user or "-"),
        Column("RUN", lambda row: row.run_id or "-"),
        Column("SINCE", lambda row: "-" if row.since_s is None else format_clock(row.since_s)),
        Column("PID", lambda row: "-" if row.pid is None else str(row.pid)),
        Column("COMMAND", lambda row: row.command or "-"),
    ]
    print_rows(rows, columns, output, name="leases", kind=DeviceUse)
    for host, why in unreached.items():
        ctx.error(Text("leases.unreachable", "{host}: {why}", host=host, why=why))
    return 6 if unreached else 0


def _print_unreached(ctx: CliContext, rows: Sequence[HostStatus]) -> int:
    """Print each hint a single time, for all its hosts."""
    missed = [row for row in rows if not row.reachable]
    if not missed:
        return 0
    message = Text(
        "nodes.unreachable",
        "{count} of {total} hosts unreachable: {hosts:hosts}",
        count=len(missed),
        total=len(rows),
        hosts=tuple(row.host for row in missed),
    )
    ctx.error(message)
    for hint, names in grouped((str(row.hint), row.host) for row in missed if row.hint).items():
        ctx.hint(labelled(fold_hosts(names), hint))
    return 6


REACHABLE = Text("nodes.state-reachable", "reachable")
UNREACHABLE = Text("nodes.state-unreachable", "UNREACHABLE")


def _describe_job(status: HostStatus) -> str:
    if status.job is None and status.spare_of is not None:
        return str(Text("nodes.spare", "{job} (spare)", job=status.spare_of))
    return status.job or "-"


def _describe_held(status: HostStatus) -> str:
    states = {*(hold.state for hold in status.holds), *(closure.state for closure in status.closures)}
    return ",".join(sorted(state.value for state in states)) or "-"


def _describe_clock(status: HostStatus) -> str:
    return "-" if status.clock_offset_s is None else f"{status.clock_offset_s * 1000:+.0f} ms"


NODE_COLUMNS = (
    Column("HOST", lambda status: status.host),
    Column("STATE", lambda status: str(REACHABLE if status.reachable else UNREACHABLE)),
    Column("HOSTNAME", lambda status: status.hostname or "-", is_wide=True),
    Column("PYTHON", lambda status: status.python_version or "-"),
    Column("CPUS", lambda status: "-" if status.cpus is None else str(status.cpus)),
    Column("MEMORY", lambda status: describe_memory(status.memory_bytes)),
    Column("DISK FREE", lambda status: describe_memory(status.free_bytes)),
    Column("DISK USED", lambda status: describe_memory(status.used_bytes), is_wide=True),
    Column("CLOCK", _describe_clock, is_wide=True),
    Column("JOB", _describe_job),
    Column("HELD", _describe_held),
    Column("ERROR", lambda status: str(status.error or "")),
)


@options.cli_command("trust")
@click.argument("hosts", nargs=-1, metavar="[HOSTS]...")
@options.hostfile_option
@click.option("--yes", "-y", is_flag=True, help="Record the keys without confirmation.")
@click.option("--replace", is_flag=True, help="Replace a recorded key that differs.")
@click.option("--print", "prints", is_flag=True, help="Print the keys as known_hosts lines; record nothing.")
def trust_command(
    ctx: CliContext, hosts: tuple[str, ...], hostfile: str | None, yes: bool, replace: bool, prints: bool
) -> int:
    """Show the SSH host keys (SHA256 fingerprints) of hosts and record them after confirmation.

    Compare with `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` on the console of the host.

    Examples:
    ascendrun trust --hostfile hostfiles/cluster.hosts
    ascendrun trust 'npu[01-16]' --yes            # in a script, where the network is trusted
    ascendrun trust --replace npu07               # after it was reinstalled
    """
    chosen = [host for host in _choose(ctx, hosts, hostfile) if not host.is_local]
    scans = _scan(ctx, chosen)
    _show(scans, prints=prints)
    if not prints:
        _record(ctx, scans, yes=yes, replaces=replace)
    return _print_unscanned(ctx, scans, replaces=replace or prints)


def _choose(ctx: CliContext, names: tuple[str, ...], hostfile: str | None) -> tuple[Host, ...]:
    if hostfile is None:
        return options.parse_host_names(list(names)) if names else options.hosts_of(ctx, hostfile=None)
    return ctx.cluster.hosts.select(",".join(names) or None, hostfile=hostfile)


def _scan(ctx: CliContext, hosts: Sequence[Host]) -> list[HostKeyScan]:
    """Return one scan for each host, in their order."""

    def progress(found: Sequence[HostKeyScan]) -> Text:
        return Text("trust.progress", "{done}/{count} hosts responded", done=len(found), count=len(hosts))

    scans = {scan.host.name: scan for scan in ctx.gather(ctx.cluster.hosts.scan_keys(hosts), progress)}
    return [scans[host.name] for host in hosts]


def _show(scans: Sequence[HostKeyScan], *, prints: bool) -> None:
    if prints:
        for scan in scans:
            if scan.key is not None:
                print(f"{scan.known_name} {scan.key.type} {scan.key.base64}")
        return
    columns = [
        Column("HOST", lambda scan: scan.host.name),
        Column("TYPE", lambda scan: "-" if scan.key is None else scan.key.short_type),
        Column("FINGERPRINT", lambda scan: "-" if scan.key is None else scan.key.fingerprint),
        Column("STATE", lambda scan: scan.state),
    ]
    print(format_table(scans, columns), end="", flush=True)


def _record(ctx: CliContext, scans: Sequence[HostKeyScan], *, yes: bool, replaces: bool) -> None:
    """Record new keys, and with `replaces` changed ones. Raises UsageError where stdin is not a terminal."""
    chosen = [scan for scan in scans if scan.state == "new" or (replaces and scan.state == "CHANGED")]
    if not chosen:
        return
    if not yes:
        if not sys.stdin.isatty():
            message = Text("trust.confirm-needed", "{count:plural key keys} not recorded", count=len(chosen))
            raise options.UsageError(message, hint=Text("trust.add-yes", "compare the fingerprints, then add --yes"))
        question = Text("trust.confirm", "Record {count:plural key keys}?", count=len(chosen))
        if not click.confirm(str(question), err=True):
            ctx.say("trust.nothing", "no key was recorded")
            return
    ctx.cluster.hosts.record_keys(chosen, replaces=replaces)
    ctx.say("trust.recorded", "recorded {count:plural key keys}", count=len(chosen))


def _print_unscanned(ctx: CliContext, scans: Sequence[HostKeyScan], *, replaces: bool) -> int:
    """Return 0; 5 when no host was reached or a key has changed; 6 when some hosts were not reached."""
    code = report_unreached(ctx, (scan.error for scan in scans if scan.error is not None), len(scans))
    changed = [scan.host.name for scan in scans if scan.state == "CHANGED"]
    if changed and not replaces:
        message = Text("trust.changed", "{hosts:hosts}: the host key differs from the recorded one", hosts=changed)
        command = f"ascendrun trust --replace {' '.join(changed)}"
        ctx.error(message, Text("trust.replace", "if the host was reinstalled: {command}", command=command))
        return 5
    return code
