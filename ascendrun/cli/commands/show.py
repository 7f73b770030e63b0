"""show: one job, its nodes, its ranks, its story."""

from __future__ import annotations

import signal
import sys
import time
from typing import TYPE_CHECKING

import click

from ascendrun.cli.options import cli_command, output_option

if TYPE_CHECKING:
    from ascendrun.cli.context import CliContext
    from ascendrun.cluster import JobDetail, JobView, RankView


@cli_command(
    "show",
    examples="""
    ascendrun show j-0001
    ascendrun show quickstart -o yaml          # by name: the newest of that name
""",
)
@click.argument("job")
@output_option
@click.pass_obj
def command(ctx: CliContext, job: str, output: str | None) -> int:
    """Show one job: how it stands, its nodes, its ranks, what happened."""
    from ascendrun.cli.output import format_one

    detail = ctx.cluster.job(job)
    if output in (None, "table", "wide"):
        whole = ctx.cluster.pipeline(detail.job.pipeline) if detail.job.pipeline else None
        sys.stdout.write(
            (describe_stages(whole) if whole is not None else "")
            + describe_job(detail, wide=output == "wide", now_s=time.time(), why=_why(ctx, detail))
        )
    else:
        assert output is not None
        sys.stdout.write(format_one(detail, output))
    return 0


def describe_stages(whole: JobView) -> str:
    """The pipeline that a job is a stage of, before the job itself."""
    from ascendrun.cli.output import Column, format_pairs, format_table

    table = format_table(
        whole.stages,
        [
            Column("STAGE", lambda stage: stage.stage),
            Column("JOB", lambda stage: stage.job_id),
            Column("STATE", lambda stage: stage.state.value),
        ],
    )
    return f"{format_pairs([('pipeline', f'{whole.id} ({whole.name})'), ('state', whole.state)])}\n{table}\n"


def _why(ctx: CliContext, detail: JobDetail) -> str | None:
    """The verdict on a job that failed, in one line."""
    return ctx.cluster.diagnosis(detail.job.id) if detail.job.state == "FAILED" else None


def describe_job(detail: JobDetail, *, wide: bool, now_s: float, why: str | None = None) -> str:
    """For a person. Ranks that simply run or ended well share a line; with `wide` every rank has its own.
    `why`: the verdict, None: there is none."""
    from ascendrun.cli.follow import has_ended
    from ascendrun.cli.output import Column, describe_time, format_pairs, format_table
    from ascendrun.core.logs.log_lines import fold_ranks

    more = [] if why is None else [("why", f"{why}; `ascendrun explain {detail.job.id}` has the evidence")]
    parts = [format_pairs([*_head(detail, now_s), *more])]
    if detail.nodes:
        parts.append(
            format_table(
                detail.nodes,
                [
                    Column("NODE", lambda node: node.host),
                    Column("RANKS", lambda node: fold_ranks(node.ranks)),
                    Column("LIVENESS", lambda node: "-" if has_ended(detail.job) else node.liveness),
                    Column("PHASE", lambda node: node.phase),
                ],
            )
        )
    parts.append(_describe_ranks(detail, wide=wide))
    if detail.events:
        parts.append(
            format_table(
                detail.events,
                [
                    Column("WHEN", lambda event: describe_time(event.at_s)),
                    Column("WHAT", lambda event: event.kind),
                    Column("STORY", lambda event: event.text),
                ],
            )
        )
    return "\n".join(part for part in parts if part)


def _head(detail: JobDetail, now_s: float) -> list[tuple[str, str]]:
    from ascendrun.cli.output import describe_progress, describe_seconds, describe_time
    from ascendrun.core.names import fold_names

    job = detail.job
    end_s = now_s if job.ended_at_s is None else job.ended_at_s
    ran = "-" if job.started_at_s is None else describe_seconds(end_s - job.started_at_s)
    pairs = [
        ("job", f"{job.id} ({job.name})"),
        ("state", f"{job.state}: {job.reason}" if job.reason else job.state),
        ("attempt", str(job.attempt)),
        ("run", f"{detail.run} (its folder's name on the nodes)"),
        ("on", f"{fold_names(job.hosts)}, {job.world_size} ranks"),
        ("created", describe_time(job.created_at_s)),
        ("started", f"{describe_time(job.started_at_s)}, ran {ran}"),
        ("ended", describe_time(job.ended_at_s)),
    ]
    if job.file:
        pairs.append(("file", job.file))
    if job.progress:
        pairs.append(("progress", describe_progress(job.progress)))
    if detail.first_failure:
        pairs.append(("first failure", detail.first_failure))
    if detail.unconfirmed:
        pairs.append(("not confirmed gone", fold_names(detail.unconfirmed)))
    return pairs


def _describe_ranks(detail: JobDetail, *, wide: bool) -> str:
    from ascendrun.cli.output import Column, describe_time, format_table
    from ascendrun.core.logs.log_lines import fold_ranks

    shown = [rank for rank in detail.ranks if wide or _is_noteworthy(rank)]
    quiet: dict[str, list[int]] = {}
    for rank in detail.ranks:
        if rank not in shown:
            quiet.setdefault(describe_rank(rank), []).append(rank.rank)
    table = (
        format_table(
            shown,
            [
                Column("RANK", lambda rank: str(rank.rank)),
                Column("NODE", lambda rank: rank.host),
                Column("PID", lambda rank: "-" if rank.pid is None else str(rank.pid)),
                Column("ENDED", lambda rank: describe_time(rank.exited_at_s)),
                Column("HOW", describe_rank),
            ],
        )
        if shown
        else ""
    )
    return table + "".join(f"ranks {fold_ranks(ranks)}: {how}\n" for how, ranks in quiet.items())


def _is_noteworthy(rank: RankView) -> bool:
    return bool(rank.exit_code or rank.signal is not None or rank.lingers or rank.stopped)


def describe_rank(rank: RankView) -> str:
    """runs, exit code 3, killed by SIGKILL, stopped (SIGTERM) …"""
    if rank.signal is not None:
        try:
            name = signal.Signals(rank.signal).name
        except ValueError:
            name = f"signal {rank.signal}"
        how = f"ended by {name}"
    elif rank.exit_code is not None:
        how = f"exit code {rank.exit_code}"
    elif rank.pid is None:
        return "never ran"
    else:
        how = "runs"
    if rank.lingers:
        how += ", finished its work but did not exit"
    return f"{how}, after the stop" if rank.stopped else how
