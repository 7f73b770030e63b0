"""Lines and states of a job until it has ended, its outputs as they arrive, and its outcome, also as exit code."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from ascendrun.cli import output as out
from ascendrun.cli.context import CliContext, Screen, print_held
from ascendrun.core.jobs.reasons import CONFIDENCE, Reason
from ascendrun.core.jobs.roles import rank_labels
from ascendrun.core.logs.log_lines import LogLine, label_processes, process_label
from ascendrun.core.logs.log_view import LogView
from ascendrun.core.rank_env import forks_ranks
from ascendrun.core.records import format_rfc3339
from ascendrun.text import Text, listed
from ascendrun.text.format import fold_hosts, format_bytes, grouped, label_ranks

if TYPE_CHECKING:
    from ascendrun.cluster import AttemptFiles, Cluster, FetchReply, JobDetail, JobView, LogGap
    from ascendrun.core.logs.folding import FoldedLine

FAILED_TAIL_LINES = 20
DIAGNOSIS_S, POLL_S = 10.0, 0.2
"""Seconds that the outcome of a failed job waits for its diagnosis, and between two looks."""


def exit_code_of(job: JobView) -> int:
    """Return 0 for SUCCEEDED, 3 if the plan of its training refused the start, 1 for every other end."""
    is_refused = job.state == "FAILED" and job.reason.code == "training-refused"
    return 3 if is_refused else 0 if job.state == "SUCCEEDED" else 1


def print_outcome(ctx: CliContext, detail: JobDetail) -> int:
    """Print the outcome of the job and the next step on stderr; return the exit code."""
    has_failed = detail.job.state == "FAILED"
    if has_failed:
        detail = _diagnosed(ctx.cluster, detail)
        _print_failure(ctx, detail)
    job = detail.job
    head = f"{job.id} {job.state}"
    duration = ""
    if job.ended_at_s is not None:
        duration = out.describe_seconds(job.ended_at_s - (job.started_at_s or job.created_at_s))
    after = Text("outcome.after", "{job} after {duration}", job=head, duration=duration)
    more = out.describe_progress(job.progress) if job.state == "SUCCEEDED" else job.reason
    ctx.echo(out.labelled(after if duration else head, more))
    is_diagnosed = has_failed and job.confidence != "preliminary"
    diagnosis = ctx.cluster.diagnosis.summary(job.id) if is_diagnosed else None
    if diagnosis is not None:
        ctx.say("outcome.cause", "cause: {diagnosis}", diagnosis=diagnosis)
    print_left(ctx, detail)
    if has_failed:
        first = detail.first_failure
        by_rank = first is not None and first.ranks and not forks_ranks(detail.spec)
        choice = "" if first is None or not first.hosts else f" --hosts {first.hosts[0]}"
        choice = f" --rank {first.ranks[0]}" if first is not None and by_rank else choice
        for command in (f"explain {job.id}", f"logs {job.id}{choice}", f"show {job.id}"):
            ctx.hint(f"ascendrun {command}")
    return exit_code_of(job)


def print_outputs(ctx: CliContext, job: JobView) -> None:
    """Wait for the declared outputs of an ended job or pipeline, and name their directory.

    ^C leaves the rest to the controller."""
    try:
        replies = fetch_outputs(ctx, ctx.cluster.files.fetch(job.id))
    except KeyboardInterrupt:
        detached = Text("outputs.detached", "detached; the outputs of {job} are still being fetched", job=job.id)
        ctx.detach(detached, f"fetch {job.id}")
        return
    for missing in (*missing_texts(replies), *refused_texts(replies)):
        ctx.warn(missing)
    sizes: dict[str, list[int]] = {}
    for reply in replies:
        if reply.problem is not None:
            why = reply.problem.message
            warning = Text("outputs.problem", "{host}: outputs not fetched: {why}", host=reply.host, why=why)
            ctx.warn(warning, reply.problem.hint or f"ascendrun fetch {job.id}")
        if reply.files:
            size = sizes.setdefault(reply.folder, [0, 0])
            size[0], size[1] = size[0] + reply.files, size[1] + reply.done_bytes
    for folder, (files, size_bytes) in sizes.items():
        values = {"files": files, "size": size_bytes, "directory": folder}
        ctx.say("outputs.directory", "outputs: {directory} ({files:plural file files}, {size:bytes})", **values)


def print_left(ctx: CliContext, detail: JobDetail) -> bool:
    """Print on which hosts processes of an ended job may live; return whether there are any."""
    hosts = detail.unconfirmed_hosts
    if hosts:
        warning = Text("outcome.unconfirmed", "cannot confirm that all processes exited on {hosts:hosts}", hosts=hosts)
        hint = Text(
            "outcome.unconfirmed-hint",
            "they are stopped when {hosts:hosts} is reachable again; ascendrun show {job}",
            hosts=hosts,
            job=detail.job.id,
        )
        ctx.warn(warning, hint)
    print_held(ctx, [hold for hold in detail.job.holds if hold.processes])
    return bool(hosts or detail.job.holds)


def _print_failure(ctx: CliContext, detail: JobDetail) -> None:
    first = detail.first_failure
    if first is None:
        return
    ctx.echo(out.labelled(Text("outcome.first-failure", "first failure"), first_failure_line(first, detail.job)))
    host = next(iter(first.hosts), None)
    if host is None:
        return
    ranks = None if forks_ranks(detail.spec) or not first.ranks else list(first.ranks[:1])
    view = LogView(hosts=[host], ranks=ranks, streams=["err"], tail=FAILED_TAIL_LINES)
    lines = [line.text for line in ctx.cluster.logs.lines(detail, view)]
    if lines:
        last = Text("outcome.last-output-of-host", "last error output on {host}:", host=host)
        if ranks is not None:
            rank = label_ranks(ranks, rank_labels(detail.nodes))
            last = Text("outcome.last-output", "last error output of rank {rank} on {host}:", rank=rank, host=host)
        ctx.echo(last)
        ctx.echo("\n".join(f"    {out.sanitise(line)}" for line in lines))


def first_failure_line(first: Reason, job: JobView) -> Text | Reason:
    """Return what failed first, with its confidence."""
    if job.confidence is None:
        return first
    sure = CONFIDENCE.get(job.confidence, job.confidence)
    return Text("outcome.what-failed", "{what} [{confidence}]", what=first, confidence=sure)


def _diagnosed(cluster: Cluster, detail: JobDetail) -> JobDetail:
    """Return the job with its diagnosis, which follows the end after seconds; after DIAGNOSIS_S without it."""
    until_mono = time.monotonic() + DIAGNOSIS_S
    while detail.job.confidence == "preliminary" and time.monotonic() < until_mono:
        time.sleep(POLL_S)
        detail = cluster.jobs.detail(detail.job.id)
    return detail


def fetch_outputs(ctx: CliContext, replies: Iterable[FetchReply]) -> list[FetchReply]:
    """Show the progress; return the last reply of each host."""
    english = "fetching outputs: {files} of {total_files} files, {done:bytes} of {total:bytes}"
    return _watch(ctx.screen, replies, lambda **counts: Text("outputs.progress", english, **counts))


def copy_files(ctx: CliContext, replies: Iterable[FetchReply]) -> list[FetchReply]:
    """Do as `fetch_outputs`, for files that are not outputs."""
    english = "copying: {files} of {total_files} files, {done:bytes} of {total:bytes}"
    return _watch(ctx.screen, replies, lambda **counts: Text("cp.progress", english, **counts))


def _watch(screen: Screen, replies: Iterable[FetchReply], text: Callable[..., Text]) -> list[FetchReply]:
    newest: dict[str, FetchReply] = {}
    ended: list[FetchReply] = []
    try:
        for reply in replies:
            newest[reply.host] = reply
            if reply.ended:
                ended.append(newest.pop(reply.host))
            running = newest.values()
            counts = {
                "files": sum(one.files for one in running),
                "total_files": sum(one.total_files for one in running),
                "done": sum(one.done_bytes for one in running),
                "total": sum(one.total_bytes for one in running),
            }
            screen.progress(str(text(**counts)) if newest else "")
    finally:
        screen.close()
    return ended


def missing_texts(replies: Iterable[FetchReply]) -> Iterator[Text]:
    """Return one message for the hosts on which the same patterns match no file."""
    for patterns, names in grouped((reply.missing, reply.host) for reply in replies if reply.missing).items():
        values = {"hosts": tuple(sorted(names)), "patterns": list(patterns)}
        yield Text("outputs.missing", "{hosts:hosts}: no file matches {patterns}", **values)


def refused_texts(replies: Iterable[FetchReply]) -> Iterator[Text]:
    """Return one message for the hosts on which the same links are not copied."""
    for paths, names in grouped((reply.refused, reply.host) for reply in replies if reply.refused).items():
        yield listed("event.outputs-refused", hosts=tuple(sorted(names)), paths=list(paths))


def problem_hints(replies: Iterable[FetchReply]) -> list[Text | str]:
    """Return each hint of a problem once."""
    hints = [reply.problem.hint for reply in replies if reply.problem is not None and reply.problem.hint is not None]
    return list({str(hint): hint for hint in hints}.values())


STAGING_REPORT_S = 5.0
"""Seconds between reports of staging without a progress line at the bottom of a terminal."""


def follow_job(ctx: CliContext, job_id: str, view: LogView, *, shows_lines: bool = True) -> JobDetail:
    """Return the job after it has ended and every line is shown. KeyboardInterrupt passes through."""
    screen, states = ctx.screen, _States(ctx.screen)
    try:
        for update in ctx.cluster.logs.follow(job_id, view, with_lines=shows_lines):
            if update.detail is not None:
                for warning in states.show(update.detail):
                    ctx.warn(warning)
            if update.lines:
                labels = {} if states.detail is None else rank_labels(states.detail.nodes)
                screen.lines([format_line(view, line, screen, labels) for line in update.lines])
            if update.problem is not None:
                retrying = Text("follow.retrying", "{problem}; the job keeps running; retrying", problem=update.problem)
                ctx.warn(retrying)
            if update.is_incomplete:
                ctx.warn(Text("follow.incomplete", "the last lines may be missing: some logs have not arrived"))
    finally:
        screen.close()
    assert states.detail is not None
    return states.detail


class _States:
    """Prints changes of the job itself. `detail`: its newest state."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self.detail: JobDetail | None = None
        self._staging, self._staging_mono = "", 0.0

    def show(self, detail: JobDetail) -> list[Text]:
        """Return the warnings of the checks before a start that are new."""
        seen = 0 if self.detail is None else len(self.detail.events)
        self._show_state(detail)
        return [event.message() for event in detail.events[seen:] if event.code == "preflight-warning"]

    def _show_state(self, detail: JobDetail) -> None:
        screen, job = self._screen, detail.job
        before, self.detail = self.detail.job if self.detail is not None else None, detail
        if before is not None and before.attempt and job.attempt != before.attempt:
            screen.echo(attempt_line(job.attempt))
        if job.ended_at_s is not None:
            screen.progress("")
            return
        if before is None or job.state != before.state:
            screen.echo(describe_state(job))
        elif job.unreachable_hosts != before.unreachable_hosts:
            screen.echo(out.labelled(f"{job.id} {job.state}", job.reason))
        elif job.state == "STAGING" and not screen.is_live and str(job.reason) != self._staging:
            if time.monotonic() - self._staging_mono >= STAGING_REPORT_S:
                self._staging, self._staging_mono = str(job.reason), time.monotonic()
                screen.echo(describe_state(job))
        screen.progress(describe_bottom(job, time.time()))


