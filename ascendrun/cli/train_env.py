"""The training stack of this machine: installed into the checkout's own .venv before a bundled program needs it."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Callable

from ascendrun.core.errors import PreflightError

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
"""What the bundled programs import, and the package that brings it."""

ASK_S = 60.0
LOOK = "import importlib.util as u, json, sys; print(json.dumps([n for n in sys.argv[1:] if not u.find_spec(n)]))"


def ensure_training_stack(python: str | None, progress: Callable[[str], None] | None = None) -> None:
    """Returns when `python` (None: our own) can import what the bundled programs import; for nodes with addr=local.

    Where that is the checkout's own .venv, what is missing is installed, which takes minutes the first time; `progress`
    is called with every line about it (None: the lines go to stderr). Any other Python is its owner's: raises
    PreflightError
    with the pip command. Nothing is imported.
    """
    missing = _missing_here() if _is_ours(python) else _missing_in(str(python))
    if not missing:
        return
    setup = _own_setup()
    if setup is None or not _is_ours(python):
        raise _lacks(python or sys.executable, missing)
    _install(setup, progress or _say, missing)
    still_missing = _missing_here()
    if still_missing:
        raise _lacks(sys.executable, still_missing)


def _is_ours(python: str | None) -> bool:
    """The path counts, not what it links to: an environment's Python links to the one that it stands on."""
    return python is None or os.path.abspath(python) == os.path.abspath(sys.executable)


def _own_setup() -> Path | None:
    """bin/setup-env of the checkout whose .venv runs us; None when we run from elsewhere."""
    checkout = Path(__file__).resolve().parent.parent.parent
    setup = checkout / "bin" / "setup-env"
    is_own = os.path.realpath(sys.prefix) == os.path.realpath(checkout / ".venv") and setup.is_file()
    return setup if is_own else None


def _missing_here() -> tuple[str, ...]:
    importlib.invalidate_caches()
    return tuple(package for module, package in PACKAGES.items() if find_spec(module) is None)


def _missing_in(python: str) -> tuple[str, ...]:
    try:
        answer = subprocess.run(
            [python, "-c", LOOK, *PACKAGES], capture_output=True, text=True, timeout=ASK_S, check=True
        )
        return tuple(PACKAGES[module] for module in json.loads(answer.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        detail = str(getattr(error, "stderr", None) or error).strip().splitlines()
        raise PreflightError(
            f"{python} does not run on this machine: {detail[-1] if detail else error!r}",
            hint="set the job's python: to a Python that does, or leave it out",
        ) from error


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _install(setup: Path, progress: Callable[[str], None], missing: Sequence[str]) -> None:
    progress(f"the bundled programs need {', '.join(missing)} here; installing them once, which takes minutes")
    is_live = sys.stderr.isatty()  # then the seconds count there, which no line by line can show
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
        raise PreflightError(
            "the training stack could not be installed", hint=f"see {setup.parent.parent}/.venv/bootstrap.log"
        )


def _lacks(python: str, missing: Sequence[str]) -> PreflightError:
    commands = [["torch"], [name for name in missing if name != "torch"]] if "torch" in missing else [list(missing)]
    pip = " && ".join(shlex.join([python, "-m", "pip", "install", *names]) for names in commands if names)
    return PreflightError(f"{python} lacks {', '.join(missing)}, which the bundled programs need", hint=pip)
