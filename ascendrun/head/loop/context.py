"""What the parts of the controller share."""

from __future__ import annotations

from pathlib import Path
from typing import Callable

from ascendrun.core.dataclass import dataclass
from ascendrun.core.retention import Retention
from ascendrun.head.agents.connections import Connections
from ascendrun.head.loop.collectors import Collectors
from ascendrun.head.loop.live_jobs import LiveJobs
from ascendrun.head.loop.operations import Operations
from ascendrun.head.state.store import Store


@dataclass(frozen=True)
class ControllerContext:
    """`post` runs a call in the controller's own thread, in order."""

    state_dir: Path
    store: Store
    links: Connections
    jobs: LiveJobs
    operations: Operations
    collectors: Collectors
    retention: Retention
    post: Callable[[Callable[[], None]], None]