def attempt_line(attempt: int) -> Text:
    """Return the line between the output of two attempts."""
    return Text("follow.attempt", "── attempt {attempt} ──", attempt=attempt)


def describe_state(job: JobView) -> Text | str:
    """Return text such as: RUNNING on npu[01-02], 16 ranks."""
    if job.state == "RUNNING" and not job.unreachable_hosts:
        return Text(
            "follow.running",
            "{state} on {hosts:hosts}, {ranks:plural rank ranks}",
            state=job.state,
            hosts=job.hosts,
            ranks=job.world_size,
        )
    return out.labelled(job.state, job.reason)


def describe_bottom(job: JobView, now_s: float) -> str:
    """Return the line at the bottom of the terminal: job, state, duration, progress, and problems."""
    since_s = job.started_at_s if job.started_at_s is not None else job.created_at_s
    reason = str(job.reason) if job.state != "RUNNING" or job.unreachable_hosts else ""
    parts = [
        f"{job.id} {job.state}",
        out.describe_seconds(now_s - since_s),
        reason,
        out.describe_progress(job.progress),
    ]
    return " · ".join(part for part in parts if part)


def format_line(view: LogView, line: FoldedLine, screen: Screen, labels: Mapping[int, str]) -> str:
    """Return `[0-3] text`, sanitised, with its time when the view has times; of a view that does not fold: a record.
    `labels`: of the ranks of roles."""
    if not view.folds:
        return out.format_record(line_record(line.lines[0], labels), "jsonl").rstrip("\n")
    text = out.sanitise(line.text)
    if view.has_prefix:
        text = f"{screen.paint_rank(f'[{label_processes(line.ranks, labels)}]', line.ranks[0])} {text}"
    if view.has_times:
        text = f"{format_time(line.at_s)} {text}"
    return text


