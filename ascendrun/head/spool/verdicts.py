"""The stored diagnosis of an attempt, and whether more evidence has arrived since."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ascendrun.head.spool.artifact_store import hosts_collected
from ascendrun.head.spool.spool_files import is_complete
from ascendrun.node.files import write_json

VERDICT_FILE = "diagnosis.json"


def evidence_of(folder: Path) -> dict[str, Any]:
    """Return what tells that the evidence is the same: the hosts with artifacts, and whether all logs are here."""
    return {"collected": list(hosts_collected(folder)), "is_complete": is_complete(folder)}


def write_verdict(folder: Path, basis: Mapping[str, Any], diagnosis: Any) -> None:
    """Store a diagnosis as JSON values. `basis`: `evidence_of` before the evidence was read."""
    write_json(str(folder / VERDICT_FILE), {"basis": basis, "diagnosis": diagnosis})


def read_verdict(folder: Path) -> Any:
    """Return the stored diagnosis as JSON values, None: there is none."""
    return _read(folder).get("diagnosis")


def is_outdated(folder: Path) -> bool:
    """Return whether more evidence of an attempt has arrived since its diagnosis; False: there is none."""
    verdict = _read(folder)
    return bool(verdict) and verdict.get("basis") != evidence_of(folder)


def _read(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / VERDICT_FILE).read_bytes())
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError):
        return {}
