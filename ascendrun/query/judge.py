"""The child process of the controller that diagnoses a failed attempt, and the stored diagnosis that `explain` reads.

python -m ascendrun.query.judge STATE_DIR JOB ATTEMPT prints {"failure", "first", "last_step"} and stores the diagnosis.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ascendrun.core.dataclass import load_dataclass
from ascendrun.head.spool.artifact_store import evidence_of, read_verdict, write_verdict
from ascendrun.head.state.state_dir import spool_dir
from ascendrun.head.state.store import Store
from ascendrun.health.diagnosis import Diagnosis, diagnose
from ascendrun.health.diagnosis.kinds import failure_of, first_of
from ascendrun.query.evidence import read_evidence
from ascendrun.text import to_json

MEMORY_BYTES = 1 << 30


def judge(state_dir: Path, job_id: str, attempt: int, *, now_s: float) -> dict[str, Any]:
    """Diagnose an attempt, store the diagnosis and return the values of the input Diagnosed. Raises AscendrunError."""
    folder = spool_dir(state_dir, job_id, attempt)
    basis = evidence_of(folder)
    with Store.open_for_reading(state_dir) as store:
        stored = store.jobs.find(job_id)
        events = store.events.of(job_id)
    evidence = read_evidence(state_dir, stored, events, attempt=attempt, now_s=now_s)
    found = diagnose(evidence)
    write_verdict(folder, basis, to_json(found))
    steps = [rank.last_step for rank in evidence.ranks if rank.last_step is not None]
    return {
        "failure": to_json(failure_of(found, evidence)),
        "first": to_json(first_of(found, evidence)),
        "last_step": max(steps, default=None),
    }


def stored_diagnosis(folder: Path) -> Diagnosis | None:
    """Return the stored diagnosis of an attempt; None: there is none. The controller replaces it when more evidence
    arrives."""
    try:
        return _load(read_verdict(folder))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _load(row: Mapping[str, Any]) -> Diagnosis:
    return load_dataclass(Diagnosis, row)


def main() -> None:
    os.nice(10)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    state_dir, job_id, attempt = sys.argv[1:]
    print(json.dumps(judge(Path(state_dir), job_id, int(attempt), now_s=time.time())))


if __name__ == "__main__":
    main()
