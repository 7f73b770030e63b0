"""Lost bytes of the output of ranks: number, time and reason."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascendrun.head.spool.clocks import read_clocks
from ascendrun.head.spool.spool_files import StreamFiles, size_of
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
        for event in _events(attempt_dir / host / "events.0"):
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
        return LogGap(
            at_s,
            host,
            int(event["rank"]),
            str(event["stream"]),
            int(event["bytes"]),
            Text(
                "logs.not-written",
                "not written: {reason}",
                reason=event.get("reason") or Text("logs.disk-full", "disk full"),
            ),
        )
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


def _events(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield events of gaps. Only lines that may be a gap are parsed: the file is long, gaps are rare."""
    if not os.path.exists(path):
        return
    with open(path, "rb") as file:
        for line in file:
            if b'"log_' in line:
                try:
                    event = json.loads(line)
                except ValueError:
                    continue
                if isinstance(event, dict):
                    yield event
