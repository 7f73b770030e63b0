"""report: what a job did, where its time went, what it cost: a page, a picture, data, a few lines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ascendrun.cli.options import cli_command, output_option

if TYPE_CHECKING:
    from ascendrun.cli.context import CliContext
    from ascendrun.health.report.data import Report


@cli_command(
    "report",
    examples="""
    ascendrun report j-0001                            # j-0001-report.html here, and the sum of it on the screen
    ascendrun report qwen32b --out qwen.html --lang zh # by name: the newest of that name
    ascendrun report j-0001 --png j-0001.png           # as a picture (needs matplotlib: pip install 'ascendrun[plot]')
    ascendrun report j-0001 -o json                    # the same as data; writes no file
""",
)
@click.argument("job")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Where the page goes; - for stdout.  [default: JOB-report.html here]",
)
@click.option(
    "--png",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write a picture; a page as well only with --out.",
)
@click.option("--lang", type=click.Choice(["en", "zh"]), help="Language of page and picture.  [default: the locale's]")
@output_option
@click.pass_obj
def command(ctx: CliContext, job: str, out: Path | None, png: Path | None, lang: str | None, output: str | None) -> int:
    """Report on one job: training, time, cost, story, in one HTML file that needs nothing else.

    Of a job that is under way: its story so far. Where the time went sums to the time since its submission.
    """
    from ascendrun.text import language_of

    lang = lang or language_of(ctx.environ)
    report = ctx.cluster.report(job)
    if output is None and out is None and png is None:
        out = Path(f"{report.id}-report.html")
    if png is not None:
        from ascendrun.cli.report.picture import make_picture

        write_file(png, make_picture(report, lang=lang))
        ctx.echo(f"{png} written")
    if out is not None:
        from ascendrun.cli.report.page import make_page

        page = make_page(report, lang=lang).encode()
        if str(out) == "-":
            sys.stdout.buffer.write(page)
            return 0
        write_file(out, page)
        ctx.echo(f"{out} written; it needs no network and no other file")
    if output in (None, "table", "wide"):
        sys.stdout.write(describe_report(report, lang=lang))
    else:
        from ascendrun.cli.output import format_one

        assert output is not None
        sys.stdout.write(format_one(report, output))
    return 0


def write_file(path: Path, content: bytes) -> None:
    """Write through links and devices, see core/output_file. Raises InvalidInputError naming the file."""
    from ascendrun.core.errors import InvalidInputError, Problem
    from ascendrun.core.output_file import write_bytes
    from ascendrun.text import Text

    try:
        write_bytes(path, content)
    except OSError as error:
        message = Text("cli.cannot-write", "cannot write: {reason}", reason=error.strerror or str(error))
        raise InvalidInputError([Problem(str(path), None, None, message)]) from error


def describe_report(report: Report, *, lang: str) -> str:
    """The figures and where the time went, for a terminal."""
    from ascendrun.cli.output import Column, cut, format_pairs, format_table
    from ascendrun.cli.report.page import duration, list_tiles, percent
    from ascendrun.cli.report.words import Words
    from ascendrun.core.names import fold_names

    words = Words(lang)
    pairs = [
        (words("job"), f"{report.id} ({report.name}) {report.state}"),
        ("", words("on", hosts=fold_names(report.hosts), ranks=report.world_size)),
        *((cut(label, 60), value) for value, label in list_tiles(report, words)),
    ]
    spent = format_table(
        [one for one in report.time if one.seconds],
        [
            Column(words("time").upper(), lambda one: words(f"use-{one.use}")),
            Column(words("col-time").upper(), lambda one: duration(one.seconds)),
            Column(words("col-share").upper(), lambda one: percent(one.share)),
        ],
    )
    doubts = "".join(f"{words('doubt-' + doubt.code, **doubt.values)}\n" for doubt in report.doubts)
    return "\n".join(part for part in (format_pairs(pairs), spent, doubts) if part)
