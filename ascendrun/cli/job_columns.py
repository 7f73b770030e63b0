"""The table of jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ascendrun.cli import output as out
from ascendrun.cluster import JobView
from ascendrun.text.format import fold_hosts


def job_columns(
    now_s: float, causes: Mapping[str, str | None] = MappingProxyType({}), rows: Sequence[JobView] = ()
) -> list[out.Column]:
    """`causes`: of failed jobs that were diagnosed, by id, in place of their reason. `rows`: STARTS is not only in wide
    tables if one of them is expected to start."""
    waits = any(job.start_expected_at_s is not None for job in rows)

    def duration_s(job: JobView) -> float | None:
        ended_at_s = now_s if job.ended_at_s is None else job.ended_at_s
        return None if job.started_at_s is None else ended_at_s - job.started_at_s

    return [
        out.Column("ID", lambda job: job.id),
        out.Column("NAME", lambda job: job.name),
        out.Column("STATE", lambda job: job.state),
        out.Column("ATTEMPT", lambda job: str(job.attempt), dropped=4),
        out.Column("NODES", lambda job: fold_hosts(job.hosts) or str(job.nodes), dropped=1),
        out.Column("RANKS", lambda job: str(job.world_size or "-"), dropped=3),
        out.Column("SPARES", lambda job: fold_hosts(job.spares) or "-", is_wide=True),
        out.Column("AGE", lambda job: out.describe_seconds(now_s - job.created_at_s), dropped=5),
        out.Column("DURATION", lambda job: out.describe_seconds(duration_s(job)), dropped=2),
        out.Column("EXIT", lambda job: "-" if job.exit_code is None else str(job.exit_code), is_wide=True),
        out.Column("STARTS", lambda job: out.describe_time(job.start_expected_at_s), is_wide=not waits, dropped=2),
        out.Column("CREATED", lambda job: out.describe_time(job.created_at_s), is_wide=True),
        out.Column("ENDED", lambda job: out.describe_time(job.ended_at_s), is_wide=True),
        out.Column("FILE", lambda job: job.file or "-", is_wide=True),
        out.Column("PROGRESS", lambda job: out.describe_progress(job.progress), dropped=1),
        out.Column("REASON", lambda job: out.headline(causes.get(job.id) or str(job.reason))),
    ]
