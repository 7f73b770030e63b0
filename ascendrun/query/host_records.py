"""Records of the supervisor of one host in one attempt, by rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ascendrun.core.jobs import endings, inputs
from ascendrun.core.jobs.inputs import JobInput
from ascendrun.core.jobs.job import Exit
from ascendrun.head.protocol.agent_events import make_event
from ascendrun.node.records import event_generations, read_events
from ascendrun.text import Text


@dataclass
class HostRecords:
    """Records of a host's `events` files, by rank. Times are of the host's clock. `is_there`: a file exists."""

    pids: dict[int, int] = field(default_factory=dict)
    local: dict[int, int] = field(default_factory=dict)
    exits: dict[int, Exit] = field(default_factory=dict)
    hung_at_exit: dict[int, str] = field(default_factory=dict)
    failed: dict[int, Text | str] = field(default_factory=dict)
    stopped_at_s: float | None = None
    stopped_by: str | None = None
    has_ended: bool = False
    lost: bool = False
    is_there: bool = False


def read_records(folder: Path, host: str) -> HostRecords:
    """Read the records of a host's folder; empty if there are none. Torn and unknown lines are skipped."""
    found = HostRecords(is_there=bool(event_generations(str(folder))))
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
