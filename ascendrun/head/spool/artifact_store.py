"""Reads what was gathered from a node after an attempt's failure: which files are here, from where, what is missing.

They lie in the attempt's spool under `<host>/gathered/<name>/<file>`, with `<host>/gathered/index.json` beside them.
Names: plog, dmesg, npu-smi, hccn, device-log, supervisor (what the agent's own log says).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascendrun.ascend.hccl_env import HcclSetting, parse_hccl_env
from ascendrun.core.node_messages import node_text
from ascendrun.text import Text

FOLDER = "gathered"
INDEX = "index.json"
SETTINGS_BYTES = 1 << 20
"""HCCL tells its settings when a process begins to use it: near the beginning of the log."""


@dataclass(frozen=True)
class GatheredFile:
    """One file that is here. `source`: its path on the node, or the command that printed it.

    `of_bytes`: how long it is on the node, None: longer than it was read. When that is more than `bytes`, its middle
    (or end) was left out, and `cut_at` is the offset in our copy where it is missing. `mtime_s`: the node's clock.
    `is_ours`: whether the pid in its name is one of our ranks' (a rank may start others), None: none is to be seen.
    """

    name: str
    file: str
    path: Path
    source: str
    bytes: int
    of_bytes: int | None = None
    cut_at: int | None = None
    mtime_s: float | None = None
    is_ours: bool | None = None


@dataclass(frozen=True)
class Gathered:
    """What one node gave. `at_s`: when, by its own clock; None: nothing was gathered (yet).

    `start_s`: when the attempt began there; `boot_s`: its wall clock at the kernel's second 0, for the stamps in
    `dmesg`. `problems`: (name, why it could not be had, or what was left out).
    """

    host: str
    at_s: float | None = None
    start_s: float | None = None
    boot_s: float | None = None
    files: tuple[GatheredFile, ...] = ()
    problems: tuple[tuple[str, Text | str], ...] = ()

    def of(self, name: str) -> tuple[GatheredFile, ...]:
        """The files under one name, those of our own ranks first, then the newest."""
        return tuple(file for file in self.files if file.name == name)


def read_gathered(attempt_dir: Path, host: str) -> Gathered:
    """What was gathered from `host`; an empty one when nothing was, or its index cannot be read."""
    folder = attempt_dir / host / FOLDER
    try:
        values = json.loads((folder / INDEX).read_bytes())
        return _load(values, folder, host)
    except (OSError, ValueError, KeyError, TypeError):
        return Gathered(host)


def read_hccl_settings(gathered: Gathered) -> dict[str, HcclSetting]:
    """What HCCL took for its settings there, by name: of the newest run plog that says so, of our ranks first."""
    for file in gathered.of("plog"):
        if not file.file.startswith("debug/"):
            try:
                with open(file.path, "rb") as opened:
                    text = opened.read(SETTINGS_BYTES).decode("utf-8", "replace")
            except OSError:
                continue
            found = parse_hccl_env(text.split("\n"))
            if found:
                return found
    return {}


def hosts_gathered(attempt_dir: Path) -> tuple[str, ...]:
    """The hosts from which something was gathered, sorted."""
    try:
        names = sorted(os.listdir(attempt_dir))
    except (FileNotFoundError, NotADirectoryError):
        return ()
    return tuple(name for name in names if (attempt_dir / name / FOLDER / INDEX).is_file())


def hosts_awaited(state_dir: Path, job_id: str, attempt: int) -> tuple[str, ...]:
    """The hosts that have been asked and have not answered yet, sorted: they may be unreachable."""
    try:
        names = sorted(os.listdir(wishes_dir(state_dir)))
    except FileNotFoundError:
        return ()
    found = (read_wish(wishes_dir(state_dir) / name) for name in names)
    return tuple(sorted(wish[2] for wish in found if wish is not None and wish[:2] == (job_id, attempt)))


def wishes_dir(state_dir: Path) -> Path:
    """One small file for each host that is still to give something."""
    return state_dir / "gathering"


def read_wish(path: Path) -> tuple[str, int, str, float] | None:
    """(job, attempt, host, when it was wished); None when the file is torn or gone."""
    try:
        values = json.loads(path.read_bytes())
        return str(values["job"]), int(values["attempt"]), str(values["host"]), float(values["at_s"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _load(values: Mapping[str, Any], folder: Path, host: str) -> Gathered:
    files = tuple(_load_file(one, folder) for one in values["files"])
    problems = tuple((str(one["name"]), node_text(one.get("message", one.get("text")))) for one in values["problems"])
    return Gathered(
        host,
        at_s=_seconds(values.get("at_ns")),
        start_s=_seconds(values.get("start_ns")),
        boot_s=_seconds(values.get("boot_ns")),
        files=files,
        problems=problems,
    )


def _load_file(one: Mapping[str, Any], folder: Path) -> GatheredFile:
    name, file = str(one["name"]), str(one["file"])
    return GatheredFile(
        name,
        file,
        folder / name / file,
        str(one.get("source", "")),
        int(one["bytes"]),
        one.get("of_bytes"),
        one.get("cut_at"),
        _seconds(one.get("mtime_ns")),
        one.get("is_ours"),
    )


def _seconds(nanoseconds: Any) -> float | None:
    return nanoseconds / 1e9 if isinstance(nanoseconds, int) and nanoseconds else None
