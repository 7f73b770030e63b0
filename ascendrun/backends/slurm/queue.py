"""What is asked of Slurm's queue, and what it answers: options of sbatch, and the JSON of squeue. Pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ascendrun.core.allocations import AllocationRequest, AllocationState, EngineError, Gone, Granted, Waiting
from ascendrun.core.dataclass import dataclass
from ascendrun.core.hosts import Host
from ascendrun.core.jobs.reasons import because
from ascendrun.core.names import expand_names, split_list

COMMENT = "ascendrun:"
OPTIONS = ("partition", "account", "qos", "time", "constraint", "reservation", "exclude")
"""Options of the engine that are options of sbatch with the same name."""
NOTICE_S = 15.0
"""Seconds beyond the grace period before its end at which Slurm tells the job: it may be late by its own interval."""

NEVER = re.compile(
    "PartitionConfig|PartitionNodeLimit|PartitionTimeLimit|PartitionInactive|PartitionDown|ReqNodeNotAvail.*|Assoc.*Limit"
    "|QOS.*(Limit|NotAllowed)|QOSMax.*|.*NotSatisfied|BadConstraints|Invalid.*|AccountNotAllowed|JobHeld.*|.*PerJobLimit"
)
"""Reasons of PENDING that only a change ends (docs of squeue, JOB REASON CODES)."""
ENDS = {
    "CANCELLED": "cancelled",
    "TIMEOUT": "time-limit",
    "DEADLINE": "time-limit",
    "NODE_FAIL": "node-failed",
    "BOOT_FAIL": "node-failed",
    "PREEMPTED": "preempted",
    "REVOKED": "preempted",
    "OUT_OF_MEMORY": "failed",
    "FAILED": "failed",
    "COMPLETED": "failed",
}
"""Causes (allocations.Gone) of the states in which a job of Slurm has ended."""
SACCT = ("sacct", "--noheader", "--allocations", "--parsable2", "--format=JobID,State")
_TRANSIENT = re.compile(
    "Unable to contact|timed out|Connection refused|Zero Bytes|Communication|temporar|unavailable|Transport|"
    "authentication|credential|Socket|shutdown|slurm_load|backup",
    re.IGNORECASE,
)
"""What commands of Slurm print when slurmctld or munge does not answer; they have no exit code of its own for it."""


@dataclass(frozen=True)
class QueuedJob:
    """A job of Slurm that is ours. `key`: of its allocation. `start_s`, `end_s`: UTC seconds, 0: unknown."""

    id: str
    key: str
    state: str
    reason: str
    nodes: str
    gres: tuple[str, ...]
    start_s: float
    end_s: float

    @property
    def is_live(self) -> bool:
        return self.state not in ENDS


def sbatch_options(wanted: AllocationRequest, *, exported: str) -> list[str]:
    options = [f"--{name}={wanted.options[name]}" for name in OPTIONS if name in wanted.options]
    if wanted.length_s is not None:  # of two the last counts
        options.append(f"--time={math.ceil(wanted.length_s / 60)}")
    if wanted.devices:
        options.append(f"--gres={wanted.options.get('gres', 'npu')}:{wanted.devices}")
    if wanted.hosts:
        options.append(f"--nodelist={','.join(wanted.hosts)}")
    if wanted.exclude:
        options.append(f"--exclude={','.join(filter(None, (wanted.options.get('exclude'), *wanted.exclude)))}")
    return [
        "--parsable",
        f"--job-name={wanted.name}",
        f"--comment={COMMENT}{wanted.key}",
        f"--nodes={wanted.nodes}",
        "--ntasks-per-node=1",
        "--no-requeue",
        "--output=/dev/null",
        "--chdir=/",
        f"--export={exported}",
        f"--signal=B:USR1@{min(65535, round(wanted.grace_s + NOTICE_S))}",
        *options,
        *wanted.options.get("options", ()),
    ]


def is_refusal(command: str, words: str) -> bool:
    """Return whether sbatch would refuse the request again."""
    return command == "sbatch" and not _TRANSIENT.search(words)


def read_jobs(text: str) -> list[QueuedJob]:
    """Return our jobs, oldest first, of `squeue --json` of any release. Raises EngineError, also if slurmctld does not
    answer: squeue then prints no jobs, and exits with 0."""
    try:
        answer = json.loads(text)
        errors = [str(error.get("description") or error.get("error") or error) for error in answer.get("errors") or ()]
        if errors:
            raise EngineError(because("engine-silent", why=f"squeue: {errors[0]}"))
        rows = answer["jobs"]
        jobs = [_read_job(row) for row in rows if str(row.get("comment") or "").startswith(COMMENT)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineError(because("engine-silent", why=f"squeue --json: {error}")) from error
    return sorted(jobs, key=lambda job: int(job.id))


def _read_job(row: Mapping[str, Any]) -> QueuedJob:
    states = row["job_state"] if isinstance(row["job_state"], list) else [row["job_state"]]
    gres = row.get("gres_detail") or ()
    return QueuedJob(
        id=str(row["job_id"]),
        key=str(row["comment"])[len(COMMENT) :],
        state="COMPLETING" if "COMPLETING" in states else str(states[0]),  # its processes are being ended
        reason=str(row.get("state_reason") or "None"),
        nodes=str(row.get("nodes") or ""),
        gres=tuple(map(str, gres)),
        start_s=_number(row.get("start_time")),
        end_s=_number(row.get("end_time")),
    )


def _number(value: Mapping[str, Any] | float | None) -> float:
    """Return a number; newer releases wrap it as {set, infinite, number}. 0: not set, or without a limit."""
    if isinstance(value, Mapping):
        value = value.get("number") if value.get("set") and not value.get("infinite") else 0
    return float(value or 0)


def doubled(jobs: Sequence[QueuedJob], keys: Collection[str]) -> list[str]:
    """Return the ids of live jobs that have the key of an older one."""
    seen: set[str] = set()
    again = []
    for job in jobs:
        if job.key in keys and job.is_live:
            again += [job.id] if job.key in seen else []
            seen.add(job.key)
    return again


def states_of(jobs: Sequence[QueuedJob], keys: Collection[str]) -> dict[str, AllocationState]:
    """Return the states of these allocations: of the oldest live job of each, else of the newest."""
    found: dict[str, QueuedJob] = {}
    for job in jobs:
        if job.key in keys and (job.key not in found or not found[job.key].is_live):
            found[job.key] = job
    return {key: _state_of(job) for key, job in found.items()}


def _state_of(job: QueuedJob) -> AllocationState:
    if job.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "CONFIGURING"):
        will_start = not NEVER.fullmatch(job.reason)
        code = "slurm-pending" if will_start else "slurm-never"
        if will_start and job.start_s:
            return Waiting(because("slurm-expected", job=job.id, state=job.reason, at_s=job.start_s))
        return Waiting(because(code, job=job.id, state=job.reason), will_start)
    reason = because("slurm-ended", job=job.id, state=job.state, why=job.reason)
    if job.state == "COMPLETING":  # it grants nothing any more, and its processes are not gone
        return Waiting(reason)
    if job.is_live:
        return Granted(hosts_of(job), job.end_s or None, job.end_s - job.start_s if job.end_s else None)
    return Gone(ENDS[job.state], reason)


def ends_of(text: str, keys: Mapping[str, str]) -> dict[str, Gone]:
    """Return how these jobs ended, from the output of SACCT; one that has not ended is missing. `keys`: by job id."""
    rows = [row.split("|") for row in text.splitlines() if row.count("|") == 1]
    return {
        keys[job]: Gone(ENDS[state.split()[0]], because("slurm-ended", job=job, state=state.split()[0], why=state))
        for job, state in rows
        if job in keys and state.split()[:1] and state.split()[0] in ENDS
    }


def hosts_of(job: QueuedJob) -> tuple[Host, ...]:
    """Return the hosts of a running job with their devices: the n-th entry of `gres` is of the n-th node."""
    names = [name for part in split_list(job.nodes) for name in expand_names(part)]
    gres = job.gres if len(job.gres) == len(names) else ("",) * len(names)
    return tuple(
        Host(name, devices=devices_of(text), engine="slurm", allocation=job.id) for name, text in zip(names, gres)
    )


def devices_of(gres: str) -> tuple[int, ...] | None:
    """Return the indexes of the granted devices, as in "npu:910b:4(IDX:0-1,6-7)"; None: Slurm does not tell."""
    found = re.search(r"\(IDX:([0-9,-]+)\)", gres)
    if found is None:
        return None
    ranges = [part.partition("-") for part in found[1].split(",")]
    return tuple(index for first, _, last in ranges for index in range(int(first), int(last or first) + 1))
