"""metrics: what top shows, for Prometheus: served on this machine, written to a file, or printed."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ascendrun.cli.options import Duration, cli_command, hostfile_option

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from prometheus_client import CollectorRegistry

    from ascendrun.cli.context import CliContext
    from ascendrun.core.samples import DeviceDetail
    from ascendrun.health.top.view import TopView

LISTEN = "127.0.0.1:9478"
EVERY_S = 15.0


@cli_command(
    "metrics",
    examples="""
    ascendrun metrics                                           # http://127.0.0.1:9478/metrics until ^C
    ascendrun metrics --textfile /var/lib/node_exporter/ascendrun.prom --every 30s
    ascendrun metrics --once | grep ascendrun_job_step
    ascendrun metrics --grafana > ascendrun.json                # a dashboard to import
""",
)
@hostfile_option
@click.option("--listen", metavar="HOST:PORT", help=f"Serve there; there is no password.  [default: {LISTEN}]")
@click.option(
    "--textfile",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="PATH",
    help="Write this file again and again instead, for node_exporter's textfile collector.",
)
@click.option("--every", type=Duration(), metavar="TIME", help="How often the file is written.  [default: 15s]")
@click.option("--once", is_flag=True, help="Print the text, or write the file, once and end.")
@click.option("--grafana", is_flag=True, help="Print a Grafana dashboard of these metrics and end.")
@click.pass_obj
def command(
    ctx: CliContext,
    hostfile: str | None,
    listen: str | None,
    textfile: Path | None,
    every: float | None,
    once: bool,
    grafana: bool,
) -> int:
    """Give Prometheus what top shows: npu-exporter's names for NPUs, ascendrun_* for jobs, ranks, hosts, devices.

    What is not known is absent.
    """
    if grafana:
        sys.stdout.write(dashboard_file().read_text(encoding="utf-8"))
        return 0
    if listen is not None and (textfile is not None or once):
        raise click.UsageError("--listen serves; leave it out with --textfile and --once")
    address, port = parse_listen(listen or LISTEN)
    registry = make_registry(ctx, hostfile)
    if textfile is not None:
        return write_file(registry, textfile, every_s=None if once else every or EVERY_S)
    if once:
        from prometheus_client import generate_latest

        sys.stdout.write(generate_latest(registry).decode())
        return 0
    return serve(ctx, registry, address, port)


def dashboard_file() -> Path:
    from ascendrun.cli.templates import skeletons_root

    return skeletons_root() / "templates" / "grafana" / "ascendrun.json"


def parse_listen(text: str) -> tuple[str, int]:
    """127.0.0.1:9478, [::1]:9478, :9478 (this machine only) or 9478. Raises UsageError."""
    host, colon, port = text.rpartition(":")
    if not port.isascii() or not port.isdigit() or int(port) > 65535 or (host and not colon):
        raise click.UsageError(f"--listen {text}: not HOST:PORT, such as {LISTEN}")
    return host.strip("[]") or "127.0.0.1", int(port)


def make_registry(ctx: CliContext, hostfile: str | None) -> CollectorRegistry:
    from ascendrun.cli.options import hosts_of
    from ascendrun.head.state.sample_details import read_details
    from ascendrun.health.top.join import STALE_S
    from ascendrun.query.prometheus import make_registry
    from ascendrun.query.top_source import TopSource

    hosts = hosts_of(ctx, hostfile=hostfile) if hostfile is not None else ()
    source = TopSource(ctx.cluster, hosts)

    def look() -> tuple[TopView, Mapping[str, int], Sequence[DeviceDetail]]:
        view, state_dir = source.look(now_s=time.time()), ctx.settings.state_dir
        return (
            view,
            ctx.cluster.count_states(),
            () if view.samples_error else read_details(state_dir, since_s=view.at_s - STALE_S),
        )

    return make_registry(look)


def serve(ctx: CliContext, registry: CollectorRegistry, address: str, port: int) -> int:
    """Until ^C. Raises CannotListen."""
    from prometheus_client import start_http_server

    from ascendrun.core.errors import ConflictError

    try:
        server, thread = start_http_server(port, addr=address, registry=registry)
    except OSError as error:
        raise ConflictError(
            f"cannot listen on {address}:{port}: {error.strerror or error}",
            hint="another exporter may run there; --listen 127.0.0.1:PORT takes another port",
        ) from error
    where = f"[{address}]" if ":" in address else address
    ctx.echo(f"http://{where}:{server.server_port}/metrics  (^C ends)")
    if not is_loopback(address):
        ctx.echo("this can be read from other machines, without a password: job and host names, figures")
    try:
        thread.join()
    except KeyboardInterrupt:
        ctx.echo("ended")
    finally:
        server.shutdown()
        server.server_close()
    return 0


def is_loopback(address: str) -> bool:
    import ipaddress

    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def write_file(
    registry: CollectorRegistry, path: Path, *, every_s: float | None, wait: Callable[[float], object] | None = None
) -> int:
    """Written beside and renamed, so no reader sees half a file. `every_s` None: once. Raises InvalidInputError."""
    from prometheus_client import generate_latest

    from ascendrun.core.errors import InvalidInputError, Problem
    from ascendrun.core.output_file import write_bytes

    wait = wait or threading.Event().wait
    try:
        while True:
            try:
                write_bytes(path, generate_latest(registry))
            except OSError as error:
                raise InvalidInputError(
                    [
                        Problem(
                            str(path),
                            None,
                            None,
                            f"cannot be written: {error.strerror}",
                            "give a file in a folder that you may write to",
                        )
                    ]
                ) from error
            if every_s is None:
                return 0
            wait(every_s)
    except KeyboardInterrupt:
        return 0
