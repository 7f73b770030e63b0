"""Benchmarks of the program nanochat, on one CPU core."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")


def run_stage(folder: Path, mode: str, **options: Any) -> None:
    """Run a stage of the program in `folder` on one CPU core. Raises CalledProcessError with its output shown."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {name: json.dumps(value) if isinstance(value, list) else value for name, value in options.items()}
    words = [f"--{name}={text}" for name, text in {"mode": mode, "device": "cpu", **texts}.items()]
    root = str(Path(__file__).resolve().parents[2])
    environ = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", "ascendrun.programs.nanochat", *words]
    subprocess.run(argv, cwd=folder, env=environ, check=True, stdout=sys.stderr)


def read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def write_result(name: str, result: dict[str, Any]) -> None:
    text = json.dumps(result, indent=1)
    (RESULTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    print(text)
