"""Jobs for tests, with what does not matter filled in, and their rows in a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Callable

from ascendrun.core.jobs.job import Job
from ascendrun.head.state.store import Store


def demo_job(**values: Any) -> Job:
    defaults = {"id": "j-0001", "name": "demo", "run": "r", "hosts": ("a", "b")}
    return Job(**{**defaults, "grace_s": 1.0, "start_s": 1.0, "created_at_s": 1.0, **values})


def add_job(
    store: Store,
    key: str,
    make: Callable[[str, str], Job],
    *,
    spec: Mapping[str, Any] = {},
    hosts: Sequence[Mapping[str, Any]] = (),
    now_s: float = 1.0,
) -> Job:
    """Store a job; `make(id, id of the head)`."""
    return store.jobs.add(key=key, make_job=make, spec=spec, hosts=list(hosts), trees=[], file=None, now_s=now_s)


def store_job(
    store: Store,
    key: str = "k",
    *,
    spec: Mapping[str, Any] = {},
    file: str | None = None,
    now_s: float = 1.0,
    **values: Any,
) -> Job:
    """Store a `demo_job` of these values, on its hosts, under the id that it gets."""

    def make(job_id: str, head_id: str) -> Job:
        return demo_job(id=job_id, **values)

    hosts = [{"name": host} for host in demo_job(**values).hosts]
    return store.jobs.add(key=key, make_job=make, spec=spec, hosts=hosts, trees=[], file=file, now_s=now_s)


def insert_job(store: Store, *, spec: Mapping[str, Any] = {}, **values: Any) -> Job:
    """Store a `demo_job` of these values under its own id, as a stage of a pipeline is."""
    job = demo_job(**values)
    with store.writing() as db:
        store.jobs.insert(
            db,
            key=job.id,
            make_job=lambda row, head: job,
            spec=spec,
            hosts=[],
            trees=[],
            file=None,
            now_s=job.created_at_s,
        )
    return job
