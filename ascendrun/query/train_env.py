"""Training packages of this machine: installed into the .venv of the checkout before a bundled program runs."""

from __future__ import annotations

import importlib
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Callable

from ascendrun.core.errors import PreflightError
from ascendrun.text import Text

PACKAGES = {
    "torch": "torch",
    "accelerate": "accelerate",
    "h3": "h3",
    "numpy": "numpy",
    "peft": "peft",
    "pyarrow": "pyarrow",
    "safetensors": "safetensors",
    "sklearn": "scikit-learn",
    "tokenizers": "tokenizers",
    "transformers": "transformers",
}
"""Modules that the bundled programs import, and their packages."""


def ensure_training_stack(progress: Callable[[str], None] | None = None) -> None:
    """Ensure that this Python has the packages of the bundled programs; for local nodes.

    Missing packages are installed into the .venv of the checkout, which takes minutes the first time; `progress` gets
    every line of output (None: stderr). Any other Python is not changed: raises PreflightError with the pip command.
    Nothing is imported.
    """
    missing, setup = _missing(), _own_setup()
    if missing and setup is not None:
        _install(setup, progress or print_line, missing)
        missing = _missing()
    if missing:
        raise _missing_error(missing)


def _own_setup() -> Path | None:
    """Return bin/setup-env of the checkout whose .venv runs ascendrun; None when another Python runs it."""
    checkout = Path(__file__).resolve().parent.parent.parent
    setup = checkout / "bin" / "setup-env"
    is_own = os.path.realpath(sys.prefix) == os.path.realpath(checkout / ".venv") and setup.is_file()
    return setup if is_own else None


def _missing() -> tuple[str, ...]:
    importlib.invalidate_caches()
    return tuple(package for module, package in PACKAGES.items() if find_spec(module) is None)


def print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _install(setup: Path, progress: Callable[[str], None], missing: Sequence[str]) -> None:
    progress(
        str(
            Text(
                "train-env.installing",
                "installing {packages} for the bundled programs, takes minutes",
                packages=missing,
            )
        )
    )
    is_live = sys.stderr.isatty()  # a live counter of seconds, which cannot be forwarded line by line
    with subprocess.Popen(
        [str(setup), "train"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        text=True,
        stderr=sys.stderr if is_live else subprocess.PIPE,
        errors="replace",
    ) as child:
        for line in child.stderr or ():
            progress(line.rstrip("\n"))
    if child.returncode != 0:
        raise PreflightError.of(
            "train-env.install-failed",
            "cannot install the training packages",
            "see {path}",
            path=f"{setup.parent.parent}/.venv/bootstrap.log",
        )


def _missing_error(missing: Sequence[str]) -> PreflightError:
    commands = [["torch"], [name for name in missing if name != "torch"]] if "torch" in missing else [list(missing)]
    pip = " && ".join(shlex.join([sys.executable, "-m", "pip", "install", *names]) for names in commands if names)
    message = Text(
        "train-env.missing",
        "{python}: packages not found: {packages} (required by the bundled programs)",
        python=sys.executable,
        packages=list(missing),
    )
    return PreflightError(message, hint=pip)
