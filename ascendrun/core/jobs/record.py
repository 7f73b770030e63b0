"""A job's record as plain JSON values and back, for the store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ascendrun.core.jobs.job import Cause, Exit, Job, NodeProgress, Phase, State
from ascendrun.core.jobs.reasons import FirstFailure
from ascendrun.text import from_json, to_json


def dump_job(job: Job) -> dict[str, Any]:
    """The record as JSON values; enums become their values, tuples lists, rank numbers in keys strings."""
    return dict(to_json(asdict(job)))


def load_job(record: Mapping[str, Any]) -> Job:
    """The job of a record made by `dump_job`, also after a trip through JSON."""
    values = dict(record)
    values["state"] = State(values["state"])
    values["reason"] = from_json(values["reason"])
    failure = from_json(values["first_failure"])
    values["first_failure"] = None if failure is None else FirstFailure(**failure)
    values["cause"] = None if values["cause"] is None else Cause(values["cause"])
    for name in ("hosts", "unconfirmed"):
        values[name] = tuple(values[name])
    values["nodes"] = tuple(_load_node(node) for node in values["nodes"])
    return Job(**values)


def _load_node(record: Mapping[str, Any]) -> NodeProgress:
    values = dict(record)
    values["phase"] = Phase(values["phase"])
    values["ranks"] = tuple(values["ranks"])
    values["lingering"] = tuple(values["lingering"])
    values["pids"] = {int(rank): pid for rank, pid in values["pids"].items()}
    values["exits"] = {int(rank): Exit(**exit) for rank, exit in values["exits"].items()}
    return NodeProgress(**values)
