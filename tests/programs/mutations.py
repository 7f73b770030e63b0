"""Puts each fault of mutations.toml into a copy of this checkout, and runs the tests that fit: they must fail.

    python -m tests.programs.mutations [WORD]     all, or those with the word in their name

It is not a part of the tests: it takes half an hour. The tests must pass without a fault, which is tried first.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomllib

REPO = Path(__file__).resolve().parents[2]
LIMIT_S = 900
SKIPPED = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "node_modules")


def run(copy: Path, tests: Sequence[str]) -> bool:
    """Return whether the tests pass in the copy. One that never ends has found the fault."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += [str(copy / "tests" / name) for name in tests]
    environ = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        command, cwd=copy, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        return process.wait(LIMIT_S) == 0
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        return False


def survives(copy: Path, mutation: dict[str, Any]) -> bool:
    path = copy / "ascendrun" / mutation["file"]
    original = path.read_text(encoding="utf-8")
    assert original.count(mutation["before"]) == 1, mutation
    path.write_text(original.replace(mutation["before"], mutation["after"]), encoding="utf-8")
    try:
        return run(copy, mutation["tests"])
    finally:
        path.write_text(original, encoding="utf-8")


def main(words: Sequence[str]) -> int:
    found = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["mutation"]
    chosen = [each for each in found if all(word in each["name"] for word in words)]
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(REPO, copy, symlinks=True, ignore=SKIPPED)
        every = sorted({name for each in chosen for name in each["tests"]})
        if not run(copy, every):
            print("the tests fail without a fault", flush=True)
            return 2
        killed = 0
        for each in chosen:
            started_s = time.monotonic()
            is_alive = survives(copy, each)
            killed += not is_alive
            word = "survived" if is_alive else "killed"
            print(f"{word:8} {time.monotonic() - started_s:5.0f} s  {each['file']}: {each['name']}", flush=True)
        print(f"{killed} of {len(chosen)} killed", flush=True)
    return int(killed < len(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
