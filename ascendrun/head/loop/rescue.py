"""Rows of the store that are missing, damaged or outdated, rebuilt from the directories of their jobs.

A row is rebuilt from job.json (what was submitted), record.json (the newest record) and the copies of the nodes' files.
The rest comes from the nodes: a rebuilt job that has processes is resumed as after a restart of the controller.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ascendrun.core.dataclass import dataclass
from ascendrun.core.events import Event
from ascendrun.core.jobs import endings, inputs
from ascendrun.core.jobs.job import Cause, Job, NodeProgress, Phase, State, load_job
from ascendrun.core.jobs.job_copy import JobCopy, unseal
from ascendrun.core.jobs.lifecycle import advance
from ascendrun.core.jobs.reasons import because
from ascendrun.core.jobs.roles import devices_of
from ascendrun.head.protocol.agent_events import make_event
from ascendrun.head.spool.collector import NodeSpool
from ascendrun.head.spool.spool_files import hosts_in, is_complete
from ascendrun.head.state import job_files
from ascendrun.head.state.job_table import RawRow, StoredJob, add_events
from ascendrun.head.state.state_dir import REBUILT_FILE, StoreDamagedError, is_spool_of, read_placement, spool_dir
from ascendrun.head.state.store import Store
from ascendrun.node.files import write_json
from ascendrun.node.layout import make_tag

_ATTEMPT = re.compile(r"attempt-([1-9][0-9]*)")
_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError)


@dataclass(frozen=True)
class _Found:
    """A job whose row is to be written. `source`: the file that has its record."""

    copy: JobCopy
    job: Job
    source: str
    events: tuple[Event, ...] = ()


def restore_rows(store: Store, known: Sequence[StoredJob] = ()) -> bool:
    """Compare the rows with the directories of the jobs and rebuild rows; return whether anything was rebuilt.

    All rows are compared if the store is suspect, else only those of live jobs. `known`: newer records of live jobs.
    Raises StoreUnusableError.
    """
    state_dir, now_s = store.path.parent, time.time()
    newest = {stored.job.id: stored for stored in known}
    found: dict[str, _Found] = {}
    lost: list[str] = []
    bad: list[str] = []
    live = _live_ids(store)
    for row in store.jobs.raw_rows():
        if live is None or row.id in live:
            copy = job_files.read_copy(state_dir, row.id) if isinstance(row.id, str) else None
            stored = _read_row(row)
            if copy is None and stored is None:
                bad.append(row.id)
                lost += [row.id] if _job_id_in(row) in (row.id, None) else []
                continue
            repaired = _rebuilt(state_dir, copy, newest.get(row.id), row, stored)
            if repaired is not None:
                found[repaired.job.id] = repaired
    listed = store.ids() - set(bad)
    for job_id in sorted({*newest, *job_files.jobs_without_row(state_dir, listed)} - listed - set(found)):
        copy, memory = job_files.read_copy(state_dir, job_id), newest.get(job_id)
        repaired = None if copy is None and memory is None else _rebuilt(state_dir, copy, memory)
        if copy is None:
            path = job_files.job_folder(state_dir, job_id) / job_files.COPY_FILE
            with suppress(OSError):
                path.rename(path.with_suffix(".damaged"))
        if repaired is None:
            lost.append(job_id)
        else:
            found[job_id] = repaired
    if store.was_damaged:
        lost += [name for name in job_files.folders_of_jobs(state_dir) if name not in listed and name not in lost]
    lost = [name for name in lost if name not in found]
    file = None if store.set_aside_at is None else str(store.set_aside_at)
    with store.writing() as db:
        db.executemany("DELETE FROM jobs WHERE id = ?", [(job_id,) for job_id in bad])
        for one in sorted(found.values(), key=lambda one: one.copy.number):
            event = Event("job-rebuilt", {"source": one.source}, one.job.hosts, attempt=one.job.attempt, at_s=now_s)
            store.jobs.put(db, one.copy, one.job, (*one.events, event), is_drained=_is_drained(state_dir, one.job))
        machines = store.machines.restore(db) if store.is_suspect else []
        if store.is_suspect:
            store.events.remove_unreadable()
        if store.was_damaged or lost or machines:
            values = {"count": len(found), "lost": lost, "machines": machines, "file": file}
            add_events(db, "", [Event("store-rebuilt", values, at_s=now_s)])
    has_changed = bool(found or lost or machines or store.was_damaged)
    if has_changed:  # what commands print
        report = {"at_s": now_s, "jobs": list(found), "lost": lost, "machines": machines, "file": file}
        print(f"controller: job list rebuilt: {json.dumps(report)}", flush=True)
        with suppress(OSError):
            write_json(str(state_dir / REBUILT_FILE), report)
    if store.is_suspect:
        _complete_directories(store)
    store.is_suspect = store.was_damaged = False
    return has_changed


def _live_ids(store: Store) -> frozenset[str] | None:
    """Return the jobs to compare; None: all, since the store is suspect."""
    if not store.is_suspect:
        try:
            return frozenset(stored.job.id for stored in store.jobs.live())
        except StoreDamagedError:
            store.is_suspect = True
    return None


def _rebuilt(
    state_dir: Path,
    copy: JobCopy | None,
    memory: StoredJob | None,
    row: RawRow | None = None,
    stored: StoredJob | None = None,
) -> _Found | None:
    """Return a job with its newest record; None: its row has it. One of `copy`, `memory` and `stored` is there."""
    one = stored or memory
    own = copy or (one.copy(row.number if row is not None else int(one.job.id.split("-")[1])) if one else None)
    assert own is not None
    record = _record_of(state_dir, own.id)
    if stored is None or row is None or (record is not None and record[0] > int(unseal(row.record).get("saved_ns", 0))):
        if memory is not None:
            return _Found(own, memory.job, "memory")
        source, job = (job_files.COPY_FILE, own.new_job()) if record is None else (job_files.RECORD_FILE, record[1])
        return _caught_up(state_dir, _Found(own, job, source))
    if memory is not None and memory.job != stored.job:
        return _Found(own, memory.job, "memory")
    agrees = copy is None or _agree(row, stored, copy)
    if agrees and _is_consistent(row, stored.job) and not _has_news(state_dir, stored.job):
        return None
    return _caught_up(state_dir, _Found(own, stored.job, "state.db"))


def _job_id_in(row: RawRow) -> str | None:
    """Return the id in the record of a row; None: the record cannot be read."""
    try:
        return str(unseal(row.record)["id"])
    except _UNREADABLE:
        return None


def _read_row(row: RawRow) -> StoredJob | None:
    """Return the job of a row; None: unreadable."""
    try:
        job = load_job(unseal(row.record))
        values = [json.loads(text) for text in (row.spec, row.hosts, row.trees)]
        return StoredJob(job, row.key, values[0], values[1], values[2], row.file) if job.id == row.id else None
    except _UNREADABLE:
        return None


def _agree(row: RawRow, stored: StoredJob, copy: JobCopy) -> bool:
    """Return whether the columns that never change are those of the copy."""
    mine, other = stored.copy(row.number).to_json(), copy.to_json()
    return all(mine[name] == other[name] for name in ("key", "name", "run", "spec", "hosts", "trees", "file"))


def _is_consistent(row: RawRow, job: Job) -> bool:
    """Return whether the columns that are made from the record are those of the record."""
    return (
        (row.name, row.state) == (job.name, job.state.value)
        and bool(row.has_unconfirmed) == bool(job.held_hosts)
        and (job.is_terminal or not row.is_drained)
    )


def _record_of(state_dir: Path, job_id: str) -> tuple[int, Job] | None:
    """Return record.json with the time of its record; None: missing or damaged."""
    try:
        values = job_files.read_record(state_dir, job_id)
        job = None if values is None else load_job(values)
    except (*_UNREADABLE, OSError):
        return None
    return None if job is None or job.id != job_id or values is None else (int(values.get("saved_ns", 0)), job)


# The copies of the nodes' files


def _newest_attempt(state_dir: Path, job_id: str, run: str) -> int:
    """Return the number of the newest attempt whose nodes sent records; 0: none."""
    folder = job_files.job_folder(state_dir, job_id)
    numbers = [int(match.group(1)) for match in map(_ATTEMPT.fullmatch, os.listdir(folder)) if match]
    return max((number for number in numbers if _has_records(spool_dir(state_dir, job_id, number), run)), default=0)


def _has_records(folder: Path, run: str) -> bool:
    tag = make_tag(run, int(folder.name[len("attempt-") :]))
    return is_spool_of(folder, tag) and any((folder / host / "events.0").exists() for host in hosts_in(folder))


def _has_news(state_dir: Path, job: Job) -> bool:
    """Return whether the nodes sent records of a start that the record of the job does not have."""
    if job.is_terminal or not job_files.job_folder(state_dir, job.id).is_dir():
        return False
    newest = _newest_attempt(state_dir, job.id, job.run)
    return newest > job.attempt or (newest == job.attempt and job.go_sent_at_s is None)


def _caught_up(state_dir: Path, found: _Found) -> _Found:
    """Return the job with the start of which its nodes sent records, and with the end if all records are here."""
    job, copy = found.job, found.copy
    if job.is_terminal or not job_files.job_folder(state_dir, job.id).is_dir():
        return found
    if _has_news(state_dir, job):
        newest = _newest_attempt(state_dir, job.id, job.run)
        hosts = job.hosts if newest == job.attempt else ()
        job = job_after_go(state_dir, copy, replace(job, attempt=newest, hosts=hosts))
        found = replace(found, job=job, source="records of the nodes")
    folder = spool_dir(state_dir, job.id, job.attempt)
    if job.go_sent_at_s is None or not is_complete(folder) or not is_spool_of(folder, job.run_id):
        return found
    events: list[Event] = []
    for at_s, event in _history(folder):
        step = advance(job, event, now_s=at_s)
        job, events = step.job, events + list(step.events)
    return replace(found, job=job, events=tuple(events)) if job.is_terminal else found


def job_after_go(state_dir: Path, copy: JobCopy, job: Job) -> Job:
    """Return the record as it was when GO was decided; the nodes tell the rest."""
    folder, nodes, first = spool_dir(state_dir, job.id, job.attempt), [], 0
    by_name = {str(host["name"]): host for host in copy.hosts}
    recorded = job.hosts or copy.placement or read_placement(folder) or _hosts_with_records(folder)
    placed = [name for name in recorded if name in by_name]
    placed = placed if job.request.least <= len(placed) <= job.request.nodes else list(by_name)[: job.request.nodes]
    roles = [role for role in copy.spec.get("roles") or () for _ in range(role["nodes"])]
    for number, host in enumerate(by_name[name] for name in placed):
        role, ends_job = (roles[number]["name"], roles[number]["ends_job"]) if number < len(roles) else (None, True)
        events = NodeSpool(folder / str(host["name"])).new_events()
        started = {event["rank"] for event in events if event.get("event") == "rank_started" and _has_rank(event)}
        count = max(_ranks_of(copy.spec, role, host), len(started))
        ranks = tuple(range(first, first + count))
        node = NodeProgress(str(host["name"]), number, Phase.GO_SENT, ranks, role=role, ends_job=ends_job)
        nodes.append(node)
        first += count
    return replace(
        copy.new_job(),
        attempt=job.attempt,
        hosts=tuple(placed),
        state=State.STARTING,
        reason=because("rebuilt"),
        since_s=time.time(),
        nodes=tuple(nodes),
        world_size=first,
        go_sent_at_s=time.time(),
    )


def _hosts_with_records(folder: Path) -> tuple[str, ...]:
    """Return the hosts of an attempt from the copies of their records, in the order of their ranks."""
    first: dict[str, int] = {}
    for host in hosts_in(folder) if folder.is_dir() else ():
        ranks = [event["rank"] for event in NodeSpool(folder / host).new_events() if _has_rank(event)]
        first[host] = min(ranks, default=1 << 30)
    return tuple(sorted(first, key=lambda host: (first[host], host)))


def _has_rank(event: Mapping[str, Any]) -> bool:
    """Return whether a node's record is of a rank, not of the node or of a launcher."""
    return isinstance(event.get("rank"), int) and event["rank"] >= 0


