"""From a stored job and its nodes' reports to the plan of its present attempt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ascendrun.core.hosts import Host
from ascendrun.core.jobs.job import Job
from ascendrun.core.jobs.plan import Folders, LaunchPlan, Tree
from ascendrun.core.reports import NodeReport
from ascendrun.node import layout

if TYPE_CHECKING:
    from ascendrun.core.jobfile.spec import JobSpec


def build_plan(
    spec: JobSpec, hosts: tuple[Host, ...], reports: Mapping[str, NodeReport], job: Job, trees: tuple[Tree, ...]
) -> LaunchPlan:
    """The plan of the job's present attempt. Raises PreflightError or InvalidInputError with every reason."""
    from ascendrun.core.jobs.plan import make_plan
    from ascendrun.health.samples.device_samples import sampling_wish

    folders = {
        host: Folders(
            work=layout.work_dir(report.root, job.home or job.run),
            checkpoints=layout.checkpoints_dir(report.root, job.run),
            attempt=layout.attempt_dir(report.root, job.run_id),
            trees=f"{report.root}/trees",
        )
        for host, report in reports.items()
    }
    plan = make_plan(
        spec,
        hosts,
        reports,
        job=job.id,
        attempt=job.attempt,
        run_id=job.run_id,
        folders=folders,
        trees=trees,
        home=job.home,
    )
    return replace(
        plan, sampling=sampling_wish(spec.devices.type, every_s=spec.sampling.interval_s, hosts=len(plan.nodes))
    )
