"""Benchmarks of the program nanochat, on one CPU core."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import stages

run_stage = partial(stages.run_stage, "nanochat")


def write_result(name: str, result: dict[str, Any]) -> None:
    stages.write_result(Path(__file__).with_name("results") / f"{name}.json", result)
