"""metrics: the data of top for Prometheus: served on this machine, written to a file, or printed."""

from __future__ import annotations

import ipaddress
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ascendrun.cli.command import UsageError
from ascendrun.cli.options import Duration, cli_command, hostfile_option, hosts_of
from ascendrun.cli.output import write_file
from ascendrun.core.errors import ConflictError
from ascendrun.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client import CollectorRegistry

    from ascendrun.cli.context import CliContext

LISTEN = "127.0.0.1:9478"
INTERVAL_S = 15.0


@cli_command(
    "metrics",
    examples="""
    ascendrun metrics                                           # http://127.0.0.1:9478/metrics until ^C
    ascendrun metrics --textfile /var/lib/node_exporter/ascendrun.prom --interval 30s
    ascendrun metrics --once | grep ascendrun_job_step
    ascendrun metrics --grafana > ascendrun.json                # a dashboard to import
""",
)
@hostfile_option
@click.option("--listen", metavar="HOST:PORT", help=f"Address to serve on, without a password.  [default: {LISTEN}]")
@click.option(
    "--textfile",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="PATH",
    help="Write this file repeatedly instead, for the textfile collector of node_exporter.",
)
@click.option(
    "--interval", type=Duration(), metavar="TIME", help="Interval at which the file is written.  [default: 15s]"
)
@click.option("--once", is_flag=True, help="Print the metrics, or write the file, once and exit.")
@click.option("--grafana", is_flag=True, help="Print a Grafana dashboard of these metrics and exit.")
@click.pass_obj
def command(
    ctx: CliContext,
    hostfile: str | None,
    listen: str | None,
    textfile: Path | None,
    interval: float | None,
    once: bool,
    grafana: bool,
) -> int:
    """Export the data of top to Prometheus: names of npu-exporter for NPUs, ascendrun_* for everything else.

    Unknown values are absent.
    """
    if grafana:
        sys.stdout.write(ctx.cluster.samples.dashboard())
        return 0
    if listen is not None and (textfile is not None or once):
        message = Text("metrics.listen-conflict", "--listen cannot be combined with --textfile or --once")
        raise UsageError(message, hint=Text("metrics.listen-conflict-hint", "remove --listen"))
    address, port = parse_listen(listen or LISTEN)
    registry = ctx.cluster.samples.prometheus(hosts_of(ctx, hostfile=hostfile) if hostfile is not None else ())
    if textfile is not None:
        return write_repeatedly(registry, textfile, interval_s=None if once else interval or INTERVAL_S)
    if once:
        from prometheus_client import generate_latest

        sys.stdout.write(generate_latest(registry).decode())
        return 0
    return serve(ctx, registry, address, port)


def parse_listen(address: str) -> tuple[str, int]:
    """Parse 127.0.0.1:9478, [::1]:9478, :9478 (this machine only) or 9478. Raises UsageError."""
    host, colon, port = address.rpartition(":")
    if not port.isascii() or not port.isdigit() or int(port) > 65535 or (host and not colon):
        message = Text("metrics.invalid-address", "--listen: expected HOST:PORT, got {address:quote}", address=address)
        raise UsageError(message, hint=Text("metrics.listen-hint", "use --listen {address}", address=LISTEN))
    return host.strip("[]") or "127.0.0.1", int(port)


def serve(ctx: CliContext, registry: CollectorRegistry, address: str, port: int) -> int:
    """Serve until ^C. Raises ConflictError when the address is in use."""
    from prometheus_client import start_http_server

    try:
        server, thread = start_http_server(port, addr=address, registry=registry)
    except OSError as error:
        raise ConflictError.of(
            "metrics.cannot-listen",
            "cannot listen on {address}:{port}: {error}",
            "set another port: --listen 127.0.0.1:PORT",
            address=address,
            port=port,
            error=error.strerror or str(error),
        ) from error
    where = f"[{address}]" if ":" in address else address
    url = f"http://{where}:{server.server_port}/metrics"
    ctx.say("metrics.serving", "{url}  (^C stops)", url=url)
    if not is_loopback(address):
        warning = Text(
            "metrics.not-loopback",
            "warning: other machines can read job names, host names and metrics there without a password",
        )
        ctx.echo(str(warning))
    try:
        thread.join()
    except KeyboardInterrupt:
        ctx.say("metrics.stopped", "stopped")
    finally:
        server.shutdown()
        server.server_close()
    return 0


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def write_repeatedly(
    registry: CollectorRegistry, path: Path, *, interval_s: float | None, wait: Callable[[float], object] | None = None
) -> int:
    """Replace the complete file at each interval; None: a single time. Raises InvalidInputError."""
    from prometheus_client import generate_latest

    wait = wait or threading.Event().wait
    try:
        while True:
            write_file(path, generate_latest(registry))
            if interval_s is None:
                return 0
            wait(interval_s)
    except KeyboardInterrupt:
        return 0
