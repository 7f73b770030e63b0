"""Files of a job in the state directory: job.json and record.json, from which its row is rebuilt, and its outputs.

job.json is written before the job is acknowledged and never changes. record.json is the newest record, without sync.
Outputs are in `outputs/<job or pipeline>/`; `outputs/<job>.json` exists while some of them are not here.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ascendrun.core.jobs.job_copy import COPY_LIMIT, JobCopy, unseal
from ascendrun.core.node_messages import Failure
from ascendrun.head.state.state_dir import read_values
from ascendrun.node.files import replace_file, write_json

COPY_FILE = "job.json"
RECORD_FILE = "record.json"
PLAN_FILE = "plan.json"
"""In a job's directory: what its plan expected at its last start, see head/survey/training_plan.py."""
PRUNED_FILE = "pruned.json"
"""In a job's directory: {at_s, bytes} of its removed logs. In the state directory: {at_s} of the last removal."""
JOB_ID = re.compile(r"j-[0-9]+(?:-[0-9]+)?")


def job_folder(state_dir: Path, job_id: str) -> Path:
    return state_dir / "jobs" / job_id


def write_copy(state_dir: Path, copy: JobCopy) -> Path:
    """Write job.json, on disk on return; return its path. Raises OSError."""
    folder = job_folder(state_dir, copy.id)
    for level in (folder.parent, folder):
        level.mkdir(mode=0o700, exist_ok=True)
    write_json(str(folder / COPY_FILE), copy.to_json())
    return folder / COPY_FILE


def remove_copy(path: Path) -> None:
    """Remove the copy of a job that was not stored, and its directory if it has nothing else. Raises OSError."""
    path.unlink(missing_ok=True)
    if not os.listdir(path.parent):
        path.parent.rmdir()


def read_copy(state_dir: Path, job_id: str) -> JobCopy | None:
    """Return the copy of a job; None: missing or damaged. Raises OSError."""
    try:
        text = (job_folder(state_dir, job_id) / COPY_FILE).read_text(encoding="utf-8")
        copy = JobCopy.from_json(json.loads(text))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return copy if copy.id == job_id else None


def copy_for_nodes(state_dir: Path, job_id: str, placement: Sequence[str]) -> dict[str, str] | None:
    """Return the copy that the nodes of an attempt store; None: there is none, or it is too large."""
    try:
        copy = read_copy(state_dir, job_id)
    except OSError:
        return None
    packed = None if copy is None else replace(copy, placement=tuple(placement)).packed()
    return packed if packed is not None and sum(map(len, packed.values())) <= COPY_LIMIT else None


def pruned_at_s(folder: Path) -> float | None:
    """Return when the logs of a job, or old logs of all, were removed, UTC seconds; None: never."""
    at_s = read_values(folder / PRUNED_FILE).get("at_s")
    return at_s if isinstance(at_s, float) else None


def write_record(state_dir: Path, job_id: str, text: str) -> None:
    """Replace record.json with a sealed record. Raises OSError."""
    replace_file(str(job_folder(state_dir, job_id) / RECORD_FILE), text.encode(), durable=False)


def write_plan(state_dir: Path, job_id: str, values: dict[str, Any]) -> None:
    """Write plan.json. Raises OSError."""
    write_json(str(job_folder(state_dir, job_id) / PLAN_FILE), values)


def read_plan(state_dir: Path, job_id: str) -> dict[str, Any]:
    """Return the values of plan.json; {}: missing or damaged."""
    return read_values(job_folder(state_dir, job_id) / PLAN_FILE)


def read_record(state_dir: Path, job_id: str) -> dict[str, Any] | None:
    """Return the values of record.json; None: missing or damaged. Raises OSError."""
    try:
        return unseal((job_folder(state_dir, job_id) / RECORD_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def folders_of_jobs(state_dir: Path) -> list[str]:
    """Return the ids of jobs with a directory, sorted."""
    folder = state_dir / "jobs"
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted(name for name in names if JOB_ID.fullmatch(name))


def jobs_without_row(state_dir: Path, ids: Collection[str]) -> list[str]:
    """Return the ids of jobs that have a copy in their directory and are not among `ids`, sorted."""
    return [
        name
        for name in folders_of_jobs(state_dir)
        if name not in ids and (job_folder(state_dir, name) / COPY_FILE).exists()
    ]


def head_id_of(state_dir: Path) -> str | None:
    """Return the id of the head that stored the jobs of this directory; None: no copy tells it."""
    for job_id in folders_of_jobs(state_dir):
        copy = read_copy(state_dir, job_id)
        if copy is not None:
            return copy.run[: -len(copy.id) - 1]
    return None


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
    values = read_values(waiting_file(state_dir, job_id))
    try:
        return {name: None if why is None else Failure.from_json(why) for name, why in values.items()}
    except (ValueError, AttributeError):
        return {}
