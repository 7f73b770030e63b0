"""show: one job, its nodes, its ranks, its events."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import click

from ascendrun.cli import output as out
from ascendrun.cli.context import CliContext
from ascendrun.cli.options import cli_command, output_option
from ascendrun.cli.outcome import first_failure_line
from ascendrun.cluster import JobDetail, JobView, RankView
from ascendrun.core.jobs.roles import rank_labels
from ascendrun.core.rank_env import forks_ranks
from ascendrun.text import Text, enumerate_texts
from ascendrun.text.format import fold_hosts, grouped, label_ranks


@cli_command("show")
@click.argument("job")
@output_option
def command(ctx: CliContext, job: str, output: str | None) -> None:
    """Show one job: state, nodes, ranks, events. Ranks in the same state share a line; -o wide has a line for each.

    Examples:
    ascendrun show j-0001
    ascendrun show quickstart -o yaml          # by name: the live job of that name, else the newest
    ascendrun show alice/j-0001                # of another user, whose job file has visible: group
    """
    detail = ctx.cluster.jobs.detail(job)
    if not out.print_record(detail, output):
        whole = ctx.cluster.jobs.pipeline(detail.job.pipeline) if detail.job.pipeline else None
        sys.stdout.write(
            (describe_stages(whole) if whole is not None else "")
            + describe_job(detail, wide=output == "wide", now_s=time.time(), why=_why(ctx, detail))
        )


def describe_stages(whole: JobView) -> str:
    """Return the pipeline of a stage as text, printed before the job itself."""
    columns = [
        out.Column("STAGE", lambda stage: stage.stage),
        out.Column("JOB", lambda stage: stage.job_id),
        out.Column("STATE", lambda stage: stage.state.value),
    ]
    pairs = [
        (str(Text("show.pipeline", "pipeline")), out.named(whole.id, whole.name)),
        (str(Text("show.state", "state")), whole.state),
    ]
    return f"{out.format_pairs(pairs)}\n{out.format_table(whole.stages, columns)}\n"


def _why(ctx: CliContext, detail: JobDetail) -> str | None:
    """Return the diagnosis of a failed job, in one line."""
    return ctx.cluster.diagnosis.summary(detail.job.id) if detail.job.state == "FAILED" else None


def describe_job(detail: JobDetail, *, wide: bool, now_s: float, why: str | None = None) -> str:
    """Return the job as text. Ranks that run or exited with 0 share a line; with `wide` every rank has its own.

    `why`: the diagnosis, None: not available.
    """
    pairs = _head(detail, now_s)
    if why is not None:
        pairs.append((str(Text("show.why", "cause")), why))
        pairs.append((str(Text("show.evidence", "evidence")), f"ascendrun explain {detail.job.id}"))
    parts, labels = [out.format_pairs(pairs)], rank_labels(detail.nodes)
    if detail.past_attempts:
        parts.append(_describe_attempts(detail))
    if detail.nodes:
        has_ended = detail.job.ended_at_s is not None
        node_columns = [
            out.Column("NODE", lambda node: node.host),
            out.Column("RANKS", lambda node: label_ranks(node.ranks, labels)),
            out.Column("LIVENESS", lambda node: "-" if has_ended else node.liveness),
            out.Column("SEEN", lambda node: "-" if has_ended else out.describe_time(node.heard_at_s)),
            out.Column("PHASE", lambda node: node.phase),
        ]
        parts.append(out.format_table(detail.nodes, node_columns))
    parts.append(_describe_ranks(detail, wide=wide))
    if detail.events:
        event_columns = [
            out.Column("TIME", lambda event: out.describe_time(event.at_s)),
            out.Column("EVENT", lambda event: event.code),
            out.Column("MESSAGE", lambda event: str(event.message())),
        ]
        parts.append(out.format_table(detail.events, event_columns))
    return "\n".join(part for part in parts if part)


def _directories(by_host: Mapping[str, str]) -> str:
    """Return each directory once, after its hosts, in the form of scp arguments."""
    hosts = grouped((path, host) for host, path in by_host.items())
    return enumerate_texts(f"{fold_hosts(names)}:{path}" for path, names in hosts.items())


def _head(detail: JobDetail, now_s: float) -> list[tuple[str, str]]:
    job = detail.job
    pairs = [
        (Text("show.job", "job"), out.named(job.id, job.name)),
        (Text("show.state", "state"), out.labelled(job.state, job.reason)),
        (Text("show.attempt", "attempt"), str(job.attempt)),
        (Text("show.nodes", "nodes"), fold_hosts(job.hosts)),
        (Text("show.ranks", "ranks"), str(job.world_size or "-")),
        (Text("show.directory", "directory"), _directories(detail.directories)),
        (Text("show.created", "created"), out.describe_time(job.created_at_s)),
        (Text("show.started", "started"), out.describe_time(job.started_at_s)),
        (Text("show.ended", "ended"), out.describe_time(job.ended_at_s)),
    ]
    end_s = now_s if job.ended_at_s is None else job.ended_at_s
    duration = "" if job.started_at_s is None else out.describe_seconds(end_s - job.started_at_s)
    failure = "" if detail.first_failure is None else str(first_failure_line(detail.first_failure, job))
    expected = "" if job.start_expected_at_s is None else out.describe_time(job.start_expected_at_s)
    known = [
        (Text("show.start-expected", "expected start"), expected),
        (Text("show.spares", "spares"), _describe_spares(detail)),
        (Text("show.duration", "duration"), duration),
        (Text("show.file", "file"), job.file),
        (Text("show.progress", "progress"), out.describe_progress(job.progress)),
        (Text("show.outputs", "outputs"), detail.outputs),
        (Text("show.outputs-waiting", "outputs not fetched from"), fold_hosts(detail.outputs_waiting)),
        (Text("show.first-failure", "first failure"), failure),
        (Text("show.unconfirmed-hosts", "unconfirmed hosts"), fold_hosts(detail.unconfirmed_hosts)),
    ]
    pairs += [(label, value) for label, value in known if value]
    for hold in job.holds:
        if hold.processes:
            pairs.append((Text("show.held-host", "held host"), out.labelled(hold.host, hold.reason())))
    return [(str(label), value) for label, value in pairs]


def _describe_spares(detail: JobDetail) -> str:
    """Return the hosts that may replace others, and whether each is ready."""

    found: dict[str, list[str]] = {}
    for host in detail.job.spares:
        finding = detail.spares.get(host)
        status = Text("show.spare-not-ready", "not ready: {finding}", finding=finding)
        if finding is None:
            is_ready = host in detail.spares
            status = Text("show.spare-ready", "ready") if is_ready else Text("show.spare-unchecked", "not checked yet")
        found.setdefault(str(status), []).append(host)
    spares = [Text("show.spare", "{hosts:hosts} ({status})", hosts=hosts, status=one) for one, hosts in found.items()]
    return enumerate_texts(spares)


def _describe_attempts(detail: JobDetail) -> str:
    """Return a table of the attempts that ended, with the cause that was diagnosed."""
    columns = [
        out.Column("ATTEMPT", lambda one: str(one.number)),
        out.Column("NODES", lambda one: fold_hosts(one.hosts) or "-"),
        out.Column("STARTED", lambda one: out.describe_time(one.started_at_s)),
        out.Column("ENDED", lambda one: out.describe_time(one.ended_at_s)),
        out.Column("STEP", lambda one: "-" if one.last_step is None else str(one.last_step)),
        out.Column("ERROR", lambda one: out.describe_attempt_failure(one.failure)),
    ]
    return out.format_table(detail.past_attempts, columns)


def _describe_ranks(detail: JobDetail, *, wide: bool) -> str:
    """Return the processes that start ranks, if the job has such, and the ranks: alike ones in one line."""
    if not forks_ranks(detail.spec):
        return _describe_alike(detail.ranks, rank_labels(detail.nodes), wide=wide)
    processes = _rank_table(detail.ranks, "PROCESS", lambda process: f"node-{process.rank}")
    return "\n".join(part for part in (processes, _describe_alike(detail.forked_ranks, {}, wide=wide)) if part)


def _describe_alike(ranks: Sequence[RankView], labels: Mapping[int, str], *, wide: bool) -> str:
    shown = [
        rank for rank in ranks if wide or rank.exit_code or rank.signal is not None or rank.hung_at_exit or rank.stopped
    ]
    alike = grouped((describe_rank(rank), rank.rank) for rank in ranks if rank not in shown)
    lines = [
        str(Text("show.ranks-alike", "ranks {ranks:ranks}: {status}", ranks=label_ranks(ranks, labels), status=status))
        + "\n"
        for status, ranks in alike.items()
    ]
    return _rank_table(shown, "RANK", lambda rank: label_ranks([rank.rank], labels)) + "".join(lines)


def _rank_table(ranks: Sequence[RankView], title: str, name: Callable[[RankView], str]) -> str:
    columns = [
        out.Column(title, name),
        out.Column("NODE", lambda rank: rank.host),
        out.Column("PID", lambda rank: "-" if rank.pid is None else str(rank.pid)),
        out.Column("ENDED", lambda rank: out.describe_time(rank.exited_at_s)),
        out.Column("STATUS", describe_rank),
    ]
    return out.format_table(ranks, columns) if ranks else ""


def describe_rank(rank: RankView) -> str:
    """Return text such as: running; exit code 3; killed by SIGKILL, after the stop …"""
    if rank.signal is not None:
        try:
            name = signal.Signals(rank.signal).name
        except ValueError:
            name = str(rank.signal)
        status = Text("show.rank-killed", "ended by signal {signal}", signal=name)
    elif rank.exit_code is not None:
        status = Text("show.rank-exited", "exit code {code}", code=rank.exit_code)
    elif rank.exited_at_s is not None:
        status = Text("show.rank-ended", "ended; exit code unknown")
    elif rank.pid is None:
        return str(Text("show.rank-never-started", "not started"))
    elif not rank.is_known:
        status = Text("show.rank-unknown", "running when last seen")
    else:
        status = Text("show.rank-running", "running")
    if rank.hung_at_exit:
        status = Text("show.rank-hung-at-exit", "{status}; finished its work but did not exit", status=status)
    if rank.stopped:
        status = Text("show.rank-after-stop", "{status}, after the stop", status=status)
    return str(status)
