"""ps: the jobs in one table. history: the ended jobs with the device-hours that they used, or the sums of some."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from ascendrun.cli import output as out
from ascendrun.cli.context import CliContext, print_held
from ascendrun.cli.job_columns import job_columns
from ascendrun.cli.options import TIMES, UsageError, cli_command, exclusive, list_output_option
from ascendrun.cluster import JobView
from ascendrun.core.errors import NotFoundError
from ascendrun.text import Text
from ascendrun.text.format import fold_hosts

if TYPE_CHECKING:
    from ascendrun.cluster import QueueRow

WATCH_S = 1.0
DIAGNOSED = 100
"""Failed jobs, the newest, whose diagnosis is read for REASON: each is a file."""


@cli_command("ps")
@click.option("--all", "-a", "everything", is_flag=True, help="Also list ended jobs.")
@click.option("--quiet", "-q", is_flag=True, help="Print ids only, as -o name.")
@click.option("--watch", "-w", is_flag=True, help="Print a job again when its state, reason or hosts change, until ^C.")
@click.option("--all-users", is_flag=True, help="List the shared queue: the jobs of all users, the oldest first.")
@list_output_option
def command(ctx: CliContext, everything: bool, quiet: bool, watch: bool, all_users: bool, output: str | None) -> int:
    """List live jobs, the newest first.

    A pipeline is one row. REASON shows why a job is in its state; of a running job it counts the ranks that run now.
    FOUND: an attempt runs on hosts, but its job is unknown; `ascendrun stop` ends it.

    Examples:
    ascendrun ps
    ascendrun ps -w                       # print jobs again when they change; ^C ends
    ascendrun ps -q | xargs ascendrun stop
    ascendrun ps --all-users              # with the user whose job each one waits for
    ascendrun ps -a -o json | jq '.jobs[] | select(.state == "FAILED") | .id'
    """
    if watch and (quiet or output not in (*out.PEOPLE, "jsonl")):
        raise UsageError(exclusive("--watch", "--quiet" if quiet else f"-o {output}"))
    if all_users and (watch or everything):
        raise UsageError(exclusive("--all-users", "--watch" if watch else "--all"))
    output = "name" if quiet else output
    if all_users:
        from ascendrun.cluster import QueueRow

        out.print_rows(ctx.cluster.queue.jobs(), _queue_columns(time.time()), output, name="jobs", kind=QueueRow)
        return 0
    jobs = _list_jobs(ctx, everything)
    failed = [job for job in jobs if job.state == "FAILED"][:DIAGNOSED] if output in out.PEOPLE else []
    causes = {job.id: ctx.cluster.diagnosis.known_cause(job) for job in failed}
    out.print_rows(jobs, job_columns(time.time(), causes, () if watch else jobs), output, name="jobs", kind=JobView)
    if not jobs and output in out.PEOPLE:
        ctx.echo(Text("cli.no-jobs", "no jobs") if everything else Text("cli.no-live-jobs", "no live jobs"))
        if not everything:
            ctx.hint(Text("cli.list-ended", "list ended jobs: ascendrun ps -a"))
    if output in out.PEOPLE:
        print_held(ctx, (hold for machine in ctx.cluster.hosts.held() for hold in machine.holds))
    return _watch(ctx, jobs, output) if watch else 0


def _queue_columns(now_s: float) -> list[out.Column]:
    def reason(row: QueueRow) -> str:
        return str(row.reason or "") if row.state == row.last_state else str(was_last(row))

    def was_last(row: QueueRow) -> Text:
        return Text("ps.last-state", "{state} when its controller reported last", state=row.last_state)

    def start(row: QueueRow) -> str:
        return "-" if row.start_s is None else out.describe_seconds(row.start_s - now_s)

    return [
        out.Column("USER", lambda row: row.user),
        out.Column("PROJECT", lambda row: row.project or "-", dropped=3),
        out.Column("ID", lambda row: row.job),
        out.Column("NAME", lambda row: row.name, dropped=1),
        out.Column("STATE", lambda row: row.state),
        out.Column("NODES", lambda row: fold_hosts(row.hosts) or str(row.nodes), dropped=2),
        out.Column("STARTS IN", start, dropped=4),
        out.Column("REPORTED", lambda row: out.describe_seconds(row.age_s), dropped=5),
        out.Column("REASON", lambda row: out.headline(reason(row))),
    ]


def _list_jobs(ctx: CliContext, everything: bool) -> tuple[JobView, ...]:
    return (*ctx.cluster.jobs.found_attempts(), *ctx.cluster.jobs.list(everything=everything, folded=True))


def _watch(ctx: CliContext, before: Sequence[JobView], output: str | None) -> int:
    """Print the rows that change, and the last row of a job that has ended, until ^C: exit code 130."""
    shown = {job.id: _mark(job) for job in before}
    live = {job.id for job in before if job.ended_at_s is None}
    while True:
        sys.stdout.flush()
        time.sleep(WATCH_S)
        jobs = list(_list_jobs(ctx, everything=False))
        ended, live = live - {job.id for job in jobs}, {job.id for job in jobs}
        for job_id in sorted(ended):
            with suppress(NotFoundError):  # it was removed, or it was a found attempt
                jobs.append(ctx.cluster.jobs.pipeline(job_id) or ctx.cluster.jobs.detail(job_id).job)
        changed = [job for job in jobs if shown.get(job.id) != _mark(job)]
        shown.update((job.id, _mark(job)) for job in changed)
        if changed and output == "jsonl":
            sys.stdout.write(out.format_many(changed, output, name="jobs", kind=JobView))
        elif changed:
            table = out.format_table(
                changed, job_columns(time.time()), wide=output == "wide", width=out.terminal_width(output)
            )
            sys.stdout.write(table.partition("\n")[2])


def _mark(job: JobView) -> tuple[object, ...]:
    """Return what a change of is shown."""
    return job.state, str(job.reason), job.attempt, job.hosts, job.held_by


@cli_command("history")
@click.option("--since", "since_s", type=TIMES, help="Only jobs that ended since: 7d (ago), 10:30, 2026-11-20T10:30.")
@click.option("--user", metavar="USER", help="Only jobs that this user submitted.")
@click.option(
    "--by",
    type=click.Choice(["job", "user", "project", "month"]),
    default="job",
    help="One row for each.  [default: job]",
)
@click.option("--quiet", "-q", is_flag=True, help="Print ids only, as -o name.")
@list_output_option
def history_command(
    ctx: CliContext, since_s: float | None, user: str | None, by: str, quiet: bool, output: str | None
) -> None:
    """List ended jobs with the device-hours that they used, the newest first.

    DEVICE-HOURS are devices times hours in which the job had its hosts: from the checks before a start to the confirmed
    end, in all attempts. A stage of a pipeline is a row. Jobs that `ascendrun rm` has removed are not listed.

    With --by, also waste: FAILED are device-hours of attempts that failed. IDLE are those of other attempts in which no
    rank ran: checks, staging, the end. WAITED is the time in the queue. A project is `labels: {project: …}` of the job
    file. A job counts in the month of its end.

    Examples:
    ascendrun history --since 7d
    ascendrun history --by project -o csv > projects.csv
    ascendrun history --by user --since 2026-11-01T00:00
    ascendrun history --user me -o csv > hours.csv
    """
    from ascendrun.health.report.cost import GroupUse, JobUse, sum_groups

    output = "name" if quiet else output
    if by != "job" and output == "name":
        raise UsageError(exclusive(f"--by {by}", "--quiet" if quiet else "-o name"))
    jobs = ctx.cluster.jobs.history(since_s=since_s, user=user)
    groups = sum_groups(jobs, "user" if by == "job" else by)
    if by != "job":
        columns = (out.Column(by.upper(), lambda row: getattr(row, by) or "-"), *GROUP_COLUMNS)
        out.print_rows(groups, columns, output, name=f"{by}s", kind=GroupUse)
    else:
        out.print_rows(jobs, HISTORY_COLUMNS, output, name="jobs", kind=JobUse)
    if output in out.PEOPLE:
        hours = sum(row.device_hours for row in groups)
        ctx.say("history.total", "{jobs:plural job jobs}, {hours:,.2f} device-hours", jobs=len(jobs), hours=hours)
        unknown = sum(row.unknown_jobs for row in groups)
        if unknown:
            ctx.warn(Text("history.unknown", "unknown number of devices: {jobs:plural job jobs}", jobs=unknown))


HISTORY_COLUMNS = (
    out.Column("ID", lambda job: job.id),
    out.Column("NAME", lambda job: job.name),
    out.Column("USER", lambda job: job.user or "-"),
    out.Column("STATE", lambda job: job.state),
    out.Column("ATTEMPT", lambda job: str(job.attempts), dropped=2),
    out.Column("TYPE", lambda job: job.device_type, dropped=3),
    out.Column("DEVICES", lambda job: "-" if job.devices is None else str(job.devices), dropped=1),
    out.Column("DURATION", lambda job: out.describe_seconds(job.held_s)),
    out.Column("DEVICE-HOURS", lambda job: out.describe_hours(job.device_hours)),
    out.Column("CREATED", lambda job: out.describe_time(job.created_at_s), is_wide=True),
    out.Column("STARTED", lambda job: out.describe_time(job.started_at_s), is_wide=True),
    out.Column("ENDED", lambda job: out.describe_time(job.ended_at_s)),
)
GROUP_COLUMNS = (
    out.Column("TYPE", lambda row: row.device_type),
    out.Column("JOBS", lambda row: str(row.jobs)),
    out.Column("DEVICE-HOURS", lambda row: out.describe_hours(row.device_hours)),
    out.Column("FAILED", lambda row: out.describe_hours(row.failed_hours)),
    out.Column("IDLE", lambda row: out.describe_hours(row.idle_hours)),
    out.Column("WAITED", lambda row: out.describe_seconds(row.waited_s)),
)
