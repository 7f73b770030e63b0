"""What a supervisor's events file says of an attempt on its host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ascendrun.head.protocol.agent_events import start_failure
from ascendrun.node.records import parse_events


@dataclass
class HostRecords:
    """By rank. Times are the host's clock; `exits`: the whole records. `is_there`: the file is."""

    pids: dict[int, int] = field(default_factory=dict)
    local: dict[int, int] = field(default_factory=dict)
    exits: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    lingers: dict[int, str] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    stopped_at_s: float | None = None
    stopped_by: str | None = None
    has_ended: bool = False
    lost: bool = False
    is_there: bool = False


def read_records(path: Path) -> HostRecords:
    """Of a missing file: an empty one. Lines that are torn are passed over."""
    found = HostRecords()
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return found
    found.is_there = True
    for event in parse_events(raw):
        try:
            _take_record(found, event)
        except (KeyError, TypeError, ValueError):
            continue  # a line with parts missing: the file lies where the job itself can write
    return found


def _take_record(found: HostRecords, event: Mapping[str, Any]) -> None:
    kind = event.get("event")
    if kind == "rank_started":
        rank = int(event["rank"])
        found.pids[rank], found.local[rank] = int(event["pid"]), int(event["local_rank"])
    elif kind == "rank_exited":
        found.exits.setdefault(int(event["rank"]), event)
    elif kind == "rank_lingers":
        found.lingers[int(event["rank"])] = str(event.get("why", ""))
    elif kind == "start_failed":
        found.failed[int(event["rank"])] = str(start_failure(event).line())
    elif kind == "stopping" and found.stopped_at_s is None:
        found.stopped_at_s, found.stopped_by = int(event["at_ns"]) / 1e9, str(event.get("by"))
    elif kind == "ended":
        found.has_ended = True
    elif kind == "supervisor_lost":
        found.lost = True
