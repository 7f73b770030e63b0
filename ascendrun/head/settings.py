"""What the operator may set for the head, and where its files lie."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Mapping

STATE_VARIABLE = "ASCENDRUN_STATE_DIR"


@dataclass(frozen=True)
class Settings:
    """`state_dir`: everything the head keeps (0700, on a local disk)."""

    state_dir: Path


def load_settings(environ: Mapping[str, str]) -> Settings:
    explicit = environ.get(STATE_VARIABLE)
    if explicit:
        return Settings(state_dir=Path(os.path.abspath(explicit)))
    base = environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Settings(state_dir=Path(base) / "ascendrun")


def spool_file(state_dir: Path, job_id: str, attempt: int, host: str, name: str) -> Path:
    """The head's copy of a node's pulled file; `name` is "<file>.<generation>" as in `node/layout.py`."""
    return spool_dir(state_dir, job_id, attempt) / host / name


def spool_dir(state_dir: Path, job_id: str, attempt: int) -> Path:
    return state_dir / "jobs" / job_id / f"attempt-{attempt}"
