"""Lost bytes of the output of ranks: number, time and reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascendrun.core.logs.log_lines import process_name
from ascendrun.head.spool.clocks import read_clocks
from ascendrun.head.spool.spool_files import StreamFiles, size_of
from ascendrun.node.records import event_generations, parse_events
from ascendrun.text import Text


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
