"""top: every NPU of every host, whose rank is on it, and what is slow; once, or again and again."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

from ascendrun.cli.options import Duration, cli_command, hostfile_option, output_option
from ascendrun.cli.top.order import SORT_NAMES, Order, arrange

if TYPE_CHECKING:
    from ascendrun.cli.context import CliContext
    from ascendrun.core.hosts import Host
    from ascendrun.health.top.rows import Choice
    from ascendrun.health.top.view import TopView
    from ascendrun.insight import TopSource

EVERY_S = 2.0


@cli_command(
    "top",
    examples="""
    ascendrun top                                  # live; q ends, ? shows the keys
    ascendrun top --once -H cluster.hosts          # one print, hosts without a job are asked too
    ascendrun top --job qwen32b --sort step        # the slowest rank first
    ascendrun top --once --bad 'npu0*'             # only what is not well
    ascendrun top --once -o json | jq '.rows[] | select(.health != "OK")'
""",
)
@click.argument("names", nargs=-1, metavar="[HOSTS]...")
@hostfile_option
@click.option("--once", is_flag=True, help="Print once and end; so it is too where stdout is no terminal.")
@click.option("--job", metavar="JOB", help="Only the devices and ranks of this job.")
@click.option("--bad", is_flag=True, help="Only what is not well: health, link, slow, foreign processes, silent hosts.")
@click.option("--sort", "by", type=click.Choice(SORT_NAMES), default="host", help="Order of the rows.  [default: host]")
@click.option("--by-host", is_flag=True, help="A line a host, with the load of each of its devices.")
@click.option("--every", type=Duration(), metavar="TIME", help="How often the live view looks.  [default: 2s]")
@click.option("--lang", type=click.Choice(["en", "zh"]), help="Language of the words.  [default: the locale's]")
@output_option
@click.pass_obj
def command(
    ctx: CliContext,
    names: tuple[str, ...],
    hostfile: str | None,
    once: bool,
    job: str | None,
    bad: bool,
    by: str,
    by_host: bool,
    every: float | None,
    lang: str | None,
    output: str | None,
) -> int:
    """Show every device of every host: load, memory, power, health, whose rank is on it, its step time beside others'.

    What is not known shows as "-". HOSTS: names (npu[01-04], @group of the hostfile) or globs. Hosts that are named or
    stand in the hostfile, and hold no job, are asked anew. Exits 6 when some of those gave no answer.
    """
    from ascendrun.health.texts import language_of
    from ascendrun.health.top.rows import Choice
    from ascendrun.insight import TopSource

    lang = lang or language_of(ctx.environ)
    hosts, globs = choose_hosts(ctx, hostfile, names)
    choice = Choice(job=_job_of(ctx, job) if job is not None else None, hosts=globs, only_bad=bad)
    order = Order(by, by_host=by_host)
    source = TopSource(ctx.cluster, hosts)
    if once or output is not None or not sys.stdout.isatty() or ctx.environ.get("TERM") == "dumb":
        return print_once(ctx, source, choice, order, lang=lang, output=output)
    return run_live(ctx, source, choice, order, lang=lang, every_s=every or EVERY_S)


def _job_of(ctx: CliContext, ref: str) -> str:
    """The job's id; of an ended one there is nothing to see here. Raises NotFoundError."""
    job = ctx.cluster.job(ref).job
    if job.ended_at_s is not None:
        ctx.echo(f"{job.id} has ended ({job.state}); how it went: ascendrun report {job.id}")
    return job.id


def choose_hosts(
    ctx: CliContext, hostfile: str | None, names: tuple[str, ...]
) -> tuple[tuple[Host, ...], tuple[str, ...]]:
    """The hosts that may be asked, and the names or globs of those to show (none: all)."""
    from ascendrun.cli.options import hosts_of, parse_host_words

    globs = tuple(name for name in names if "*" in name or "?" in name)
    plain = [name for name in names if name not in globs]
    has_file = hostfile is not None or ctx.settings.hostfile is not None
    if not has_file:
        hosts = parse_host_words(plain) if plain else ()
        return hosts, (*globs, *(host.name for host in hosts))
    if not names:
        return hosts_of(ctx, hostfile=hostfile), ()
    from ascendrun.health.top.rows import matches_host

    hosts = hosts_of(ctx, hostfile=hostfile, names=",".join(plain)) if plain else ()
    every = hosts_of(ctx, hostfile=hostfile) if globs else ()
    hosts = (*hosts, *(host for host in every if host not in hosts and matches_host(host.name, globs)))
    return hosts, (*globs, *(host.name for host in hosts))


def print_once(
    ctx: CliContext, source: TopSource, choice: Choice, order: Order, *, lang: str, output: str | None
) -> int:
    from ascendrun.cli.output import terminal_width
    from ascendrun.cli.top.text import top_lines
    from ascendrun.insight import ANSWER_S, LATE_S

    screen = ctx.screen()
    if source.must_ask(now_s=time.time()):
        screen.progress("asking hosts without a job")
    try:
        view = arrange(source.look(now_s=time.time(), answer_s=ANSWER_S + LATE_S), choice, order)
    finally:
        screen.close()
    if output in (None, "table", "wide"):
        width = terminal_width(output)
        lines = top_lines(
            view,
            lang=lang,
            width=width,
            color=ctx.has_color(sys.stdout),
            is_wide=output == "wide",
            by_host=order.by_host,
        )
        sys.stdout.write("\n".join(lines) + "\n")
    else:
        assert output is not None
        _write_records(view, output)
    if view.trouble is not None:
        ctx.echo(f"error: no samples: {view.trouble}")
    return 6 if any(host.why == "no-answer" for host in view.hosts) else 0


def _write_records(view: TopView, output: str) -> None:
    """json and yaml: everything; jsonl and csv: a device or rank a line."""
    from ascendrun.cli.output import format_record, format_records
    from ascendrun.cli.top.records import ROW_NAMES, row_record, view_record

    sys.stdout.write(
        format_record(view_record(view), output)
        if output in ("json", "yaml")
        else format_records([row_record(row) for row in view.rows], output, name="rows", names=ROW_NAMES)
    )


def run_live(ctx: CliContext, source: TopSource, choice: Choice, order: Order, *, lang: str, every_s: float) -> int:
    """The interactive view where textual is installed, else a plain view that is drawn anew."""
    try:
        from ascendrun.cli.top.app import run_app
    except ImportError:
        from ascendrun.cli.top.plain import run_plain

        return run_plain(ctx, source, choice, order, lang=lang, every_s=every_s)
    return run_app(ctx, source, choice, order, lang=lang, every_s=every_s)
