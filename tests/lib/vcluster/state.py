"""Stored state of a running cluster, in its own directory: init processes and active faults."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.lib.vcluster.processes import start_time

FOLDER_VARIABLE = "ASCENDRUN_VCLUSTER_DIR"


@dataclass(frozen=True)
class ProcessName:
    """A process that cannot be taken for a later one with the same pid."""

    pid: int
    started: int

    @property
    def is_alive(self) -> bool:
        return start_time(self.pid) == self.started


@dataclass
class State:
    """`owner`: the process that a cluster belongs to, None: none, it stays until `down`.

    `inits`: init of the head and of each host that was booted. `relays`, `cables`: the relay in a
    host's cable and what it does to frames. `faults`: the faults that are set, by host.
    `file_systems`: who serves the faulty file systems, by "host:folder".
    `spec`: the cluster's options, as `cluster.py` wrote them.
    """

    cluster_id: str
    owner: ProcessName | None
    spec: dict[str, Any]
    inits: dict[str, ProcessName] = field(default_factory=dict)
    relays: dict[str, ProcessName] = field(default_factory=dict)
    cables: dict[str, dict[str, float]] = field(default_factory=dict)
    faults: dict[str, list[str]] = field(default_factory=dict)
    file_systems: dict[str, ProcessName] = field(default_factory=dict)

    def live_init(self, name: str) -> int | None:
        init = self.inits.get(name)
        return init.pid if init is not None and init.is_alive else None


def base_folder(environ: Mapping[str, str]) -> Path:
    return Path(environ.get(FOLDER_VARIABLE) or f"/tmp/ascendrun-vcluster-{os.getuid()}")


def make_folder(base: Path) -> tuple[str, Path]:
    """A new id and its directory, 0700."""
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    cluster_id = secrets.token_hex(4)
    folder = base / cluster_id
    folder.mkdir(mode=0o700)
    return cluster_id, folder


def save(folder: Path, state: State) -> None:
    beside = folder / f"state.json.{os.getpid()}"
    beside.write_text(json.dumps(asdict(state)))
    os.replace(beside, folder / "state.json")


def load(folder: Path) -> State:
    """Raises OSError or ValueError when the directory holds no whole state (its owner died while it booted)."""
    raw = json.loads((folder / "state.json").read_text())
    for table in ("inits", "relays", "file_systems"):
        raw[table] = {name: ProcessName(**value) for name, value in raw[table].items()}
    raw["owner"] = ProcessName(**raw["owner"]) if raw["owner"] else None
    return State(**raw)


def folders(base: Path) -> list[Path]:
    """Return the directories of all clusters, the newest last."""
    if not base.is_dir():
        return []
    return sorted((path for path in base.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)


def forget(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def name_process(pid: int) -> ProcessName:
    """Raises OSError when `pid` is gone."""
    started = start_time(pid)
    if started is None:
        raise OSError(f"process {pid} is gone")
    return ProcessName(pid, started)
