"""From a job, its hosts and their reports to the exact processes of every node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping, Optional, Tuple

PORT_TOKEN = "\0MASTER_PORT\0"
"""Stands in an argument for the port that the rank-0 node found free; NUL cannot occur in a user's argument."""


@dataclass(frozen=True)
class Folders:
    """Absolute paths on one node, as `node/layout.py` lays them for this run and attempt."""

    work: str
    checkpoints: str
    attempt: str
    trees: str


@dataclass(frozen=True)
class Tree:
    """A staged folder: `name` says what it is ("code": the user's, "programs": ours), `sha256` names its content."""

    name: str
    sha256: str
    size_bytes: int
    files: int


@dataclass(frozen=True)
class RankPlan:
    """One process. For the launchers torchrun, deepspeed and python it is the one process of its node, and `rank`
    is the node rank; for spawn it is the rank itself."""

    rank: int
    local_rank: int
    argv: Tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True)
class NodePlan:
    """Everything one node has to start. `setup`: bash text run before each process, None: none."""

    host: str
    node_rank: int
    ranks: Tuple[RankPlan, ...]
    cwd: str
    setup: Optional[str]
    folders: Folders


@dataclass(frozen=True)
class LaunchPlan:
    """What all nodes start together. `master_ports`: tried in order by bind on the rank-0 node; the first free one
    becomes MASTER_PORT in every rank's environment (and replaces PORT_TOKEN in arguments).
    `max_s`: None means no limit. `stop_signal` is a name without SIG, such as "TERM"."""

    job: str
    attempt: int
    tag: str
    nodes: Tuple[NodePlan, ...]
    trees: Tuple[Tree, ...]
    world_size: int
    master_address: str
    master_ports: Tuple[int, ...]
    stop_signal: str
    grace_s: float
    start_s: float
    max_s: Optional[float]
