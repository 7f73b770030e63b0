"""Evidence of one attempt from the store, the spool, collected artifacts and samples; missing data are reported, and
are not an error."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascendrun.ascend.hccl_env import parse_hccl_env
from ascendrun.core.events import Event
from ascendrun.core.jobfile.launchers import RAY
from ascendrun.core.jobs import endings, inputs
from ascendrun.core.jobs.inputs import JobInput
from ascendrun.core.jobs.job import Cause, Exit, Job, NodeProgress, Phase, State
from ascendrun.core.jobs.reasons import Reason
from ascendrun.core.jobs.roles import devices_of, rank_labels
from ascendrun.core.rank_env import FLIGHT_FILE, forks_ranks
from ascendrun.head.protocol.agent_events import make_event
from ascendrun.head.spool.artifact_store import read_artifacts
from ascendrun.head.spool.clocks import read_clocks
from ascendrun.head.spool.metrics_reader import newest_values
from ascendrun.head.spool.spool_files import StreamFiles, find_streams
from ascendrun.head.state.sample_store import SampleStore
from ascendrun.head.state.state_dir import read_host_facts, spool_dir
from ascendrun.health.device_facts import device_addresses, device_facts
from ascendrun.health.diagnosis import evidence as given
from ascendrun.health.elastic_error import error_lines
from ascendrun.health.flight_recorder import Recorded, read_dump
from ascendrun.node.records import read_events
from ascendrun.query.log_reader import Budget, budget_for, last_arrival_s, read_tail, read_text_lines
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.head.state.job_table import StoredJob

AROUND_END_S = 120.0
ERROR_FILE_BYTES = 1 << 20
GATHERED_BYTES = 1 << 20
PLOG_BYTES = 2 << 20
PLOG_LINES = 3000
STEP_RANKS_LIMIT = 512
"""Above this number of ranks the newest steps are not read: a thousand small files take too long."""
ROUGH_CLOCK_S = 0.5
"""Error in seconds of a clock that was read only once, when the job started."""
DEFAULT_CONNECT_S, DEFAULT_EXEC_S = 120.0, 1836.0
_WORTH = re.compile(r"\[ERROR\]|Abnormal|crimer|\bE[IJ]\d{4}\b|deviceIp\[|HCCL_(?:CONNECT|EXEC)_TIMEOUT")
_PLOG_RANK = re.compile(r"(?:\brank\[|rankId\[|userRank\[)(\d+)\]")
_PLOG_PID = re.compile(r"plog-(\d+)_")
_KERNEL_TIME = re.compile(r"^\[\s*(\d+\.\d+)\]")


def read_evidence(
    state_dir: Path,
    stored: StoredJob,
    events: Sequence[Event],
    *,
    attempt: int | None = None,
    liveness: Mapping[str, str] | None = None,
    now_s: float,
    slow: Sequence[Text] = (),
) -> given.Evidence:
    """Return the evidence of an attempt. `attempt` None: the newest. `liveness`: of the job's hosts, from the
    controller, None: no controller. `slow`: the stragglers. Missing files are not an error."""
    job = stored.job
    number = attempt or job.attempt
    folder = spool_dir(state_dir, job.id, number)
    attempt_events = events_of_attempt(events, number)
    is_newest = number == job.attempt
    reading = _Reading(stored, folder, number, is_newest=is_newest, liveness=liveness or {})
    readings = [_HostReading(reading, host) for host in job.hosts_of(number)]
    ranks = tuple(rank for one in readings for rank in one.ranks())
    has_failed = any(rank.has_failed for rank in ranks)
    left: dict[str, dict[str, Any]] = {}
    if has_failed:
        ends = [rank.exited_at_s for rank in ranks if rank.exited_at_s is not None and rank.has_failed]
        left = read_headroom(state_dir, end_s=min(ends, default=job.ended_at_s or now_s))
    changes = [event for event in attempt_events if event.code == "state-changed"]
    stop = next((event for event in reversed(changes) if event.values.get("state") == "STOPPING"), None)
    cause: str | None = None if job.cause is None else job.cause.value
    reason: Reason | None = job.reason
    if not is_newest:
        cause = Cause.FAILURE.value if stop is None else str(stop.values.get("cause") or Cause.FAILURE.value)
        reason = None if stop is None else stop.values.get("reason")
    elif job.reason.code == "not-restarted" and isinstance(job.reason.why, Reason):
        reason = job.reason.why  # without the rule of the restart policy
    env = stored.spec.get("env") or {}
    return given.Evidence(
        job=job.id,
        name=job.name,
        state=job.state.value if is_newest else State.FAILED.value,
        attempt=number,
        reason=reason,
        cause=cause,
        device_type=str((stored.spec.get("devices") or {}).get("type") or "cpu"),
        launcher="none" if forks_ranks(stored.spec) else RAY if stored.spec.get("launcher") == RAY else "spawn",
        world_size=job.world_size if is_newest and job.world_size else len(ranks),
        now_s=now_s,
        connect_timeout_s=_timeout(readings, "HCCL_CONNECT_TIMEOUT", env, DEFAULT_CONNECT_S),
        exec_timeout_s=_timeout(readings, "HCCL_EXEC_TIMEOUT", env, DEFAULT_EXEC_S),
        started_at_s=job.started_at_s if is_newest else None,
        ended_at_s=job.ended_at_s if is_newest else None,
        ranks=tuple(sorted(ranks, key=lambda rank: rank.rank)),
        hosts=tuple(replace(one.evidence(attempt_events), **left.get(one.host, {})) for one in readings),
        events=attempt_events,
        slow=tuple(slow),
        missing=_missing(job, folder, number),
        needs=job.needs or "",
        labels=rank_labels(job.nodes),
    )


def attempt_to_explain(job: Job) -> int:
    """Return the newest attempt with evidence. An attempt that only waits for its start has none; the one before it has
    failed."""
    waits = job.state in (State.QUEUED, State.CHECKING, State.STAGING) and not job.go_sent_at_s
    return job.attempt - 1 if waits and job.attempt > 1 else max(1, job.attempt)


def events_of_attempt(events: Sequence[Event], attempt: int) -> tuple[Event, ...]:
    """Return the events of an attempt, and those after it up to the event that queued the next attempt."""
    found: list[Event] = []
    for event in events:
        number = event.attempt or (found and attempt)
        if number == attempt and not event.code.startswith("submitted"):
            found.append(event)
        elif number == attempt + 1 and found:
            found.append(event)
            break
    return tuple(found)


# ---------------------------------------------------------------- records and samples of the hosts


def read_headroom(state_dir: Path, *, end_s: float) -> dict[str, dict[str, Any]]:
    """Return the least free memory and disk of the hosts around a failure, as fields of HostEvidence, by host."""
    found: dict[str, dict[str, Any]] = {}
    with SampleStore.open_for_reading(state_dir) as store:
        samples = store.host_series(since_s=end_s - AROUND_END_S, until_s=end_s + AROUND_END_S)
    for sample in samples:
        used, total = sample.memory_used_bytes, sample.memory_total_bytes
        if used is not None and total is not None:
            known = found.setdefault(sample.host, {})
            known["memory_free_bytes"] = min(known.get("memory_free_bytes", total), total - used)
            known["memory_total_bytes"] = total
        if sample.disk_free_bytes is not None:
            known = found.setdefault(sample.host, {})
            known["disk_free_bytes"] = min(known.get("disk_free_bytes", sample.disk_free_bytes), sample.disk_free_bytes)
    return found


# ---------------------------------------------------------------- one attempt's directory


class _Reading:
    """What the hosts of one attempt have in common. `streams`: by host and rank."""

    def __init__(
        self, stored: StoredJob, folder: Path, attempt: int, *, is_newest: bool, liveness: Mapping[str, str]
    ) -> None:
        self.stored, self.folder, self.liveness = stored, folder, liveness
        self.clocks, self.facts = read_clocks(folder), read_host_facts(folder)
        self.rows = {str(row.get("name")): row for row in stored.hosts}
        self.nodes = {node.host: node for node in stored.job.nodes} if is_newest else {}
        found = find_streams(folder, attempt)
        self.streams: dict[tuple[str, int], list[StreamFiles]] = {}
        for one in found:
            number = -1 - one.rank if forks_ranks(stored.spec) and one.rank < 0 else one.rank
            self.streams.setdefault((one.host, number), []).append(one)
        self.budget: Budget = budget_for(len(found))


class _HostReading:
    """Reader of one host. `plogs`: the log lines of CANN by rank."""

    def __init__(self, reading: _Reading, host: str) -> None:
        self.host, self._all, self._folder = host, reading, reading.folder
        self._row: Mapping[str, Any] = reading.rows.get(host, {})
        self._node: NodeProgress | None = reading.nodes.get(host)
        self._records = read_records(self._folder / host, host)
        self._gathered = read_artifacts(self._folder, host)
        self.plogs = self._read_plogs()

    def evidence(self, attempt_events: Sequence[Event]) -> given.HostEvidence:
        records, node, address = self._records, self._node, self._row.get("addr")
        unconfirmed = self.host in self._all.stored.job.unconfirmed
        liveness = self._all.liveness.get(self.host)
        reachable = True if liveness == "ALIVE" else None
        if liveness == "UNREACHABLE" or (unconfirmed and not records.has_ended):
            reachable = False
        lost = node.lost or "rebooted" if node is not None and node.phase is Phase.LOST else None
        for event in attempt_events:
            if event.code == "node-lost" and self.host in event.hosts:
                lost = event.values.get("why")
        return given.HostEvidence(
            host=self.host,
            clock=self._clock(),
            addresses=(str(address), self.host) if address else (self.host,),
            device_addresses=device_addresses([line.text for lines in self.plogs.values() for line in lines]),
            dmesg=self._dmesg(),
            devices=self._devices(),
            stopped_at_s=records.stopped_at_s,
            stopped_by=records.stopped_by,
            lost=lost,
            supervisor_lost=records.lost,
            reachable=reachable,
            has_ended=records.has_ended,
            facts=self._all.facts.get(self.host, {}),
            recorded=dict(self._recordings()),
            groups=tuple(self._row.get("groups") or ()),
            missing=tuple(
                Text("cli.at", "{place}: {message}", place=name, message=why) for name, why in self._gathered.problems
            ),
        )

    def _clock(self) -> given.Clock:
        if self._row.get("addr") == "local":
            return given.FixedClock(0.0, 0.0)
        known = self._all.clocks.get(self.host)
        if known is not None and known.error_s is not None:
            return known
        if self._node is not None and self._node.clock_offset_s is not None:
            return given.FixedClock(self._node.clock_offset_s, ROUGH_CLOCK_S)
        return given.FixedClock()

    def _collected(self, path: Path, stream: str, limit_bytes: int = GATHERED_BYTES) -> tuple[given.Line, ...]:
        return read_text_lines(path, self._folder, stream, limit_bytes=limit_bytes)

    def _dmesg(self) -> tuple[given.Line, ...] | None:
        files = self._gathered.of("dmesg")
        lines = (line for file in files for line in self._collected(file.path, "dmesg"))
        return tuple(_with_kernel_time(line, self._gathered.boot_s) for line in lines) if files else None

    def _recordings(self) -> Iterator[tuple[int, Sequence[Recorded]]]:
        """Yield the dumps of flight recorders by the rank in their names; a damaged one has no collectives."""
        for file in self._gathered.of("flight-recorder"):
            number = file.file.rpartition(FLIGHT_FILE)[2]
            dump = read_dump(file.path.read_bytes()) if number.isdigit() and file.path.is_file() else None
            if dump is not None:
                yield int(number), dump.collectives

    def _devices(self) -> tuple[given.DeviceFact, ...]:
        files = (*self._gathered.of("npu-smi"), *self._gathered.of("hccn"))
        texts = ("\n".join(line.text for line in self._collected(one.path, "tool")) for one in files)
        paths = (str(one.path.relative_to(self._folder)) for one in files)
        return device_facts(zip((one.file for one in files), texts, paths))

    def ranks(self) -> list[given.RankEvidence]:
        records = self._records
        planned = set(self._node.ranks) if self._node is not None else set()
        numbers = (
            {rank for host, rank in self._all.streams if host == self.host} | set(records.pids) | set(records.exits)
        )
        failed = {number for number, end in records.exits.items() if end.is_failure}  # of a launcher only its failure
        shown = {number for number in planned | numbers | set(records.failed) if number >= 0 or number in failed}
        return [self._rank(rank) for rank in sorted(shown)]

    def _rank(self, rank: int) -> given.RankEvidence:
        records = self._records
        end = records.exits.get(rank)
        exited_ns = None if end is None else end.exited_ns or end.at_ns
        streams = self._all.streams.get((self.host, rank), [])
        heard = [at for at in map(last_arrival_s, streams) if at is not None]
        name = f"{self.host}/rank-{rank}.error.0"
        errors = self._collected(self._folder / name, "error", ERROR_FILE_BYTES)
        has_steps = len(self._all.streams) <= 2 * STEP_RANKS_LIMIT
        values = newest_values(self._folder, rank, host=self.host) if has_steps else None
        step = (values or {}).get("step")
        return given.RankEvidence(
            rank=rank,
            host=self.host,
            pid=records.pids.get(rank),
            device=self._device(records.local.get(rank)),
            code=None if end is None else end.code,
            signal=None if end is None else end.signal,
            exited_at_s=exited_ns / 1e9 if isinstance(exited_ns, int) else None,
            stopped=end is not None and end.stopped,
            lingers=records.hung_at_exit.get(rank),
            start_failed=records.failed.get(rank),
            lines=tuple(line for files in streams for line in read_tail(files, self._folder, self._all.budget)),
            error=error_lines("\n".join(line.text for line in errors), name) if errors else (),
            plog=self.plogs.get(rank) if self._gathered.of("plog") else None,
            last_output_s=max(heard, default=None),
            last_step=step if isinstance(step, int) else None,
        )

    def _device(self, local_rank: int | None) -> int | None:
        devices = devices_of(self._all.stored.spec, None if self._node is None else self._node.role)
        if local_rank is None or devices.get("type") not in ("npu", "cuda"):
            return None
        ids = devices.get("ids") or self._row.get("devices")
        if not ids:
            return local_rank
        return int(ids[local_rank]) if local_rank < len(ids) else None

    def _read_plogs(self) -> dict[int, tuple[given.Line, ...]]:
        """Return the log lines of CANN by rank: of the rank's own process, or else of a process that names its rank."""
        by_pid = {pid: rank for rank, pid in self._records.pids.items()}
        found: dict[int, list[given.Line]] = {}
        files = self._gathered.of("plog")
        share = max(64 << 10, PLOG_BYTES // max(1, len(files) // 8))
        for file in files:
            lines = self._collected(file.path, "plog", share)
            pid = _PLOG_PID.search(file.file)
            rank = by_pid.get(int(pid.group(1))) if pid else None
            if rank is None:
                named = (_PLOG_RANK.search(line.text) for line in lines[:2000])
                rank = next((int(match.group(1)) for match in named if match is not None), None)
            if rank is not None:
                worth = [line for line in lines if _WORTH.search(line.text)]
                half = PLOG_LINES // 2
                found.setdefault(rank, []).extend((*worth[:half], *worth[half:][-half:]))
        return {rank: tuple(lines) for rank, lines in found.items()}


def _timeout(readings: Sequence[_HostReading], name: str, env: Mapping[str, Any], default_s: float) -> float:
    """Return the timeout from HCCL's log, else from the job file, else HCCL's default."""
    for lines in (lines for one in readings for lines in one.plogs.values()):
        setting = parse_hccl_env(line.text for line in lines).get(name)
        if setting is not None and setting.value:
            return _seconds(setting.value, default_s)
    return _seconds(env.get(name), default_s)


def _missing(job: Job, folder: Path, attempt: int) -> tuple[Text, ...]:
    """Return the files that the head node does not have."""
    if not folder.is_dir():
        return (Text("explain.no-files", "no files of attempt {attempt}", attempt=attempt),)
    hosts = [host for host in job.hosts_of(attempt) if not (folder / host).is_dir()]
    return (Text("explain.no-host-files", "no files from {hosts:hosts}", hosts=hosts),) if hosts else ()


def _with_kernel_time(line: given.Line, boot_s: float | None) -> given.Line:
    """Convert the kernel's time, which is in seconds since boot."""
    match = _KERNEL_TIME.match(line.text)
    return line if match is None or boot_s is None else line._replace(at_s=boot_s + float(match.group(1)))


def _seconds(value: Any, default_s: float) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        return default_s
    return seconds if seconds > 0 else float("inf")  # 0: HCCL waits indefinitely


@dataclass
class HostRecords:
    """Records of a host's `events` files, by rank. Times are of the host's clock."""

    pids: dict[int, int] = field(default_factory=dict)
    local: dict[int, int] = field(default_factory=dict)
    exits: dict[int, Exit] = field(default_factory=dict)
    hung_at_exit: dict[int, str] = field(default_factory=dict)
    failed: dict[int, Text | str] = field(default_factory=dict)
    stopped_at_s: float | None = None
    stopped_by: str | None = None
    has_ended: bool = False
    lost: bool = False


def read_records(folder: Path, host: str) -> HostRecords:
    """Read the records of a host's folder; empty if there are none. Torn and unknown lines are skipped."""
    found = HostRecords()
    for line in read_events(str(folder)):
        event = make_event(host, line)
        if event is not None:
            _add(found, event)
    return found


def _add(found: HostRecords, event: JobInput) -> None:
    if isinstance(event, inputs.RankStarted):
        found.pids[event.rank], found.local[event.rank] = event.pid, event.local_rank
    elif isinstance(event, endings.RankExited):
        found.exits.setdefault(event.rank, event.exit)
    elif isinstance(event, endings.RankHungAtExit):
        found.hung_at_exit[event.rank] = event.cause
    elif isinstance(event, endings.StartFailed) and event.rank is not None:
        found.failed[event.rank] = event.why
    elif isinstance(event, endings.StopStarted) and found.stopped_at_s is None:
        found.stopped_at_s, found.stopped_by = event.at_s, event.by
    elif isinstance(event, endings.NodeEnded):
        found.has_ended = True
    elif isinstance(event, endings.SupervisorLost):
        found.lost = True
