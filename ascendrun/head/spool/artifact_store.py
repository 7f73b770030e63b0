"""Artifacts that a node sent after an attempt failed: which files are here, their origin, and missing files; and the
stored diagnosis of the attempt, with the evidence that it is based on.

They are in the attempt's spool, in `<host>/gathered/<name>/<file>`, with the index `<host>/gathered/index.json`. Names:
plog, dmesg, npu-smi, hccn, device-log, flight-recorder, supervisor (its log).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascendrun.core.dataclass import dataclass
from ascendrun.core.node_messages import node_text
from ascendrun.head.spool.spool_files import is_complete
from ascendrun.head.state.state_dir import read_values
from ascendrun.node.files import names_in, write_json
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.ascend.hccl_env import HcclSetting

FOLDER = "gathered"
INDEX = "index.json"
VERDICT_FILE = "diagnosis.json"
SETTINGS_BYTES = 1 << 20
"""HCCL logs its settings when a process starts to use it: near the start of the log."""


@dataclass(frozen=True)
class Artifact:
    """A stored file. `source`: its path on the node, or the command that printed it.

    `of_bytes`: its length on the node, None: longer than was read. If that is more than `bytes`, its middle (or end)
    was omitted, and `cut_at` is the offset of the omission in the copy. `mtime_s`: the node's clock. `is_ours`: whether
    the pid in its name is a rank of this job (a rank may start others), None: no pid.
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
class CollectedArtifacts:
    """The artifacts of one node. `at_s`: when collected, by its own clock; None: not collected (yet).

    `start_s`: when the attempt started there; `boot_s`: its wall clock at the kernel's second 0, for the stamps in
    `dmesg`. `problems`: (name, why it is missing, or which part was omitted).
    """

    host: str
    at_s: float | None = None
    start_s: float | None = None
    boot_s: float | None = None
    files: tuple[Artifact, ...] = ()
    problems: tuple[tuple[str, Text | str], ...] = ()

    def of(self, name: str) -> tuple[Artifact, ...]:
        """Return the files under one name, those of the job's own ranks first, then the newest."""
        return tuple(file for file in self.files if file.name == name)


def read_artifacts(attempt_dir: Path, host: str) -> CollectedArtifacts:
    """Return the artifacts of `host`; empty if there are none, or the index cannot be read."""
    folder = attempt_dir / host / FOLDER
    try:
        values = json.loads((folder / INDEX).read_bytes())
        return _load(values, folder, host)
    except (OSError, ValueError, KeyError, TypeError):
        return CollectedArtifacts(host)


def read_hccl_settings(gathered: CollectedArtifacts) -> dict[str, HcclSetting]:
    """Return the settings used by HCCL, by name: from the newest run plog with them, the job's ranks first."""
    from ascendrun.ascend.hccl_env import parse_hccl_env

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


def hosts_collected(attempt_dir: Path) -> tuple[str, ...]:
    """Return the hosts with artifacts, sorted."""
    return tuple(name for name in names_in(attempt_dir) if (attempt_dir / name / FOLDER / INDEX).is_file())


def hosts_awaited(state_dir: Path, job_id: str, attempt: int) -> tuple[str, ...]:
    """Return the hosts with a pending request, sorted: they may be unreachable."""
    found = (read_request(requests_dir(state_dir) / name) for name in names_in(requests_dir(state_dir)))
    return tuple(sorted(request[2] for request in found if request is not None and request[:2] == (job_id, attempt)))


def requests_dir(state_dir: Path) -> Path:
    """Return the directory with one small file for each host with a pending request."""
    return state_dir / "gathering"


def read_request(path: Path) -> tuple[str, int, str, float] | None:
    """Return (job, attempt, host, when it was requested); None if the file is torn or missing."""
    try:
        values = json.loads(path.read_bytes())
        return str(values["job"]), int(values["attempt"]), str(values["host"]), float(values["at_s"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _load(values: Mapping[str, Any], folder: Path, host: str) -> CollectedArtifacts:
    files = tuple(_load_file(file, folder) for file in values["files"])
    problems = [(str(one["name"]), node_text(one.get("message", one.get("text")))) for one in values["problems"]]
    at_s, start_s, boot_s = (_seconds(values.get(name)) for name in ("at_ns", "start_ns", "boot_ns"))
    return CollectedArtifacts(host, at_s, start_s, boot_s, files, tuple(problems))


def _load_file(values: Mapping[str, Any], folder: Path) -> Artifact:
    name, file, source = str(values["name"]), str(values["file"]), str(values.get("source", ""))
    sizes = int(values["bytes"]), values.get("of_bytes"), values.get("cut_at")
    mtime_s = _seconds(values.get("mtime_ns"))
    return Artifact(name, file, folder / name / file, source, *sizes, mtime_s, values.get("is_ours"))


def _seconds(nanoseconds: Any) -> float | None:
    return nanoseconds / 1e9 if isinstance(nanoseconds, int) and nanoseconds else None


def evidence_of(folder: Path) -> dict[str, Any]:
    """Return what tells that the evidence is the same: the hosts with artifacts, and whether all logs are here."""
    return {"collected": list(hosts_collected(folder)), "is_complete": is_complete(folder)}


def write_verdict(folder: Path, basis: Mapping[str, Any], diagnosis: Any) -> None:
    """Store a diagnosis as JSON values. `basis`: `evidence_of` before the evidence was read."""
    write_json(str(folder / VERDICT_FILE), {"basis": basis, "diagnosis": diagnosis})


def read_verdict(folder: Path) -> Any:
    """Return the stored diagnosis as JSON values, None: there is none."""
    return read_values(folder / VERDICT_FILE).get("diagnosis")


def is_outdated(folder: Path) -> bool:
    """Return whether more evidence of an attempt has arrived since its diagnosis; False: there is none."""
    verdict = read_values(folder / VERDICT_FILE)
    return bool(verdict) and verdict.get("basis") != evidence_of(folder)
