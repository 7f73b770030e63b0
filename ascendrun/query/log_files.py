"""Every stored file of an attempt: output and metrics of ranks, collected artifacts, missing files and lost bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascendrun.core.logs.log_lines import process_name
from ascendrun.head.spool.artifact_store import hosts_awaited, read_artifacts, read_hccl_settings
from ascendrun.head.spool.clocks import read_clocks
from ascendrun.head.spool.spool_files import StreamFiles, size_of
from ascendrun.head.state.state_dir import spool_dir
from ascendrun.node.records import event_generations, parse_events
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.ascend.hccl_env import HcclSetting
    from ascendrun.core.logs.log_view import LogView
    from ascendrun.query.views import JobView

OWN_FILE = re.compile(
    r"^(?:(?:rank-(?P<rank>\d+)|node-\d+)\.(?P<kind>out|err|metrics|error)|(?P<name>events|samples|clock))(?:\.\d+)?$"
)
KINDS = {"out": "output", "err": "errors", "metrics": "metrics", "error": "error file"}


@dataclass(frozen=True)
class LogFile:
    """One stored file. `kind`: output, errors, metrics, error file, events, samples, clock, or the name of a collected
    item. `path` None: the file is not here, `note` has the reason. `note`: also that it was truncated."""

    host: str
    kind: str
    rank: int | None
    bytes: int | None
    path: str | None
    source: str | None = None
    note: Text | str | None = None


@dataclass(frozen=True)
class AttemptFiles:
    """Files of an attempt. `hccl_settings`: logged by HCCL, with the host. `pending_hosts`: still being collected."""

    files: tuple[LogFile, ...]
    hccl_settings: tuple[tuple[str, HcclSetting], ...]
    pending_hosts: tuple[str, ...]


def read_attempt_files(state_dir: Path, job: JobView, attempt: int, view: LogView) -> AttemptFiles:
    """Return the files of the hosts and ranks that `view` selects."""
    directory = spool_dir(state_dir, job.id, attempt)
    hosts = [host for host in job.pool or job.hosts if view.has_host(host)]
    return AttemptFiles(
        tuple(file for host in hosts for file in _list_files(directory, host) if view.has_rank(file.rank)),
        tuple(
            (host, setting)
            for host in hosts
            for setting in read_hccl_settings(read_artifacts(directory, host)).values()
        ),
        hosts_awaited(state_dir, job.id, attempt),
    )


def _list_files(attempt_dir: Path, host: str) -> Iterator[LogFile]:
    """Yield files of ranks, then of the host, then collected files, then those that could not be collected."""
    directory = attempt_dir / host
    own = []
    for path in directory.iterdir() if directory.is_dir() else ():
        match = OWN_FILE.match(path.name)
        if match:
            rank = None if match["rank"] is None else int(match["rank"])
            kind = KINDS.get(match["kind"] or "", match["name"])
            file = LogFile(host, kind, rank, path.stat().st_size, str(path))
            own.append((rank is None, rank or 0, path.name, file))
    yield from (file for *_, file in sorted(own, key=lambda each: each[:3]))
    gathered = read_artifacts(attempt_dir, host)
    for got in gathered.files:
        note = None
        if got.of_bytes is None or got.of_bytes > got.bytes:
            note = Text("logs.file-truncated", "truncated, whole size: {size:bytes}", size=got.of_bytes)
        yield LogFile(host, got.name, None, got.bytes, str(got.path), got.source, note)
    for name, reason in gathered.problems:
        yield LogFile(host, name, None, None, None, None, reason)


@dataclass(frozen=True)
class LogGap:
    """One gap. `at_s`: when it was noticed, in the clock of the head node."""

    at_s: float
    host: str
    rank: int
    stream: str
    missing_bytes: int
    why: Text


def read_gaps(attempt_dir: Path, attempt: int) -> tuple[LogGap, ...]:
    """Return every gap that the nodes reported, by time."""
    found = []
    for host, clock in read_clocks(attempt_dir).items():
        for event in _events(attempt_dir / host):
            try:
                gap = _gap(event, attempt_dir, host, attempt, clock.to_head_s(int(event["at_ns"]) / 1e9))
            except (KeyError, TypeError, ValueError):
                continue  # the job itself can write to this file
            if gap is not None and gap.missing_bytes > 0:
                found.append(gap)
    return tuple(sorted(found, key=lambda gap: gap.at_s))


def _gap(event: Mapping[str, Any], attempt_dir: Path, host: str, attempt: int, at_s: float) -> LogGap | None:
    kind = event.get("event")
    if kind == "log_dropped":
        return LogGap(at_s, host, int(event["rank"]), str(event["stream"]), int(event["bytes"]), _not_written(event))
    if kind == "log_cut":
        files = StreamFiles(attempt_dir / host, host, int(event["rank"]), str(event["stream"]), attempt)
        have = size_of(files.path(int(event["generation"])))
        return LogGap(
            at_s,
            host,
            files.rank,
            files.stream,
            int(event["had"]) - have,
            Text("logs.truncated-on-node", "the file on the node was truncated or removed before it was copied"),
        )
    return None


def _not_written(event: Mapping[str, Any]) -> Text:
    reason = event.get("reason") or Text("logs.disk-full", "disk full")
    if event.get("offset") is None:  # a node before release 0.10
        return Text("logs.not-written", "not written: {reason}", reason=reason)
    return Text(
        "logs.not-written-at",
        "not written at byte {offset} of {file}: {reason}",
        offset=int(event["offset"]),
        file="%s.%s.%d" % (process_name(event["rank"]), event["stream"], event["generation"]),
        reason=reason,
    )


def _events(folder: Path) -> Iterable[Mapping[str, Any]]:
    """Return events of gaps, each once. Only lines that may be a gap are parsed: the files are long, gaps are rare."""
    found: dict[object, Mapping[str, Any]] = {}
    for generation in event_generations(str(folder)):
        with open(folder / f"events.{generation}", "rb") as file:
            for event in parse_events(b"".join(line for line in file if b'"log_' in line)):
                found[event.get("seq", len(found) * 1j)] = event
    return found.values()
