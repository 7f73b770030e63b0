"""Data of the page of the use of devices: what users, projects or months had, and what of it was waste."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ascendrun.health.report.cost import GROUPS, sum_groups

if TYPE_CHECKING:
    from ascendrun.cli.dashboard.jobpage import Kept
    from ascendrun.cluster import Cluster

PERIODS = ("7", "30", "90", "")
"""Days that the page offers; "": all."""
KEPT_S = 30.0
DAY_S = 86400.0


def read_usage(cluster: Cluster, kept: Kept, asked: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the sums of the jobs that ended in a period. What is asked for in other words counts as not asked for."""
    by = asked.get("by") if asked.get("by") in GROUPS else GROUPS[0]
    days = asked.get("days") if asked.get("days") in PERIODS else "30"
    since_s = time.time() - DAY_S * int(days) if days else None
    jobs = kept.get(("usage", days), lambda: cluster.jobs.history(since_s=since_s), seconds=KEPT_S)
    rows = sum_groups(jobs, str(by))
    return {"by": by, "days": days, "groups": GROUPS, "periods": PERIODS, "rows": rows}
