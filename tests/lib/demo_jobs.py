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