def line_record(line: LogLine, labels: Mapping[int, str]) -> dict[str, Any]:
    """Return a line for programs. `time`: arrival by the clock of this machine, None: not recorded. `rank` None: the
    line is of the process that starts the ranks of the host. `role`: its label, of a job with roles."""
    return {
        "time": None if line.at_s is None else format_rfc3339(line.at_s),
        "host": line.host,
        "rank": line.rank if line.rank >= 0 else None,
        **({"role": labels.get(line.rank)} if labels else {}),
        "stream": line.stream,
        "attempt": line.attempt,
        "text": line.text,
    }


def format_time(at_s: float | None) -> str:
    """Return local time to the millisecond, with its offset from UTC; dots when it is not known."""
    if at_s is None:
        return "..." + " " * 26
    return datetime.fromtimestamp(at_s).astimezone().isoformat(timespec="milliseconds")


def print_gaps(ctx: CliContext, gaps: Iterable[LogGap]) -> None:
    """Print one warning for each gap."""
    for gap in gaps:
        ctx.warn(
            Text(
                "cli.log-gap",
                "{process} on {host}: {size:bytes} of std{stream} were lost ({why}, {time})",
                process=process_label(gap.rank) if gap.rank < 0 else f"rank {gap.rank}",
                host=gap.host,
                size=gap.missing_bytes,
                stream=gap.stream,
                why=gap.why,
                time=format_time(gap.at_s),
            )
        )


