"""The record of a job: its state, its nodes and the ends of its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from ascendrun.core.dataclass_json import load_dataclass
from ascendrun.core.jobs import reasons
from ascendrun.core.jobs.reasons import FirstFailure
from ascendrun.text import Text, from_json, to_json


class State(str, Enum):
    """State of a job. The transitions between them are the table in core/jobs/lifecycle.py."""

    QUEUED = "QUEUED"
    CHECKING = "CHECKING"
    STAGING = "STAGING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    BACKOFF = "BACKOFF"
    SUCCEEDED = "SUCCEEDED"
    STOPPED = "STOPPED"
    FAILED = "FAILED"


TERMINAL = frozenset({State.SUCCEEDED, State.STOPPED, State.FAILED})
ACTIVE_STATES = frozenset({State.CHECKING, State.STAGING, State.STARTING, State.RUNNING, State.STOPPING})
"""States in which a job uses its nodes."""


class Phase(str, Enum):
    """Progress of one node within an attempt. From GO_SENT on, processes may exist there."""

    PENDING = "PENDING"
    REPORTED = "REPORTED"
    STAGED = "STAGED"
    READY = "READY"
    GO_SENT = "GO_SENT"
    STARTED = "STARTED"
    ENDED = "ENDED"
    LOST = "LOST"


class Cause(str, Enum):
    """Reason for stopping a job; decides whether it ends STOPPED or FAILED, or is retried after BACKOFF."""

    USER = "user"
    REFUSED = "refused"
    FAILURE = "failure"
    NODE_LOST = "node-lost"
    START_TIMEOUT = "start-timeout"
    LIMIT = "limit"
    HEAD_RESTARTED = "head-restarted"
    NEED = "need"


@dataclass(frozen=True)
class Exit:
    """Exit of one rank. `at_ns`: the node's UTC clock; compare over nodes only after removing clock offsets.
    `stopped`: it ended after a stop request. `killed_at_exit`: it had finished, did not exit, and was
    killed. `exited_ns`: when the kernel reported it, as `at_ns`."""

    code: int | None
    signal: int | None
    at_ns: int
    stopped: bool = False
    killed_at_exit: bool = False
    exited_ns: int | None = None
    max_rss_bytes: int | None = None

    @property
    def is_failure(self) -> bool:
        return not self.stopped and (self.signal is not None or self.code != 0)


@dataclass(frozen=True)
class NodeProgress:
    """One node within the current attempt. `clock_offset_s`: node clock minus head clock, None: not measured."""

    host: str
    node_rank: int
    phase: Phase = Phase.PENDING
    ranks: tuple[int, ...] = ()
    boot_id: str | None = None
    clock_offset_s: float | None = None
    pids: Mapping[int, int] = field(default_factory=dict)
    exits: Mapping[int, Exit] = field(default_factory=dict)
    lingering: tuple[int, ...] = ()

    @property
    def may_run_processes(self) -> bool:
        return self.phase in (Phase.GO_SENT, Phase.STARTED)


@dataclass(frozen=True)
class Job:
    """Everything that the controller decided about one job, immutable: `lifecycle.advance` returns the next record.

    `pipeline`: the id of its pipeline, None: not part of a pipeline. `stage`: the stage's name in it. `needs`: the id
    of the job that has to succeed before. `home`: the run that owns its working directory, None: its own run.
    `go_sent_at_s`: when GO was decided for this attempt, None: not yet. `unconfirmed`: hosts on which the end of all
    processes is unknown; they stay reserved until they are reachable. Times are UTC seconds.
    """

    id: str
    name: str
    run: str
    hosts: tuple[str, ...]
    grace_s: float
    start_s: float
    created_at_s: float
    state: State = State.QUEUED
    reason: Text = field(default_factory=reasons.new)
    attempt: int = 1
    since_s: float = 0.0
    nodes: tuple[NodeProgress, ...] = ()
    world_size: int = 0
    master_port: int | None = None
    go_sent_at_s: float | None = None
    started_at_s: float | None = None
    ended_at_s: float | None = None
    cause: Cause | None = None
    stop_now: bool = False
    first_failure: FirstFailure | None = None
    unconfirmed: tuple[str, ...] = ()
    pipeline: str | None = None
    stage: str | None = None
    needs: str | None = None
    home: str | None = None

    @property
    def run_id(self) -> str:
        return f"{self.run}.{self.attempt}"

    @property
    def is_terminal(self) -> bool:
        return self.state in TERMINAL

    def node(self, host: str) -> NodeProgress:
        for node in self.nodes:
            if node.host == host:
                return node
        raise KeyError(host)


# Conversion of the record to plain JSON values and back, for the store.


def dump_job(job: Job) -> dict[str, Any]:
    """Return the record as JSON values; enums become their values, tuples lists, rank numbers in keys strings."""
    return dict(to_json(asdict(job)))


def load_job(record: Mapping[str, Any]) -> Job:
    """Return the job of a record made by `dump_job`, also after conversion to and from JSON."""
    return load_dataclass(
        Job,
        record,
        state=State,
        reason=from_json,
        first_failure=lambda row: load_dataclass(FirstFailure, from_json(row)),
        cause=Cause,
        hosts=tuple,
        unconfirmed=tuple,
        nodes=lambda rows: tuple(map(_load_node, rows)),
    )


def _load_node(record: Mapping[str, Any]) -> NodeProgress:
    return load_dataclass(
        NodeProgress,
        record,
        phase=Phase,
        ranks=tuple,
        lingering=tuple,
        pids=lambda pids: {int(rank): pid for rank, pid in pids.items()},
        exits=lambda exits: {int(rank): load_dataclass(Exit, row) for rank, row in exits.items()},
    )
