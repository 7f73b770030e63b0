"""trust: show the SSH host keys of hosts, and record them after confirmation."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from ascendrun.cli.command import UsageError
from ascendrun.cli.options import cli_command, hostfile_option, hosts_of, parse_host_names
from ascendrun.cli.output import Column, format_table
from ascendrun.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ascendrun.cli.context import CliContext
    from ascendrun.cluster import HostKeyScan
    from ascendrun.core.hosts import Host


@cli_command(
    "trust",
    examples="""
    ascendrun trust --hostfile hostfiles/cluster.hosts
    ascendrun trust 'npu[01-16]' --yes            # in a script, where the network is trusted
    ascendrun trust --replace npu07               # after it was reinstalled
""",
)
@click.argument("hosts", nargs=-1, metavar="[HOSTS]...")
@hostfile_option
@click.option("--yes", "-y", is_flag=True, help="Record the keys without confirmation.")
@click.option("--replace", is_flag=True, help="Replace a recorded key that differs.")
@click.option("--print", "prints", is_flag=True, help="Print the keys as known_hosts lines; record nothing.")
@click.pass_obj
def command(
    ctx: CliContext, hosts: tuple[str, ...], hostfile: str | None, yes: bool, replace: bool, prints: bool
) -> int:
    """Show the SSH host keys (SHA256 fingerprints) of hosts and record them after confirmation.

    Compare with `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` on the console of the host.
    """
    chosen = [host for host in _choose(ctx, hosts, hostfile) if not host.is_local]
    scans = _scan(ctx, chosen)
    _show(scans, prints=prints)
    if not prints:
        _record(ctx, scans, yes=yes, replaces=replace)
    return _print_unreached(ctx, scans, replaces=replace or prints)


def _choose(ctx: CliContext, names: tuple[str, ...], hostfile: str | None) -> tuple[Host, ...]:
    if hostfile is None:
        return parse_host_names(list(names)) if names else hosts_of(ctx, hostfile=None)
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
    sys.stdout.write(
        format_table(
            scans,
            [
                Column("HOST", lambda scan: scan.host.name),
                Column("TYPE", lambda scan: "-" if scan.key is None else scan.key.short_type),
                Column("FINGERPRINT", lambda scan: "-" if scan.key is None else scan.key.fingerprint),
                Column("STATE", lambda scan: scan.state),
            ],
        )
    )
    sys.stdout.flush()


def _record(ctx: CliContext, scans: Sequence[HostKeyScan], *, yes: bool, replaces: bool) -> None:
    """Record new keys, and with `replaces` changed ones. Raises UsageError where stdin is not a terminal."""
    chosen = [scan for scan in scans if scan.state == "new" or (replaces and scan.state == "CHANGED")]
    if not chosen:
        return
    if not yes:
        if not sys.stdin.isatty():
            message = Text("trust.confirm-needed", "{count:plural key keys} not recorded", count=len(chosen))
            raise UsageError(message, hint=Text("trust.add-yes", "compare the fingerprints, then add --yes"))
        question = Text("trust.confirm", "Record {count:plural key keys}?", count=len(chosen))
        if not click.confirm(str(question), err=True):
            ctx.say("trust.nothing", "no key was recorded")
            return
    ctx.cluster.hosts.record_keys(chosen, replaces=replaces)
    ctx.say("trust.recorded", "recorded {count:plural key keys}", count=len(chosen))


def _print_unreached(ctx: CliContext, scans: Sequence[HostKeyScan], *, replaces: bool) -> int:
    """Return 0; 5 when no host was reached or a key has changed; 6 when some hosts were not reached."""
    missed = [scan for scan in scans if scan.error is not None]
    for scan in missed:
        assert scan.error is not None
        ctx.error(scan.error.message, scan.error.hint)
    changed = [scan.host.name for scan in scans if scan.state == "CHANGED"]
    if changed and not replaces:
        message = Text("trust.changed", "{hosts:hosts}: the host key differs from the recorded one", hosts=changed)
        command = f"ascendrun trust --replace {' '.join(changed)}"
        ctx.error(message, Text("trust.replace", "if the host was reinstalled: {command}", command=command))
        return 5
    if not missed:
        return 0
    return 5 if len(missed) == len(scans) else 6
