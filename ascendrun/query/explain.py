"""Diagnosis of a job by its name: finds the attempt, reads its evidence, calls the pure diagnosis.

`python -m ascendrun.query.explain STATE_DIR JOB ATTEMPT` is the controller's child process for a failed attempt: it
prints {"failure", "first", "last_step"} and stores the diagnosis, which `explain` reads.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascendrun.core.dataclass import load_dataclass
from ascendrun.core.events import Event
from ascendrun.core.jobs.restart import PastAttempt
from ascendrun.head.spool.artifact_store import evidence_of, read_verdict, write_verdict
from ascendrun.head.spool.spool_files import StreamFiles, find_streams
from ascendrun.head.state.state_dir import SPOOL_STACKS, spool_dir
from ascendrun.health.diagnosis import Diagnosis, diagnose, outcome_of, render
from ascendrun.health.diagnosis.outcomes import hang_now
from ascendrun.health.failures import failure_of, first_of
from ascendrun.health.stacks import Frame, RankStack, Take, find_outliers, fold, read_stack
from ascendrun.query.evidence import attempt_to_explain, events_of_attempt, read_evidence
from ascendrun.query.views import JobView, choose_attempt, find_job
from ascendrun.text import Text, to_json

if TYPE_CHECKING:
    from ascendrun.head.protocol.control_messages import StacksReply

SLOW_SHOWN = 3
ABORT_BYTES = 1 << 18
ABORTED = "Fatal Python error: Aborted"
"""Python's first line at SIGABRT; the stacks of all threads follow."""


@dataclass(frozen=True)
class Explanation:
    """Why one attempt of a job ended, or its state. `attempts`: the number of attempts so far;
    `past_attempts`: those that ended and were followed by another. `stacks`: of an attempt without progress."""

    id: str
    name: str
    state: str
    attempt: int
    attempts: int
    diagnosis: Diagnosis
    past_attempts: tuple[PastAttempt, ...] = ()
    stacks: tuple[StackGroup, ...] = ()


