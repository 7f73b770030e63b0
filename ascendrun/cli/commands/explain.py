"""explain: find the first failing rank, the cause, the confidence and a fix."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from ascendrun.cli.options import cli_command, output_option

if TYPE_CHECKING:
    from ascendrun.cli.context import CliContext


@cli_command(
    "explain",
    examples="""
    ascendrun explain j-0001
    ascendrun explain finetune --attempt 1 --all
    ascendrun explain j-0001 --collect         # first fetch kernel, device and CANN logs from the nodes
    ascendrun explain j-0001 -o json | jq -r '.diagnosis.code, .diagnosis.confidence'
""",
)
@click.argument("job")
@click.option("--attempt", type=click.IntRange(min=1), metavar="N", help="Attempt to explain.  [default: the newest]")
@click.option("--all", "everything", is_flag=True, help="Show all evidence and all consequences, uncut.")
@click.option("--collect", is_flag=True, help="First fetch kernel, device and CANN logs from the nodes.")
@output_option
@click.pass_obj
def command(ctx: CliContext, job: str, attempt: int | None, everything: bool, collect: bool, output: str | None) -> int:
    """Find the first failing rank, the cause, the confidence and a fix.

    The ends of all other ranks are shown as consequences. The confidence is "certain", "likely" or "unknown". For a
    running job, anomalies are shown. Exits 0; 4 if the job does not exist.
    """
    from ascendrun.cli.output import print_record
    from ascendrun.text import Text

    if collect:
        from ascendrun.cli.output import labelled

        for host, problem in ctx.cluster.collect(job, attempt=attempt):
            ctx.echo(
                labelled(host, problem)
                if problem
                else str(Text("explain.collected", "{host}: logs collected", host=host))
            )
    explanation = ctx.cluster.explain(job, attempt=attempt)
    if not print_record(explanation, output):
        from ascendrun.cli.explain_view import print_explanation

        print_explanation(explanation, color=ctx.has_color(sys.stdout), everything=everything or output == "wide")
    return 0