def print_files(ctx: CliContext, found: AttemptFiles, output: str | None) -> None:
    """Print the files of an attempt, its HCCL settings from the logs, and the hosts of pending files."""
    from ascendrun.cluster import LogFile

    if found.files or output not in out.PEOPLE:
        columns = [
            out.Column("HOST", lambda row: row.host),
            out.Column("KIND", lambda row: row.kind),
            out.Column("RANK", lambda row: "" if row.rank is None else str(row.rank)),
            out.Column("SIZE", lambda row: "" if row.bytes is None else format_bytes(row.bytes)),
            out.Column("PATH", lambda row: row.path or f"({row.note})"),
            out.Column("NOTE", lambda row: str(row.note or "") if row.path else ""),
            out.Column("FROM", lambda row: row.source or "", is_wide=True),
        ]
        out.print_rows(found.files, columns, output, name="files", kind=LogFile, is_cut=False)
    if found.files and found.hccl_settings and output in out.PEOPLE:
        alike = grouped(
            ((setting.name, "" if setting.value is None else setting.value + setting.unit, setting.origin), host)
            for host, setting in found.hccl_settings
        )
        columns = [
            out.Column("HCCL SETTING", itemgetter(0)),
            out.Column("VALUE", itemgetter(1)),
            out.Column("SET BY", itemgetter(2)),
            out.Column("HOSTS", itemgetter(3)),
        ]
        rows = [(*key, fold_hosts(hosts)) for key, hosts in sorted(alike.items())]
        sys.stdout.write(f"\n{out.format_table(rows, columns)}")
    for host in found.pending_hosts:
        ctx.say("logs.files-pending", "{host}: collection of files is still running", host=host)
