"""How much data of jobs is copied to the head node and kept there and on nodes: limits, and what may be removed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ascendrun.core.dataclass import dataclass

DAY_S = 86400.0
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
EVENTS_BYTES = 64 * MIB
"""A supervisor writes about 300 bytes for each rank; more is not from it."""


@dataclass(frozen=True)
class Retention:
    """Limits in bytes and seconds; see the settings of LIMITS (core/settings.py).

    Copied to the head node: `pull_error_bytes` of a rank's error file, `pull_metrics_bytes` of its metrics,
    `pull_job_bytes` of a job, nothing but events while less than `min_free_bytes` of the disk are free. Of its declared
    outputs `outputs_job_bytes` are fetched without a command. Kept: jobs for
    `keep_jobs_s` after their end and `keep_jobs_bytes` of all, on each node for `keep_node_s` and `keep_node_bytes`.
    Sizes are those of allocated blocks: a sparse file counts as what it occupies.
    """

    pull_error_bytes: int = 16 * MIB
    pull_metrics_bytes: int = GIB
    pull_job_bytes: int = 100 * GIB
    outputs_job_bytes: int = 50 * GIB
    min_free_bytes: int = GIB
    keep_jobs_s: float = 30 * DAY_S
    keep_jobs_bytes: int = 50 * GIB
    keep_node_s: float = 7 * DAY_S
    keep_node_bytes: int = 20 * GIB

    def file_limits(self) -> Mapping[str, int]:
        """Return the bytes of one file that are copied, by its kind (the last word of its name)."""
        return {"events": EVENTS_BYTES, "error": self.pull_error_bytes, "metrics": self.pull_metrics_bytes}


def kind_of(file: str) -> str:
    """Return the kind of a followed file: `rank-3.out.times` is times, `events` is events."""
    return file.rpartition(".")[2]


@dataclass(frozen=True)
class Stored:
    """Data that may be removed. `name`: of a job, run or staged directory; `since_s`: its end or last use, UTC."""

    name: str
    since_s: float
    size_bytes: int


@dataclass(frozen=True)
class Removal:
    """`why`: age (older than the limit) or size (the oldest while all together are larger than the limit)."""

    name: str
    size_bytes: int
    why: str


def choose_removals(
    stored: Sequence[Stored], *, now_s: float, max_age_s: float, max_bytes: float
) -> tuple[Removal, ...]:
    """Return what goes, oldest first, so that nothing older than `max_age_s` and no more than `max_bytes` remain."""
    rest = sum(one.size_bytes for one in stored)
    chosen: list[Removal] = []
    for one in sorted(stored, key=lambda one: (one.since_s, one.name)):
        is_old = now_s - one.since_s > max_age_s
        if is_old or rest > max_bytes:
            chosen.append(Removal(one.name, one.size_bytes, "age" if is_old else "size"))
            rest -= one.size_bytes
    return tuple(chosen)
