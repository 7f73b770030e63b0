"""explain: find the first failing rank, the cause, the confidence and a fix."""

from __future__ import annotations

import sys

import click

from ascendrun.cli import output as out
from ascendrun.cli.context import CliContext
from ascendrun.cli.explanation import print_explanation, print_stacks
from ascendrun.cli.options import cli_command, output_option
from ascendrun.text import Text


@cli_command("explain")
@click.argument("job")
@click.option("--attempt", type=click.IntRange(min=1), metavar="N", help="Attempt to explain.  [default: the newest]")
@click.option("--all", "everything", is_flag=True, help="Show all evidence and all consequences, uncut.")
@click.option("--why", is_flag=True, help="Show the codes, classes, events and rules that decided.")
@click.option("--collect", is_flag=True, help="First fetch kernel, device and CANN logs from the nodes.")
@click.option("--fresh", is_flag=True, help="Diagnose again instead of reading the diagnosis of the controller.")
@output_option
def command(
    ctx: CliContext,
    job: str,
    attempt: int | None,
    everything: bool,
    why: bool,
    collect: bool,
    fresh: bool,
    output: str | None,
) -> None:
    """Find the first failing rank, the cause, the confidence and a fix.

    The ends of all other ranks are shown as consequences. The confidence is "certain", "likely" or "unknown". For a
    running job, anomalies are shown. Exits 0; 4 if the job does not exist.

    Examples:
    ascendrun explain j-0001
    ascendrun explain finetune --attempt 1 --all
    ascendrun explain j-0001 --collect         # first fetch kernel, device and CANN logs from the nodes
    ascendrun explain j-0001 -o json | jq -r '.diagnosis.code, .diagnosis.confidence'
    ascendrun explain alice/j-0001             # of another user, whose job file has visible: group
    """
    if collect:
        for host, problem in ctx.cluster.diagnosis.collect(job, attempt=attempt):
            ctx.echo(
                out.labelled(host, problem)
                if problem
                else str(Text("explain.collected", "{host}: logs collected", host=host))
            )
    explanation = ctx.cluster.diagnosis.explain(job, attempt=attempt, fresh=fresh or collect)
    if not out.print_record(explanation, output):
        everything = everything or output == "wide"
        print_explanation(explanation, color=ctx.has_color(sys.stdout), everything=everything, why=why or everything)


@cli_command("stacks")
@click.argument("job")
@click.option("--rank", type=click.IntRange(min=0), metavar="N", help="Only this rank, with all its threads.")
@click.option("--attempt", type=click.IntRange(min=1), metavar="N", help="The stacks that were kept of this attempt.")
@output_option
def stacks_command(ctx: CliContext, job: str, rank: int | None, attempt: int | None, output: str | None) -> None:
    """Show what each rank of a job does; ranks with equal stacks are shown once.

    The stacks come from py-spy if the ranks have it on PATH, else from bundled programs themselves. Other programs show
    the state of /proc. Ranks that the others wait for are marked. No rank is stopped or changed.

    Of a job that hung and has ended, the stacks of that time are shown.

    Examples:
    ascendrun stacks j-0001
    ascendrun stacks j-0001 --rank 9           # all threads of one rank
    ascendrun stacks j-0001 --attempt 1        # of an attempt that hung and was stopped
    ascendrun stacks j-0001 -o json | jq '.groups[] | select(.is_awaited)'
    """
    found = ctx.cluster.diagnosis.stacks(job, rank=rank, attempt=attempt)
    if not out.print_record(found, output):
        print_stacks(found, everything=output == "wide")
