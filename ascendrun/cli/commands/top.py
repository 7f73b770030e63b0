"""top: every device, the rank on it, and stragglers; once or live. metrics: the same for Prometheus."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ascendrun.cli import options
from ascendrun.cli.context import CliContext
from ascendrun.cli.listening import cannot_listen, is_loopback
from ascendrun.cli.output import format_record, format_records, terminal_width, write_file
from ascendrun.cli.top.records import ROW_NAMES, row_record, view_record
from ascendrun.cli.top.text import run_plain, top_lines
from ascendrun.core.hosts import Host
from ascendrun.health.top.view import SORTS, Choice, Order, arrange, matches_host
from ascendrun.text import Text

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from ascendrun.cluster import TopSource

INTERVAL_S = 2.0


@options.cli_command("top")
@click.argument("names", nargs=-1, metavar="[HOSTS]...")
@options.hostfile_option
@click.option("--once", is_flag=True, help="Print once and exit; the default when stdout is not a terminal.")
@click.option("--job", metavar="JOB", help="Only the devices and ranks of this job.")
@click.option(
    "--problems",
    is_flag=True,
    help="Only rows with problems: health, link, slow rank, external process, unreachable host.",
)
@click.option("--sort", "by", type=click.Choice(list(SORTS)), default="host", help="Sort order.  [default: host]")
@click.option("--by-host", is_flag=True, help="One line per host, with the utilisation of each device.")
@click.option("--interval", type=options.DURATIONS, help="Refresh interval of the live view.  [default: 2s]")
@options.output_option
def command(
    ctx: CliContext,
    names: tuple[str, ...],
    hostfile: str | None,
    once: bool,
    job: str | None,
    problems: bool,
    by: str,
    by_host: bool,
    interval: float | None,
    output: str | None,
) -> int:
    """Show every device of every host: utilisation, memory, power, health, and the rank on it with its step time.

    Unknown values show as "-". HOSTS: names (npu[01-04], @group of the hostfile) or globs. Hosts that are named or in
    the hostfile are queried when they run no job. Exits 6 when a queried host does not respond.

    Examples:
    ascendrun top                                  # live; press ? for the keys
    ascendrun top --once -H cluster.hosts          # print once; also queries hosts without a job
    ascendrun top --job qwen32b --sort step        # the slowest rank first
    ascendrun top --once --problems 'npu0*'        # only rows with problems
    ascendrun top --once -o json | jq '.rows[] | select(.health != "OK")'
    """
    hosts, globs = choose_hosts(ctx, hostfile, names)
    choice = Choice(job=_job_of(ctx, job) if job is not None else None, hosts=globs, only_problems=problems)
    order = Order(by, by_host=by_host)
    source = ctx.cluster.samples.top(hosts)
    if once or output is not None or not sys.stdout.isatty() or ctx.environ.get("TERM") == "dumb":
        return print_once(ctx, source, choice, order, output=output)
    return run_live(ctx, source, choice, order, interval_s=interval or INTERVAL_S)


def _job_of(ctx: CliContext, ref: str) -> str:
    """Return the id of the job, with a message if it has ended. Raises NotFoundError."""
    job = ctx.cluster.jobs.detail(ref).job
    if job.ended_at_s is not None:
        ended = Text("top.job-ended", "{job} has ended ({state})", job=job.id, state=job.state)
        ctx.echo(f"{ended}: ascendrun report {job.id}")
    return job.id


def choose_hosts(
    ctx: CliContext, hostfile: str | None, names: tuple[str, ...]
) -> tuple[tuple[Host, ...], tuple[str, ...]]:
    """Return the hosts to query, and the names or globs of the hosts to show (none: all)."""
    globs = tuple(name for name in names if "*" in name or "?" in name)
    plain = [name for name in names if name not in globs]
    has_file = hostfile is not None or ctx.settings.hostfile is not None
    if not has_file:
        hosts = options.parse_host_names(plain) if plain else ()
        return hosts, (*globs, *(host.name for host in hosts))
    if not names:
        return options.hosts_of(ctx, hostfile=hostfile), ()
    hosts = options.hosts_of(ctx, hostfile=hostfile, names=",".join(plain)) if plain else ()
    every = options.hosts_of(ctx, hostfile=hostfile) if globs else ()
    hosts = (*hosts, *(host for host in every if host not in hosts and matches_host(host.name, globs)))
    return hosts, (*globs, *(host.name for host in hosts))


def print_once(ctx: CliContext, source: TopSource, choice: Choice, order: Order, *, output: str | None) -> int:
    screen = ctx.screen
    if source.needs_query(now_s=time.time()):
        screen.progress(str(Text("top.querying", "querying hosts without a job")))
    try:
        view = arrange(source.refresh_once(now_s=time.time()), choice, order)
    finally:
        screen.close()
    if output in (None, "table", "wide"):
        width = terminal_width(output)
        lines = top_lines(
            view, width=width, color=ctx.has_color(sys.stdout), is_wide=output == "wide", by_host=order.by_host
        )
        sys.stdout.write("\n".join(lines) + "\n")
    else:
        assert output is not None
        rows = [row_record(row) for row in view.rows]
        sys.stdout.write(
            format_record(view_record(view, rows), output)
            if output in ("json", "yaml")
            else format_records(rows, output, name="rows", names=ROW_NAMES)
        )
    if view.samples_error is not None:
        ctx.say("top.samples-error", "error: cannot read samples: {error}", error=view.samples_error)
    return 6 if any(host.why == "no-reply" for host in view.hosts) else 0


def run_live(ctx: CliContext, source: TopSource, choice: Choice, order: Order, *, interval_s: float) -> int:
    """Run the interactive view if textual is installed, else a plain view that is redrawn."""
    try:
        from ascendrun.cli.top.app import run_app
    except ImportError:
        return run_plain(ctx, source, choice, order, interval_s=interval_s)
    return run_app(ctx, source, choice, order, interval_s=interval_s)


LISTEN = "127.0.0.1:9478"
FILE_INTERVAL_S = 15.0


@options.cli_command("metrics")
@options.hostfile_option
@click.option("--listen", metavar="HOST:PORT", help=f"Address to serve on, without a password.  [default: {LISTEN}]")
@click.option(
    "--textfile",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="PATH",
    help="Write this file repeatedly instead, for the textfile collector of node_exporter.",
)
@click.option("--interval", type=options.DURATIONS, help="Interval at which the file is written.  [default: 15s]")
@click.option("--once", is_flag=True, help="Print the metrics, or write the file, once and exit.")
@click.option(
    "--grafana",
    type=click.Choice(["cluster", "job", "node", "alerts"]),
    help="Print a Grafana dashboard of these metrics, or alert rules of Prometheus, and exit.",
)
def metrics_command(
    ctx: CliContext,
    hostfile: str | None,
    listen: str | None,
    textfile: Path | None,
    interval: float | None,
    once: bool,
    grafana: str | None,
) -> int:
    """Export the data of top to Prometheus: names of npu-exporter for NPUs, ascendrun_* for everything else.

    Unknown values are absent.

    Examples:
    ascendrun metrics                                           # http://127.0.0.1:9478/metrics until ^C
    ascendrun metrics --textfile /var/lib/node_exporter/ascendrun.prom --interval 30s
    ascendrun metrics --once | grep ascendrun_job_step
    ascendrun metrics --grafana cluster > cluster.json          # a dashboard to import; also job, node
    ascendrun metrics --grafana alerts > alerts.yml             # alert rules
    """
    if grafana:
        sys.stdout.write(ctx.cluster.samples.dashboard(grafana))
        return 0
    if listen is not None and (textfile is not None or once):
        message = Text("metrics.listen-conflict", "--listen cannot be combined with --textfile or --once")
        raise options.UsageError(message, hint=Text("metrics.listen-conflict-hint", "remove --listen"))
    address, port = parse_listen(listen or LISTEN)
    registry = ctx.cluster.samples.prometheus(options.hosts_of(ctx, hostfile=hostfile) if hostfile is not None else ())
    if textfile is not None:
        return write_repeatedly(registry, textfile, interval_s=None if once else interval or FILE_INTERVAL_S)
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
        raise options.UsageError(message, hint=Text("metrics.listen-hint", "use --listen {address}", address=LISTEN))
    return host.strip("[]") or "127.0.0.1", int(port)


def serve(ctx: CliContext, registry: CollectorRegistry, address: str, port: int) -> int:
    """Serve until ^C. Raises ConflictError when the address is in use."""
    from prometheus_client import start_http_server

    try:
        server, thread = start_http_server(port, addr=address, registry=registry)
    except OSError as error:
        raise cannot_listen(address, port, error, instead="--listen 127.0.0.1:PORT") from error
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


def write_repeatedly(registry: CollectorRegistry, path: Path, *, interval_s: float | None) -> int:
    """Replace the complete file at each interval; None: a single time. Raises InvalidInputError."""
    from prometheus_client import generate_latest

    wait = threading.Event().wait
    try:
        while True:
            write_file(path, generate_latest(registry))
            if interval_s is None:
                return 0
            wait(interval_s)
    except KeyboardInterrupt:
        return 0
