"""Evidence of one attempt from the store, the spool, collected artifacts and samples; missing data are reported, and
are not an error."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascendrun.core.events import Event
from ascendrun.core.jobs.job import Cause, Phase, State
from ascendrun.core.jobs.reasons import Reason
from ascendrun.core.rank_env import forks_ranks
from ascendrun.head.spool.artifact_store import CollectedArtifacts, read_artifacts
from ascendrun.head.spool.clocks import read_clocks
from ascendrun.head.spool.metrics_reader import newest_values
from ascendrun.head.spool.spool_files import StreamFiles, find_streams
from ascendrun.head.state.state_dir import spool_dir
from ascendrun.health.diagnosis.evidence import (
    Clock,
    DeviceFact,
    Evidence,
    FixedClock,
    HostEvidence,
    Line,
    RankEvidence,
)
from ascendrun.health.diagnosis.lines.devices import (
    device_addresses,
    facts_from_cards,
    facts_from_ports,
    facts_from_table,
    one_per_device,
)
from ascendrun.health.diagnosis.lines.launchers import error_lines
from ascendrun.query.host_records import HostRecords, read_records
from ascendrun.query.stream_tail import Budget, budget_for, last_arrival_s, read_tail, read_text_lines
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.core.jobs.job import Job, NodeProgress
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
) -> Evidence:
    """Return the evidence of an attempt. `attempt` None: the newest. `liveness`: of the job's hosts, from the
    controller, None: no controller. `slow`: the stragglers. Missing files are not an error."""
    job = stored.job
    number = attempt or job.attempt
    folder = spool_dir(state_dir, job.id, number)
    attempt_events = events_of_attempt(events, number)
    is_newest = number == job.attempt
    reading = _Reading(stored, folder, number, is_newest=is_newest, liveness=liveness or {})
    hosts = {host: reading.host(host, attempt_events) for host in job.hosts_of(number)}
    ranks = tuple(rank for host in hosts for rank in reading.ranks(host, hosts[host]))
    has_failed = any(rank.has_failed for rank in ranks)
    left = read_headroom(state_dir, tuple(hosts), end_s=_end_of(job, ranks, now_s)) if has_failed else {}
    env = stored.spec.get("env") or {}
    return Evidence(
        job=job.id,
        name=job.name,
        state=job.state.value if is_newest else State.FAILED.value,
        attempt=number,
        reason=_without_rule(job.reason) if is_newest else _reason(attempt_events),
        cause=_cause(job, attempt_events, is_newest=is_newest),
        device_type=str((stored.spec.get("devices") or {}).get("type") or "cpu"),
        launcher="none" if forks_ranks(stored.spec) else "spawn",
        world_size=job.world_size if is_newest and job.world_size else len(ranks),
        now_s=now_s,
        connect_timeout_s=reading.timeout("HCCL_CONNECT_TIMEOUT", env, DEFAULT_CONNECT_S),
        exec_timeout_s=reading.timeout("HCCL_EXEC_TIMEOUT", env, DEFAULT_EXEC_S),
        started_at_s=job.started_at_s if is_newest else None,
        ended_at_s=job.ended_at_s if is_newest else None,
        ranks=tuple(sorted(ranks, key=lambda rank: rank.rank)),
        hosts=tuple(_with_headroom(host, left.get(name)) for name, host in hosts.items()),
        events=attempt_events,
        slow=tuple(slow),
        missing=reading.missing(folder),
        needs=job.needs or "",
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
        if number == attempt and event.code != "submitted":
            found.append(event)
        elif number == attempt + 1 and found:
            found.append(event)
            break
    return tuple(found)


# ---------------------------------------------------------------- records and samples of the hosts


@dataclass(frozen=True)
class Headroom:
    """Minimum measured `free_bytes` of memory and `disk_free_bytes` (None: not measured)."""

    free_bytes: int
    total_bytes: int
    disk_free_bytes: int | None


def read_headroom(state_dir: Path, hosts: Collection[str], *, end_s: float) -> dict[str, Headroom]:
    """Return the free memory and disk of the hosts around a failure, by host; {} if nothing was measured."""
    from ascendrun.head.state.sample_store import SampleStore

    found: dict[str, Headroom] = {}
    with SampleStore.open_for_reading(state_dir) as store:
        samples = store.host_series(since_s=end_s - AROUND_END_S, until_s=end_s + AROUND_END_S)
    for sample in samples:
        used, total = sample.memory_used_bytes, sample.memory_total_bytes
        if sample.host in hosts and used is not None and total is not None:
            known = found.get(sample.host, Headroom(total, total, None))
            disks = [disk for disk in (known.disk_free_bytes, sample.disk_free_bytes) if disk is not None]
            found[sample.host] = Headroom(min(known.free_bytes, total - used), total, min(disks, default=None))
    return found


# ---------------------------------------------------------------- one attempt's directory


class _Reading:
    """Reader of one attempt; caches data that is needed twice."""

    def __init__(
        self, stored: StoredJob, folder: Path, attempt: int, *, is_newest: bool, liveness: Mapping[str, str]
    ) -> None:
        self._stored, self._folder, self._attempt = stored, folder, attempt
        self._liveness = liveness
        self._clocks = read_clocks(folder)
        self._rows = {str(row.get("name")): row for row in stored.hosts}
        self._nodes = {node.host: node for node in stored.job.nodes} if is_newest else {}
        self._records: dict[str, HostRecords] = {}
        self._gathered: dict[str, CollectedArtifacts] = {}
        self._plogs: dict[str, dict[int, tuple[Line, ...]]] = {}
        streams = find_streams(folder, attempt)
        self._streams: dict[tuple[str, int], list[StreamFiles]] = {}
        for one in streams:
            number = -1 - one.rank if forks_ranks(stored.spec) and one.rank < 0 else one.rank
            self._streams.setdefault((one.host, number), []).append(one)
        self._budget: Budget = budget_for(len(streams))

    # --- hosts

    def host(self, host: str, attempt_events: Sequence[Event]) -> HostEvidence:
        records, gathered = self.records(host), self.gathered(host)
        node = self._nodes.get(host)
        unconfirmed = host in self._stored.job.unconfirmed
        liveness = self._liveness.get(host)
        reachable = (
            False
            if liveness == "UNREACHABLE" or (unconfirmed and not records.has_ended)
            else True
            if liveness == "ALIVE"
            else None
        )
        lost = node.lost or "rebooted" if node is not None and node.phase is Phase.LOST else None
        for event in attempt_events:
            if event.code == "node-lost" and host in event.hosts:
                lost = event.values.get("why")
        plog_texts = [line.text for lines in self.plogs(host).values() for line in lines]
        return HostEvidence(
            host=host,
            clock=self._clock(host),
            addresses=self._addresses(host),
            device_addresses=device_addresses(plog_texts),
            dmesg=self._dmesg(gathered),
            devices=self._devices(gathered),
            stopped_at_s=records.stopped_at_s,
            stopped_by=records.stopped_by,
            lost=lost,
            supervisor_lost=records.lost,
            reachable=reachable,
            has_ended=records.has_ended,
            missing=tuple(
                Text("cli.at", "{place}: {message}", place=name, message=why) for name, why in gathered.problems
            ),
        )

    def records(self, host: str) -> HostRecords:
        if host not in self._records:
            self._records[host] = read_records(self._folder / host, host)
        return self._records[host]

    def gathered(self, host: str) -> CollectedArtifacts:
        if host not in self._gathered:
            self._gathered[host] = read_artifacts(self._folder, host)
        return self._gathered[host]

    def _clock(self, host: str) -> Clock:
        if self._rows.get(host, {}).get("addr") == "local":
            return FixedClock(0.0, 0.0)
        known = self._clocks.get(host)
        if known is not None and known.error_s is not None:
            return known
        node: NodeProgress | None = self._nodes.get(host)
        if node is not None and node.clock_offset_s is not None:
            return FixedClock(node.clock_offset_s, ROUGH_CLOCK_S)
        return FixedClock()

    def _addresses(self, host: str) -> tuple[str, ...]:
        address = self._rows.get(host, {}).get("addr")
        return (str(address), host) if address else (host,)

    def _dmesg(self, gathered: CollectedArtifacts) -> tuple[Line, ...] | None:
        files = gathered.of("dmesg")
        if not files:
            return None
        lines = (
            line
            for file in files
            for line in read_text_lines(file.path, self._folder, "dmesg", limit_bytes=GATHERED_BYTES)
        )
        return tuple(_with_kernel_time(line, gathered.boot_s) for line in lines)

    def _devices(self, gathered: CollectedArtifacts) -> tuple[DeviceFact, ...]:
        found: list[DeviceFact] = []
        for file in (*gathered.of("npu-smi"), *gathered.of("hccn")):
            text = "\n".join(
                line.text for line in read_text_lines(file.path, self._folder, "tool", limit_bytes=GATHERED_BYTES)
            )
            read = {"table.txt": facts_from_table, "cards.txt": facts_from_cards, "ports.txt": facts_from_ports}.get(
                file.file
            )
            if read is not None:
                found.extend(read(text, str(file.path.relative_to(self._folder))))
        return one_per_device(found)

    # --- ranks

    def ranks(self, host: str, evidence: HostEvidence) -> list[RankEvidence]:
        records = self.records(host)
        node = self._nodes.get(host)
        planned = set(node.ranks) if node is not None else set()
        numbers = {rank for name, rank in self._streams if name == host} | set(records.pids) | set(records.exits)
        failed = {number for number, end in records.exits.items() if end.is_failure}  # of a launcher only its failure
        shown = {number for number in planned | numbers | set(records.failed) if number >= 0 or number in failed}
        return [self._rank(host, rank, records) for rank in sorted(shown)]

    def _rank(self, host: str, rank: int, records: HostRecords) -> RankEvidence:
        end = records.exits.get(rank)
        exited_ns = None if end is None else end.exited_ns or end.at_ns
        streams = self._streams.get((host, rank), [])
        heard = [at for at in map(last_arrival_s, streams) if at is not None]
        return RankEvidence(
            rank=rank,
            host=host,
            pid=records.pids.get(rank),
            device=self._device(host, records.local.get(rank)),
            code=None if end is None else end.code,
            signal=None if end is None else end.signal,
            exited_at_s=exited_ns / 1e9 if isinstance(exited_ns, int) else None,
            stopped=end is not None and end.stopped,
            lingers=records.hung_at_exit.get(rank),
            start_failed=records.failed.get(rank),
            lines=tuple(line for files in streams for line in read_tail(files, self._folder, self._budget)),
            error=self._error(host, rank),
            plog=self.plogs(host).get(rank) if self.gathered(host).of("plog") else None,
            last_output_s=max(heard, default=None),
            last_step=self._step(host, rank),
            max_rss_bytes=None if end is None else end.max_rss_bytes,
        )

    def _device(self, host: str, local_rank: int | None) -> int | None:
        devices = self._stored.spec.get("devices") or {}
        if local_rank is None or devices.get("type") not in ("npu", "cuda"):
            return None
        ids = devices.get("ids") or self._rows.get(host, {}).get("devices")
        if not ids:
            return local_rank
        return int(ids[local_rank]) if local_rank < len(ids) else None

    def _error(self, host: str, rank: int) -> tuple[Line, ...]:
        name = f"{host}/rank-{rank}.error.0"
        lines = read_text_lines(self._folder / name, self._folder, "error", limit_bytes=ERROR_FILE_BYTES)
        return error_lines("\n".join(line.text for line in lines), name) if lines else ()

    def _step(self, host: str, rank: int) -> int | None:
        if len(self._streams) > 2 * STEP_RANKS_LIMIT:
            return None
        values = newest_values(self._folder, rank, host=host) or {}
        step = values.get("step")
        return step if isinstance(step, int) else None

    # --- plog

    def plogs(self, host: str) -> dict[int, tuple[Line, ...]]:
        """Return the log lines of CANN by rank: of the rank's own process, or else of a process that names its rank."""
        if host in self._plogs:
            return self._plogs[host]
        records = self.records(host)
        by_pid = {pid: rank for rank, pid in records.pids.items()}
        found: dict[int, list[Line]] = {}
        files = self.gathered(host).of("plog")
        share = max(64 << 10, PLOG_BYTES // max(1, len(files) // 8))
        for file in files:
            lines = read_text_lines(file.path, self._folder, "plog", limit_bytes=share)
            pid = _PLOG_PID.search(file.file)
            rank = by_pid.get(int(pid.group(1))) if pid else None
            if rank is None:
                rank = _rank_named(lines)
            if rank is not None:
                worth = [line for line in lines if _WORTH.search(line.text)]
                half = PLOG_LINES // 2
                found.setdefault(rank, []).extend((*worth[:half], *worth[half:][-half:]))
        self._plogs[host] = {rank: tuple(lines) for rank, lines in found.items()}
        return self._plogs[host]

    def timeout(self, name: str, env: Mapping[str, Any], default_s: float) -> float:
        """Return the timeout from HCCL's log, else from the job file, else HCCL's default."""
        from ascendrun.ascend.hccl_env import parse_hccl_env

        for plogs in self._plogs.values():
            for lines in plogs.values():
                setting = parse_hccl_env(line.text for line in lines).get(name)
                if setting is not None and setting.value:
                    return _seconds(setting.value, default_s)
        return _seconds(env.get(name), default_s)

    # --- all evidence

    def missing(self, folder: Path) -> tuple[Text, ...]:
        """Return the files that the head node does not have."""
        if not folder.is_dir():
            return (Text("explain.no-files", "no files of attempt {attempt}", attempt=self._attempt),)
        hosts = [host for host in self._stored.job.hosts_of(self._attempt) if not (folder / host).is_dir()]
        return (Text("explain.no-host-files", "no files from {hosts:hosts}", hosts=hosts),) if hosts else ()


def _with_kernel_time(line: Line, boot_s: float | None) -> Line:
    """Convert the kernel's time, which is in seconds since boot."""
    match = _KERNEL_TIME.match(line.text)
    return line if match is None or boot_s is None else line._replace(at_s=boot_s + float(match.group(1)))


def _rank_named(lines: Sequence[Line]) -> int | None:
    for line in lines[:2000]:
        match = _PLOG_RANK.search(line.text)
        if match is not None:
            return int(match.group(1))
    return None


def _seconds(value: Any, default_s: float) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        return default_s
    return seconds if seconds > 0 else float("inf")  # 0: HCCL waits indefinitely


def _cause(job: Job, attempt_events: Sequence[Event], *, is_newest: bool) -> str | None:
    if is_newest:
        return None if job.cause is None else job.cause.value
    stop = _stop_of(attempt_events)
    return Cause.FAILURE.value if stop is None else str(stop.values.get("cause") or Cause.FAILURE.value)


def _without_rule(reason: Reason) -> Reason:
    """Return why a job failed, without the rule of its restart policy."""
    return reason.why if reason.code == "not-restarted" and isinstance(reason.why, Reason) else reason


def _reason(attempt_events: Sequence[Event]) -> Reason | None:
    """Return why an earlier attempt was stopped."""
    stop = _stop_of(attempt_events)
    return None if stop is None else stop.values.get("reason")


def _stop_of(attempt_events: Sequence[Event]) -> Event | None:
    stops = [
        event for event in attempt_events if event.code == "state-changed" and event.values.get("state") == "STOPPING"
    ]
    return stops[-1] if stops else None


def _end_of(job: Job, ranks: Sequence[RankEvidence], now_s: float) -> float:
    ends = [rank.exited_at_s for rank in ranks if rank.exited_at_s is not None and rank.has_failed]
    return min(ends, default=job.ended_at_s or now_s)


def _with_headroom(host: HostEvidence, left: Headroom | None) -> HostEvidence:
    if left is None:
        return host
    return replace(
        host,
        memory_free_bytes=left.free_bytes,
        memory_total_bytes=left.total_bytes,
        disk_free_bytes=left.disk_free_bytes,
    )
