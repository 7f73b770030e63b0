"""Stages of bundled programs on one CPU core, for benchmarks of what they learn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_stage(program: str, folder: Path, mode: str, **options: Any) -> None:
    """Run a stage of a program in `folder` on one CPU core. Raises CalledProcessError with its output shown."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {name: json.dumps(value) if isinstance(value, list) else value for name, value in options.items()}
    words = [f"--{name}={text}" for name, text in {"mode": mode, "device": "cpu", **texts}.items()]
    root = str(Path(__file__).resolve().parents[1])
    environ = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", f"ascendrun.programs.{program}", *words]
    subprocess.run(argv, cwd=folder, env=environ, check=True, stdout=sys.stderr)


def read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def write_result(file: Path, result: dict[str, Any]) -> None:
    text = json.dumps(result, indent=1)
    file.parent.mkdir(exist_ok=True)
    file.write_text(text + "\n", encoding="utf-8")
    print(text)