@dataclass(frozen=True)
class StackGroup:
    """Ranks with equal stacks. `frames`: of the main thread, innermost first, (): no Python stack is known. `state`: a
    letter of /proc, "": the stack was printed at SIGABRT. `threads`: of one rank, all threads with their frames; ():
    not requested. `is_awaited`: whether the other ranks wait for these: the event of the hang names them, or without
    it, the stacks differ."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    state: str
    wait_channel: str
    source: str
    frames: tuple[str, ...]
    threads: tuple[tuple[str, tuple[str, ...]], ...] = ()
    is_awaited: bool = False


@dataclass(frozen=True)
class JobStacks:
    """The stacks of a job's ranks, the largest group first; those that others wait for are last. `problems`: hosts
    without a reply, and why. `at_s`: UTC, when the controller took them because of a hang; None: they are of now, or
    were printed at the end."""

    id: str
    name: str
    attempt: int
    groups: tuple[StackGroup, ...]
    problems: tuple[tuple[str, Text | str], ...] = ()
    at_s: float | None = None


def fold_stacks(job: JobView, replies: Sequence[StacksReply], *, rank: int | None) -> JobStacks:
    """Return the stacks of a job from the replies of its hosts. `rank`: only this one, with all its threads."""
    stacks = [read_stack(reply.host, row) for reply in replies for row in reply.ranks]
    problems = tuple((reply.host, reply.refused.line()) for reply in replies if reply.refused is not None)
    return JobStacks(job.id, job.name, job.attempt, _groups(stacks, rank), problems)


def kept_stacks(state_dir: Path, ref: str, *, attempt: int | None = None, rank: int | None = None) -> JobStacks | None:
    """Return the stacks of an attempt that are on the head node: those taken because of a hang, and for ranks without a
    Python stack those that they printed at SIGABRT. `attempt` None: the newest that has any. None: there are none."""
    stored, events = find_job(state_dir, ref)
    job = stored.job
    numbers = range(job.attempt, 0, -1) if attempt is None else [choose_attempt(job, attempt)]
    for number in numbers:
        stacks, at_s = _read_kept(spool_dir(state_dir, job.id, number), number)
        if stacks:
            hang = hang_now(events_of_attempt(events, number))
            groups = _groups(stacks, rank, awaited=hang.ranks if hang is not None else ())
            return JobStacks(job.id, job.name, number, groups, at_s=at_s)
    return None


def _read_kept(folder: Path, attempt: int) -> tuple[list[RankStack], float | None]:
    found: dict[int, RankStack] = {}
    times: list[float] = []
    for path in sorted(folder.glob(f"*/{SPOOL_STACKS}")):
        try:
            values = json.loads(path.read_bytes())
            found.update((int(row["rank"]), read_stack(path.parent.name, row)) for row in values["ranks"])
            times.append(float(values["at_s"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    for stream in find_streams(folder, attempt, streams=("err",)):
        if stream.rank >= 0 and (stream.rank not in found or not found[stream.rank].frames):
            text = _printed_at_abort(stream)
            if text:
                seen = found.get(stream.rank)
                known = {} if seen is None else {"state": seen.state, "wait_channel": seen.wait_channel}
                row = {**known, "rank": stream.rank, "source": "abort", "text": text}
                found[stream.rank] = read_stack(stream.host, row)
    return list(found.values()), min(times, default=None)


def _printed_at_abort(stream: StreamFiles) -> str:
    """Return what Python printed when the rank ended by SIGABRT; "": it did not."""
    for generation in stream.generations()[-1:]:
        try:
            with open(stream.path(generation), "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - ABORT_BYTES))
                _, mark, text = file.read().decode("utf-8", "replace").rpartition(ABORTED)
                return text if mark else ""
        except OSError:
            continue
    return ""


def _groups(stacks: Sequence[RankStack], rank: int | None, *, awaited: Sequence[int] = ()) -> tuple[StackGroup, ...]:
    """`awaited`: known from elsewhere; (): found by the stacks."""
    apart = set(awaited or find_outliers(Take(0.0, {one.rank: one for one in stacks})))
    if rank is not None:
        stacks = [one for one in stacks if one.rank == rank]
    folded = [
        (group, is_awaited)
        for is_awaited in (False, True)
        for group in fold([one for one in stacks if (one.rank in apart) is is_awaited])
    ]
    hosts = {one.rank: one.host for one in stacks}

    def lines(frames: Sequence[Frame]) -> tuple[str, ...]:
        return tuple(f"{one.file}:{'?' if one.line is None else one.line} {one.function}" for one in frames)

    return tuple(
        StackGroup(
            ranks,
            tuple(sorted({hosts[one] for one in ranks})),
            like.state,
            like.wait_channel,
            like.source,
            lines(like.frames),
            tuple((name, lines(frames)) for name, frames in like.threads) if rank is not None else (),
            is_awaited=is_awaited,
        )
        for (ranks, like), is_awaited in folded
    )


def explain_job(
    state_dir: Path,
    ref: str,
    *,
    attempt: int | None = None,
    lang: str | None = None,
    now_s: float,
    liveness: Mapping[str, Mapping[str, str]] | None = None,
    fresh: bool = False,
) -> Explanation:
    """Explain a job. `ref`: a job id, name or the start of an id. `attempt` None: the newest with any evidence. `lang`
    None: that of the process. `liveness`: {job id: {host: liveness}} from the controller. `fresh`: diagnose again even
    if the controller stored its diagnosis. Raises NotFoundError, ConflictError, StoreUnusableError."""
    stored, events = find_job(state_dir, ref)
    job = stored.job
    number = attempt_to_explain(job) if attempt is None else choose_attempt(job, attempt)
    known = None if fresh else stored_diagnosis(spool_dir(state_dir, job.id, number))
    own = events_of_attempt(events, number)
    kept = kept_stacks(state_dir, job.id, attempt=number) if hang_now(own) is not None else None
    stacks = () if kept is None else kept.groups
    if known is None:
        slow = slow_now(events) if job.state.value == "RUNNING" and number == job.attempt else ()
        seen = (liveness or {}).get(job.id)
        known = diagnose(
            read_evidence(state_dir, stored, events, attempt=number, now_s=now_s, slow=slow, liveness=seen)
        )
    else:
        known = replace(known, outcome=outcome_of(own))
    found = render(known, lang)
    return Explanation(job.id, job.name, job.state.value, number, job.attempt, found, job.past, stacks)


def slow_now(events: Sequence[Event]) -> tuple[Text, ...]:
    """Return the stragglers reported since the last time that all ranks were equally fast."""
    found: list[Text] = []
    for event in events:
        if event.code == "straggler":
            found.append(event.message())
        elif event.code == "straggler-resolved":
            found.clear()
    return tuple(found[-SLOW_SHOWN:])


MEMORY_BYTES = 1 << 30


def judge(state_dir: Path, job_id: str, attempt: int, *, now_s: float) -> dict[str, Any]:
    """Diagnose an attempt, store the diagnosis and return the values of the input Diagnosed. Raises AscendrunError."""
    folder = spool_dir(state_dir, job_id, attempt)
    basis = evidence_of(folder)
    stored, events = find_job(state_dir, job_id)
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
        return load_dataclass(Diagnosis, read_verdict(folder))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def main() -> None:
    os.nice(10)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    state_dir, job_id, attempt = sys.argv[1:]
    print(json.dumps(judge(Path(state_dir), job_id, int(attempt), now_s=time.time())))


if __name__ == "__main__":
    main()
