"""Bytes of the ranks' output that exist nowhere any more: how many, when and why. No copy is silently short."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascendrun.head.spool.clocks import read_clocks
from ascendrun.head.spool.spool_files import StreamFiles, size_of


@dataclass(frozen=True)
class LogGap:
    """`at_s`: when it was noticed, in the head's clock. `why`: a few words."""

    at_s: float
    host: str
    rank: int
    stream: str
    missing_bytes: int
    why: str


def read_gaps(attempt_dir: Path, attempt: int) -> tuple[LogGap, ...]:
    """Every gap that the nodes have told of, by time."""
    found = []
    for host, clock in read_clocks(attempt_dir).items():
        for event in _events(attempt_dir / host / "events.0"):
            try:
                gap = _gap(event, attempt_dir, host, attempt, clock.to_head_s(int(event["at_ns"]) / 1e9))
            except (KeyError, TypeError, ValueError):
                continue  # the file lies where the job itself can write
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
            f"not written: {event.get('reason') or 'the disk was full'}",
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
            "somebody cut or removed the file on the node before they were copied",
        )
    return None


def _events(path: Path) -> Iterator[Mapping[str, Any]]:
    """Only lines that may tell of a gap are parsed: the file is long, gaps are rare."""
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
