"""trust: show the SSH host keys of hosts, and record them once a person has agreed."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ascendrun.cli.command import UsageError
from ascendrun.cli.options import cli_command, hostfile_option, parse_host_words, read_hostfile
from ascendrun.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ascendrun.backends.ssh import SshBackend
    from ascendrun.cli.context import CliContext
    from ascendrun.core.errors import AscendrunError
    from ascendrun.core.hosts import Host
    from ascendrun.head.ssh.host_keys import HostKey

AT_ONCE = 32


@dataclass(frozen=True)
class Scan:
    """What one host showed. `key` None: `error` says why. `state`: new, known or CHANGED."""

    host: Host
    key: HostKey | None
    state: str
    error: AscendrunError | None


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
    from ascendrun.backends import Backends

    chosen = [host for host in _choose(ctx, hosts, hostfile) if not host.is_local]
    backends = Backends(ctx.settings)
    backend = backends.ssh()
    try:
        scans = _scan_all(ctx, backend, chosen)
        _show(backend, scans, prints=prints)
        if not prints:
            _record(ctx, backend, scans, yes=yes, replace=replace)
    finally:
        backends.close()
    return _print_unreached(ctx, scans, replaced=replace or prints)


def _choose(ctx: CliContext, words: tuple[str, ...], hostfile: str | None) -> tuple[Host, ...]:
    from ascendrun.core.hosts import select_hosts

    if hostfile is None:
        from ascendrun.cli.options import hosts_of

        return parse_host_words(list(words)) if words else hosts_of(ctx, hostfile=None)
    known = read_hostfile(Path(hostfile))
    return select_hosts(known, ",".join(words)) if words else known


def _scan_all(ctx: CliContext, backend: SshBackend, hosts: Sequence[Host]) -> list[Scan]:
    from concurrent.futures import ThreadPoolExecutor, as_completed

    screen = ctx.screen()
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        futures = {pool.submit(_scan, backend, host): index for index, host in enumerate(hosts)}
        for done, _future in enumerate(as_completed(futures), start=1):
            progress = Text("trust.progress", "{done}/{count} hosts responded", done=done, count=len(hosts))
            screen.progress(str(progress))
    screen.close()
    return [future.result() for future in futures]


def _scan(backend: SshBackend, host: Host) -> Scan:
    from ascendrun.core.errors import AscendrunError
    from ascendrun.head.ssh.transport import Deadlines

    try:
        key = backend.scan_host_key(host, deadlines=Deadlines())
    except AscendrunError as error:
        return Scan(host, None, "unreached", error)
    recorded = backend.recorded(backend.resolve(host)).keys
    if not recorded:
        return Scan(host, key, "new", None)
    return Scan(host, key, "known" if any(one.key == key for one in recorded) else "CHANGED", None)


def _show(backend: SshBackend, scans: Sequence[Scan], *, prints: bool) -> None:
    from ascendrun.backends.ssh import known_names
    from ascendrun.cli.output import Column, format_table

    if prints:
        for scan in scans:
            if scan.key is not None:
                print(f"{known_names(backend.resolve(scan.host))[0]} {scan.key.type} {scan.key.base64}")
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


def _record(ctx: CliContext, backend: SshBackend, scans: Sequence[Scan], *, yes: bool, replace: bool) -> None:
    """Records what is new, and with `replace` what has changed. Raises UsageError where stdin is no terminal."""
    wanted = [scan for scan in scans if scan.state == "new" or (replace and scan.state == "CHANGED")]
    if not wanted:
        return
    if not yes:
        if not sys.stdin.isatty():
            message = Text("trust.confirm-needed", "{count:plural key keys} not recorded", count=len(wanted))
            raise UsageError(message, hint=Text("trust.add-yes", "compare the fingerprints, then add --yes"))
        question = Text("trust.confirm", "Record {count:plural key keys}?", count=len(wanted))
        if not click.confirm(str(question), err=True):
            ctx.echo(Text("trust.nothing", "no key was recorded"))
            return
    for scan in wanted:
        assert scan.key is not None
        backend.record_host_key(scan.host, scan.key, replace=replace)
    ctx.echo(Text("trust.recorded", "recorded {count:plural key keys}", count=len(wanted)))


def _print_unreached(ctx: CliContext, scans: Sequence[Scan], *, replaced: bool) -> int:
    """0; 5 when no host was reached or a key has changed; 6 when some hosts were not reached."""
    missed = [scan for scan in scans if scan.error is not None]
    for scan in missed:
        assert scan.error is not None
        ctx.error(scan.error.message, scan.error.hint)
    changed = [scan.host.name for scan in scans if scan.state == "CHANGED"]
    if changed and not replaced:
        message = Text("trust.changed", "{hosts:hosts}: the host key differs from the recorded one", hosts=changed)
        command = f"ascendrun trust --replace {' '.join(changed)}"
        ctx.error(message, Text("trust.replace", "if the host was reinstalled: {command}", command=command))
        return 5
    if not missed:
        return 0
    return 5 if len(missed) == len(scans) else 6
