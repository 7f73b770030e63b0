"""history: the ended jobs with the device-hours that they used, by job or by user."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from ascendrun.cli.command import UsageError, exclusive
from ascendrun.cli.options import cli_command, list_output_option, parse_since
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.cli.context import CliContext
    from ascendrun.cli.output import Column


@cli_command(
    "history",
    examples="""
    ascendrun history --since 7d
    ascendrun history --by user --since 2026-11-01T00:00
    ascendrun history --user me -o csv > hours.csv
""",
)
@click.option("--since", metavar="TIME", help="Only jobs that ended since: 7d (ago), 10:30, 2026-11-20T10:30.")
@click.option("--user", metavar="USER", help="Only jobs that this user submitted.")
@click.option("--by", type=click.Choice(["job", "user"]), default="job", help="One row for each.  [default: job]")
@click.option("--quiet", "-q", is_flag=True, help="Print ids only, as -o name.")
@list_output_option
@click.pass_obj
def command(ctx: CliContext, since: str | None, user: str | None, by: str, quiet: bool, output: str | None) -> int:
    """List ended jobs with the device-hours that they used, the newest first.

    DEVICE-HOURS are devices times hours in which the job had its hosts: from the checks before a start to the confirmed
    end, in all attempts. A stage of a pipeline is a row. Jobs that `ascendrun rm` has removed are not listed.
    """
    from ascendrun.cli.output import PEOPLE, print_rows
    from ascendrun.health.report.usage import JobUse, UserUse, sum_users

    output = "name" if quiet else output
    if by == "user" and output == "name":
        raise UsageError(exclusive("--by user", "--quiet" if quiet else "-o name"))
    try:
        since_s = None if since is None else parse_since(since, now_s=time.time())
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--since") from error
    jobs = ctx.cluster.history(since_s=since_s, user=user)
    users = sum_users(jobs)
    if by == "user":
        print_rows(users, user_columns(), output, name="users", kind=UserUse)
    else:
        print_rows(jobs, job_columns(), output, name="jobs", kind=JobUse)
    if output in PEOPLE:
        hours = sum(row.device_hours for row in users)
        ctx.echo(
            Text("history.total", "{jobs:plural job jobs}, {hours:,.2f} device-hours", jobs=len(jobs), hours=hours)
        )
        unknown = sum(row.unknown_jobs for row in users)
        if unknown:
            ctx.warn(Text("history.unknown", "unknown number of devices: {jobs:plural job jobs}", jobs=unknown))
    return 0


def describe_hours(hours: float | None) -> str:
    return "-" if hours is None else f"{hours:,.2f}"


def job_columns() -> list[Column]:
    from ascendrun.cli.output import Column, describe_seconds, describe_time

    return [
        Column("ID", lambda job: job.id),
        Column("NAME", lambda job: job.name),
        Column("USER", lambda job: job.user or "-"),
        Column("STATE", lambda job: job.state),
        Column("ATTEMPT", lambda job: str(job.attempts), dropped=2),
        Column("TYPE", lambda job: job.device_type, dropped=3),
        Column("DEVICES", lambda job: "-" if job.devices is None else str(job.devices), dropped=1),
        Column("DURATION", lambda job: describe_seconds(job.held_s)),
        Column("DEVICE-HOURS", lambda job: describe_hours(job.device_hours)),
        Column("CREATED", lambda job: describe_time(job.created_at_s), is_wide=True),
        Column("STARTED", lambda job: describe_time(job.started_at_s), is_wide=True),
        Column("ENDED", lambda job: describe_time(job.ended_at_s)),
    ]


def user_columns() -> list[Column]:
    from ascendrun.cli.output import Column

    return [
        Column("USER", lambda row: row.user or "-"),
        Column("TYPE", lambda row: row.device_type),
        Column("JOBS", lambda row: str(row.jobs)),
        Column("DEVICE-HOURS", lambda row: describe_hours(row.device_hours)),
    ]
