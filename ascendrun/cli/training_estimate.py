"""What a bundled program reckons of its training before a device is taken: for `submit --dry-run`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Callable

from ascendrun.core.jobfile.launchers import PROGRAMS_PACKAGE
from ascendrun.core.jobfile.pipeline import StageJob
from ascendrun.options import ProgramOptions, make_arguments

TRAINS = ("train", "pretrain", "finetune")
"""Modes of bundled programs that train; the others are over before a device fills up."""
RECKONS = "plan"
TOO_LARGE = "ModelTooLargeError: "
"""How a program's error begins that says so."""
BAD_INPUT = ("InvalidDataError: ", "InvalidWeightsError: ")
"""How those begin whose words say all."""
LIMIT_S = 600.0
ON_A_NODE = "on a node, in the job's place: --set args.mode=plan"
TRAINING_ENV = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ASCENDRUN_METRICS_FILE")


@dataclass(frozen=True)
class Arithmetic:
    """`fits` None: not reckoned; then `lines` say why, and what helps."""

    fits: bool | None
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Ended:
    """How a program ended. `error`: the kind of its error and its words, as torch elastic's file has them."""

    code: int | None
    out: str
    error: str


def can_reckon(program: ProgramOptions | None, args: Mapping[str, Any]) -> bool:
    """Whether this is a training of a program that knows its arithmetic."""
    mode = program.options.get("mode") if program is not None else None
    return mode is not None and RECKONS in mode.choices and (args.get("mode") or mode.default) in TRAINS


def title_of(stage: StageJob, job: str) -> str:
    if stage.stage is None:
        return f"{job}:"
    return f"stage {stage.stage}" + (f", which takes what {stage.needs} will make:" if stage.needs else ":")


def reckon(
    program: str,
    args: Mapping[str, Any],
    *,
    ranks: int,
    family: str,
    chip: Callable[[], str | None],
    run: Callable[[Sequence[str]], Ended] | None = None,
) -> Arithmetic:
    """`chip`: asks what the job's devices are, None: nobody knows. `run`: starts such a command here; None: really."""
    card = args.get("chip") or ("" if family == "cpu" else chip())
    if card is None:
        return Arithmetic(
            None, ("memory was not reckoned: what the devices are is not known; name them: --set args.chip=910B3",)
        )
    if run is None and find_spec("torch") is None:
        return Arithmetic(None, ("memory was not reckoned: the Python of this machine has no torch; " + ON_A_NODE,))
    given = {**args, "mode": RECKONS, "world_size": ranks, **({"chip": card} if card else {})}
    return judge((run or run_here)([sys.executable, "-m", f"{PROGRAMS_PACKAGE}.{program}", *make_arguments(given)]))


def judge(ended: Ended) -> Arithmetic:
    lines = tuple(line for line in ended.out.splitlines() if line.strip())
    if ended.code == 0:
        return Arithmetic(True, lines)
    if ended.error.startswith(TOO_LARGE):
        return Arithmetic(
            False, (*lines, *(f"does not fit: {line}" for line in ended.error[len(TOO_LARGE) :].splitlines()))
        )
    why = ended.error or f"exit code {ended.code}"
    why = next((why[len(kind) :] for kind in BAD_INPUT if why.startswith(kind)), why)
    return Arithmetic(None, (*lines, f"memory was not reckoned: {why}; {ON_A_NODE}"))


def run_here(argv: Sequence[str]) -> Ended:
    """In a process of its own: torch is never imported into this one."""
    environ = {name: value for name, value in os.environ.items() if name not in TRAINING_ENV}
    with tempfile.TemporaryDirectory(prefix="ascendrun-plan-") as folder:
        told = Path(folder) / "error.json"
        environ.update(TORCHELASTIC_ERROR_FILE=str(told), PYTHONPATH=str(Path(__file__).resolve().parents[2]))
        try:
            child = subprocess.run(
                argv,
                capture_output=True,
                text=True,
                errors="replace",
                cwd=folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                timeout=LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            return Ended(None, "", f"it took more than {LIMIT_S:.0f} s")
        return Ended(child.returncode, child.stdout, _error_in(told) or child.stderr.strip()[-500:])


def _error_in(path: Path) -> str:
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["message"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""  # it ended well, or before it could write: then its last words tell
