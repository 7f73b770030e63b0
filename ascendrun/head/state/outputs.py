"""Outputs of jobs in the state directory: `outputs/<job or pipeline>/`, and `outputs/<job>.json` while some are not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ascendrun.core.node_messages import Failure


def outputs_dir(state_dir: Path, name: str) -> Path:
    """Return the directory of the outputs of a job, or of a pipeline for all of its stages."""
    return state_dir / "outputs" / name


def waiting_file(state_dir: Path, job_id: str) -> Path:
    return state_dir / "outputs" / f"{job_id}.json"


def waiting_jobs(state_dir: Path) -> list[str]:
    """Return the ids of the jobs with declared outputs that are not here."""
    return sorted(path.stem for path in (state_dir / "outputs").glob("*.json"))


def read_waiting(state_dir: Path, job_id: str) -> Mapping[str, Failure | None]:
    """Return the hosts with declared outputs that are not here, and why the last try failed; None: it has not ended.

    {}: all are here, or none were declared.
    """
    try:
        values = json.loads(waiting_file(state_dir, job_id).read_bytes())
        return {str(name): None if why is None else Failure.from_json(why) for name, why in values.items()}
    except (OSError, ValueError, AttributeError):
        return {}
