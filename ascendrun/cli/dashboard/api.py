"""The JSON API: what commands print with `-o json`, under /api/v1."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal, Optional

from fastapi import APIRouter, Query
from starlette.responses import Response

from ascendrun.cli import output as out
from ascendrun.cli.top.records import row_record, view_record
from ascendrun.cluster import JobView, MachineView
from ascendrun.core.records import as_record, job_event_records
from ascendrun.health.report.cost import GroupUse, JobUse, sum_groups

if TYPE_CHECKING:
    from ascendrun.cli.dashboard.overview import SharedTop
    from ascendrun.cluster import Cluster

API_VERSION = "1"


def json_reply(text: str, status: int = 200) -> Response:
    return Response(text, status, media_type="application/json")


def record_reply(value: object) -> Response:
    return json_reply(out.format_record(as_record(value), "json"))


def make_router(cluster: Cluster, shared: SharedTop) -> APIRouter:
    """Return the routes of the API."""
    router = APIRouter(prefix=f"/api/v{API_VERSION}", default_response_class=Response)

    @router.get("/jobs", summary="ascendrun ps -o json")
    def jobs(everything: bool = Query(False, alias="all", description="Also ended jobs.")) -> Response:
        rows = (*cluster.jobs.found_attempts(), *cluster.jobs.list(everything=everything, folded=True))
        return json_reply(out.format_many(rows, "json", name="jobs", kind=JobView))

    @router.get("/jobs/{job}", summary="ascendrun show JOB -o json")
    def show(job: str) -> Response:
        return record_reply(cluster.jobs.detail(job))

    @router.get("/jobs/{job}/explain", summary="ascendrun explain JOB -o json")
    def explain(job: str, attempt: Optional[int] = Query(None, ge=1)) -> Response:
        return record_reply(cluster.diagnosis.explain(job, attempt=attempt))

    @router.get("/jobs/{job}/report", summary="ascendrun report JOB -o json")
    def report(job: str) -> Response:
        return record_reply(cluster.diagnosis.report(job))

    @router.get("/jobs/{job}/events", summary="ascendrun events JOB -o json")
    def events(job: str) -> Response:
        found = cluster.logs.events(job)
        try:
            records = job_event_records(found.new_events(), found.job_names())
        finally:
            found.close()
        return json_reply(out.format_records(records, "json", name="events", names=()))

    @router.get("/top", summary="ascendrun top -o json")
    def top() -> Response:
        view = shared.refresh(now_s=time.time())
        return json_reply(out.format_record(view_record(view, [row_record(row) for row in view.rows]), "json"))

    @router.get("/machines", summary="ascendrun nodes --all -o json")
    def machines() -> Response:
        return json_reply(out.format_many(cluster.hosts.machines(), "json", name="machines", kind=MachineView))

    @router.get("/history", summary="ascendrun history -o json")
    def history(
        user: Optional[str] = Query(None, description="Only jobs of this user."),
        by: Optional[Literal["user", "project", "month"]] = Query(None, description="Sums of these, not jobs."),
    ) -> Response:
        jobs = cluster.jobs.history(user=user)
        if by is not None:
            return json_reply(out.format_many(sum_groups(jobs, by), "json", name=f"{by}s", kind=GroupUse))
        return json_reply(out.format_many(jobs, "json", name="jobs", kind=JobUse))

    return router
