"""How much data of jobs is copied to the head node and kept there and on nodes: limits, and what may be removed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from ascendrun.core.dataclass import dataclass
from ascendrun.text import Text

DAY_S = 86400.0
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
EVENTS_BYTES = 64 * MIB
"""A supervisor writes about 300 bytes for each rank; more is not from it."""


UNITS: Mapping[str, float] = {"mib": MIB, "gib": GIB, "days": DAY_S}
"""By the last word of a setting's name."""


def limit(default: float, setting: str, meaning: Text) -> Any:
    """Return a field that a setting sets, in the unit of its name."""
    return field(default=default, metadata={"setting": setting, "meaning": meaning})


@dataclass(frozen=True)
class Retention:
    """Limits in bytes and seconds. Sizes are those of allocated blocks: a sparse file counts as what it occupies."""

    pull_error_bytes: int = limit(
        16 * MIB,
        "pull_error_mib",
        Text("settings.pull-error", "MiB of a rank's error file that are copied to the head node"),
    )
    pull_metrics_bytes: int = limit(
        GIB,
        "pull_metrics_mib",
        Text("settings.pull-metrics", "MiB of a rank's metrics that are copied to the head node"),
    )
    pull_job_bytes: int = limit(
        100 * GIB,
        "pull_job_gib",
        Text("settings.pull-job", "GiB of a job on the head node; its further logs stay on the nodes"),
    )
    outputs_job_bytes: int = limit(
        50 * GIB,
        "outputs_job_gib",
        Text("settings.outputs-job", "GiB of a job's `outputs` that are fetched to the head node at its end"),
    )
    min_free_bytes: int = limit(
        GIB,
        "min_free_gib",
        Text("settings.min-free", "GiB to keep free on the head node; with less, logs stay on the nodes"),
    )
    keep_jobs_s: float = limit(
        30 * DAY_S,
        "keep_jobs_days",
        Text("settings.keep-jobs-days", "days after its end until `prune` removes a job's logs from the head node"),
    )
    keep_jobs_bytes: int = limit(
        50 * GIB,
        "keep_jobs_gib",
        Text("settings.keep-jobs", "GiB of all jobs on the head node; beyond it `prune` removes the oldest"),
    )
    keep_node_s: float = limit(
        7 * DAY_S,
        "keep_node_days",
        Text("settings.keep-node-days", "days after its end until `prune` removes a job's logs from a node"),
    )
    keep_node_bytes: int = limit(
        20 * GIB,
        "keep_node_gib",
        Text("settings.keep-node", "GiB of ended jobs on a node; beyond it `prune` removes the oldest"),
    )

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