def _ranks_of(spec: Mapping[str, Any], role: str | None, host: Mapping[str, Any]) -> int:
    """Return the number of ranks on a host, as core/jobs/plan.py counts them."""
    devices = devices_of(spec, role)
    if spec.get("launcher") == "none":
        return 1
    return int(devices.get("per_node") or len(devices.get("ids") or ()) or host.get("slots") or 1)


def _history(folder: Path) -> Iterator[tuple[float, inputs.JobInput]]:
    """Yield the inputs of a complete attempt in their order, with the time of each.

    A stop that the head requested, not after a failure and not of servers whose work was complete, was requested by the
    user.
    """
    lines = [(host, line) for host in hosts_in(folder) for line in NodeSpool(folder / host).new_events()]
    lines.sort(key=lambda pair: (_STEPS.get(str(pair[1].get("event")), 1), int(pair[1].get("at_ns") or 0)))
    made = [(int(line.get("at_ns") or 0) / 1e9, make_event(host, line), line) for host, line in lines]
    has_failed = any(isinstance(event, endings.RankExited) and event.exit.is_failure for _, event, _ in made)
    is_stopped = False
    for at_s, event, line in made:
        told = (line.get("reason") or {}).get("values") or {}
        is_asked = line.get("event") == "stopping" and line.get("by") == "head"
        is_asked = is_asked and told.get("why") != Cause.COMPLETED.value
        if is_asked and not has_failed and not is_stopped:
            is_stopped = True
            yield at_s, inputs.StopRequested(now=False, by=str(told.get("by") or "-"))
        elif event is not None:
            yield at_s, event


_STEPS = {"rank_started": 0, "ended": 2}
"""Order of the records of several hosts, whose clocks differ: all starts, then the rest, then the ends."""


def _is_drained(state_dir: Path, job: Job) -> bool:
    """Return whether nothing of an ended job is awaited from its nodes."""
    if not job.is_terminal or job.held_hosts:
        return False
    return job.go_sent_at_s is None or is_complete(spool_dir(state_dir, job.id, job.attempt))


def _complete_directories(store: Store) -> None:
    """Write the copies and records that are missing: the disk may have been full."""
    state_dir = store.path.parent
    for row in store.jobs.raw_rows():
        stored = _read_row(row)
        if stored is None:
            continue
        with suppress(OSError):
            if job_files.read_copy(state_dir, row.id) is None:
                job_files.write_copy(state_dir, stored.copy(row.number))
            if _record_of(state_dir, row.id) is None and stored.job.state is not State.QUEUED:
                job_files.write_record(state_dir, row.id, row.record)
