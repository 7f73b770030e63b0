"""What the events file of a supervisor contains about an attempt on its host."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ascendrun.core.jobs import job as w
from ascendrun.core.jobs.job import Exit, JobInput
from ascendrun.head.protocol.agent_events import make_event
from ascendrun.node.records import parse_events


@dataclass
class HostRecords:
    """By rank. Times are of the host's clock. `is_there`: the file exists."""

    pids: dict[int, int] = field(default_factory=dict)
    local: dict[int, int] = field(default_factory=dict)
    exits: dict[int, Exit] = field(default_factory=dict)
    hung_at_exit: dict[int, str] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    stopped_at_s: float | None = None
    stopped_by: str | None = None
    has_ended: bool = False
    lost: bool = False
    is_there: bool = False


def read_records(path: Path, host: str) -> HostRecords:
    """Of a missing file: an empty one. Torn and unknown lines are skipped."""
    found = HostRecords()
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return found
    found.is_there = True
    for line in parse_events(raw):
        event = make_event(host, line)
        if event is not None:
            _add(found, event)
    return found


def _add(found: HostRecords, event: JobInput) -> None:
    if isinstance(event, w.RankStarted):
        found.pids[event.rank], found.local[event.rank] = event.pid, event.local_rank
    elif isinstance(event, w.RankExited):
        found.exits.setdefault(event.rank, event.exit)
    elif isinstance(event, w.RankHungAtExit):
        found.hung_at_exit[event.rank] = event.cause
    elif isinstance(event, w.StartFailed) and event.rank is not None:
        found.failed[event.rank] = str(event.why)
    elif isinstance(event, w.StopStarted) and found.stopped_at_s is None:
        found.stopped_at_s, found.stopped_by = event.at_s, event.by
    elif isinstance(event, w.NodeEnded):
        found.has_ended = True
    elif isinstance(event, w.SupervisorLost):
        found.lost = True
