"""explain: which rank failed first, why, on what evidence, and what to do."""

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
    ascendrun explain j-0001 --gather          # first bring kernel, device and CANN logs from the nodes
    ascendrun explain j-0001 -o json | jq -r '.diagnosis.code, .diagnosis.confidence'
""",
)
@click.argument("job")
@click.option("--attempt", type=click.IntRange(min=1), metavar="N", help="This attempt.  [default: the newest]")
@click.option("--all", "everything", is_flag=True, help="All evidence and every link of the chain, no cuts.")
@click.option("--gather", is_flag=True, help="First ask the nodes for their kernel, device and CANN logs.")
@click.option("--lang", type=click.Choice(["en", "zh"]), help="Language of the words.  [default: the locale's]")
@output_option
@click.pass_obj
def command(
    ctx: CliContext, job: str, attempt: int | None, everything: bool, gather: bool, lang: str | None, output: str | None
) -> int:
    """Name the rank that failed first, over all nodes, and why; tell the others' ends as its consequences.

    Says "likely" where the evidence allows another reading, and "not known" where it allows none. Of a running job it
    says what is odd. Exits 0; 4 when there is no such job.
    """
    from ascendrun.text import language_of

    lang = lang or language_of(ctx.environ)
    if gather:
        for host, problem in ctx.cluster.collect(job, attempt=attempt):
            ctx.echo(f"{host}: {problem}" if problem else f"{host}: gathered")
    explanation = ctx.cluster.explain(job, attempt=attempt, lang=lang)
    if output in (None, "table", "wide"):
        from ascendrun.cli.explain_view import print_explanation

        print_explanation(
            explanation, lang=lang, color=ctx.has_color(sys.stdout), everything=everything or output == "wide"
        )
    else:
        from ascendrun.cli.output import format_one

        assert output is not None
        sys.stdout.write(format_one(explanation, output))
    return 0
