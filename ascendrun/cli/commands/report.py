"""report: timeline, time use and cost of a job: a page, a picture, data, a few lines. export: its metrics."""

from __future__ import annotations

import sys
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ascendrun.cli import output as out
from ascendrun.cli.context import CliContext
from ascendrun.cli.options import UsageError, cli_command, exclusive, output_option
from ascendrun.cli.report import page
from ascendrun.cli.report.picture import make_picture
from ascendrun.health.report.time_use import USES
from ascendrun.text import Text
from ascendrun.text.format import fold_hosts

if TYPE_CHECKING:
    from ascendrun.health.report.data import Report


@cli_command("report")
@click.argument("job")
@click.option(
    "-O",
    "--output-file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Page to write, - for stdout.  [default: JOB-report.html]",
)
@click.option(
    "--png",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Picture to write; without -O no page is written.",
)
@output_option
def command(ctx: CliContext, job: str, output_file: Path | None, png: Path | None, output: str | None) -> None:
    """Report on one job in one HTML file: training, time, cost, events, and why it failed.

    The file needs no network and no other file. The report of a live job is up to now. That of a pipeline has the
    scores of every stage, and the rest of its current one.

    Examples:
    ascendrun report j-0001                            # writes j-0001-report.html, prints a summary
    ascendrun report qwen32b -O qwen.html --lang zh    # by name: the newest job of that name
    ascendrun report j-0001 --png j-0001.png           # as a picture (needs matplotlib: pip install 'ascendrun[plot]')
    ascendrun report j-0002                            # of a pipeline: with the scores of its stages
    ascendrun report j-0001 -o json                    # the same as data; writes no file
    """
    report = ctx.cluster.diagnosis.report(job)
    if output is None and output_file is None and png is None:
        output_file = Path(f"{report.id}-report.html")
    if png is not None:
        _write(ctx, png, make_picture(report))
    if output_file is not None:
        content = page.make_page(report).encode()
        if str(output_file) == "-":
            sys.stdout.buffer.write(content)
            return
        _write(ctx, output_file, content)
    if not out.print_record(report, output):
        sys.stdout.write(describe_report(report))


@cli_command("export")
@click.argument("job")
@click.option(
    "--format",
    "file_format",
    type=click.Choice(["csv", "parquet", "tensorboard", "mlflow"]),
    default="tensorboard",
    help="What to write.  [default: tensorboard]",
)
@click.option(
    "-O",
    "--output-file",
    "into",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="File, or directory of tensorboard and mlflow.  [default: JOB.csv, runs; MLflow's own store]",
)
@click.option("--follow", "-f", is_flag=True, help="Write on until the job has ended (tensorboard, mlflow).")
def export_command(ctx: CliContext, job: str, file_format: str, into: Path | None, follow: bool) -> None:
    """Write the metrics of a job for TensorBoard, MLflow or a table.

    The training needs no change: the metrics are those of `report`, also those that were read from its output. Steps
    that a later attempt repeated are those of the later attempt. A stage of a pipeline is a run. A repeated export of a
    job replaces the first.

    Examples:
    ascendrun export j-0001                          # runs/j-0001; open it: tensorboard --logdir runs
    ascendrun export qwen32b --follow                # of a running job, until it ends
    ascendrun export j-0001 --format mlflow -O exp   # open it: mlflow ui --backend-store-uri sqlite:///exp/mlflow.db
    ascendrun export j-0001 --format csv -O loss.csv
    """
    if follow and file_format in ("csv", "parquet"):
        raise UsageError(exclusive("--follow", f"--format {file_format}"))
    where = ctx.cluster.jobs.find(job).export(file_format, into, follow=follow)
    ctx.say("report.written", "wrote {path}", path=where)


def _write(ctx: CliContext, path: Path, content: bytes) -> None:
    out.write_file(path, content)
    ctx.say("report.written", "wrote {path}", path=str(path))


def describe_report(report: Report) -> str:
    """Return the summary for a terminal: main values, diagnosis, time use, notes."""
    pairs = [
        (str(Text("report.job", "job")), f"{out.named(report.id, report.name)} {report.state}"),
        ("", page.describe_place(report)),
        *((out.cut(label, 60), value) for value, label in page.list_tiles(report)),
    ]
    if report.diagnosis is not None:
        found = report.diagnosis
        pairs.append((str(page.LABELS["diagnosis"]), f"{found.message} [{page.describe_confidence(found)}]"))
        pairs += page.list_diagnosis(found)
    time_use = out.format_table(
        [it for it in report.time if it.seconds],
        [
            out.Column(str(page.LABELS["time"]).upper(), lambda it: str(USES[it.use].name)),
            out.Column(str(page.LABELS["duration"]).upper(), lambda it: page.duration(it.seconds)),
            out.Column(str(page.LABELS["ratio"]).upper(), lambda it: page.percent(it.ratio)),
        ],
    )
    caveats = "".join(f"{page.describe_caveat(caveat)}\n" for caveat in report.caveats)
    stages = out.format_table(
        [page.stage_cells(row) for row in report.stages],
        [out.Column(str(page.LABELS[name]).upper(), itemgetter(name)) for name in page.STAGE_COLUMNS],
    )
    parts = (out.format_pairs(pairs), time_use, stages if report.stages else "", _describe_attempts(report), caveats)
    return "\n".join(part for part in parts if part)


def _describe_attempts(report: Report) -> str:
    """Return a table of the attempts whose ranks ran, "" if the job had only one."""
    rows = [row for row in report.attempts if row.ran_s or row.failure is not None]
    cells = {
        "attempt": lambda row: str(row.attempt),
        "nodes": lambda row: fold_hosts(row.hosts),
        "ran": lambda row: page.duration(row.ran_s),
        "steps": lambda row: page.describe_steps(row.first_step, row.last_step),
        "resumed": lambda row: page.count(row.resumed),
        "lost_steps": lambda row: page.count(row.lost_steps),
        "cause": lambda row: out.describe_attempt_failure(row.failure),
    }
    columns = [out.Column(str(page.LABELS[name]).upper(), cell) for name, cell in cells.items()]
    return out.format_table(rows, columns) if len(rows) > 1 else ""
