"""The memory estimate of a bundled program, computed before a device is in use: for `submit --dry-run`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

from ascendrun.core.jobfile.launchers import PROGRAMS_PACKAGE
from ascendrun.core.jobfile.spec import load_programs
from ascendrun.options import ProgramOptions, make_arguments
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.core.hosts import Host
    from ascendrun.query.submit import ValidStage

TRAINS = ("train", "pretrain", "finetune")
"""Modes of bundled programs that train; the others need little memory."""
PLAN_MODE = "plan"
TOO_LARGE = "ModelTooLargeError: "
"""The kind of a program's error if its model does not fit."""
BAD_INPUT = ("InvalidDataError: ", "InvalidWeightsError: ")
"""Kinds of errors with a message that is clear without the kind."""
LIMIT_S = 600.0
TRAINING_ENV = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ASCENDRUN_METRICS_FILE")


@dataclass(frozen=True)
class Estimate:
    """`fits` None: unknown; then `lines` have the reason and a hint."""

    fits: bool | None
    lines: tuple[Text | str, ...]


@dataclass(frozen=True)
class Ended:
    """The end of a program. `error`: kind and message of its error, as in the error file of torch elastic."""

    code: int | None
    out: str
    error: str


def can_estimate(program: ProgramOptions | None, args: Mapping[str, Any]) -> bool:
    """Return True for a training of a program that can estimate its memory."""
    mode = program.options.get("mode") if program is not None else None
    return mode is not None and PLAN_MODE in mode.choices and (args.get("mode") or mode.default) in TRAINS


def estimate_stages(
    stages: Sequence[ValidStage], plans: Sequence[Mapping[str, Any]], *, chip_of: Callable[[Sequence[Host]], str | None]
) -> tuple[Estimate | None, ...]:
    """Return the estimate of each stage; None for a stage without training. `plans`: of the same stages. `chip_of`
    returns the chip model of hosts, None: unknown."""
    programs = load_programs()
    estimates: list[Estimate | None] = []
    for plan, stage in zip(plans, stages):
        spec = stage.spec
        if spec.program is None or not can_estimate(programs.get(spec.program), spec.args):
            estimates.append(None)
            continue
        family = plan["nodes"][0]["prepare"]["ranks"][0]["env"].get("ASCENDRUN_DEVICE_TYPE", "auto")
        chip = partial(chip_of, stage.hosts)
        estimates.append(estimate(spec.program, spec.args, ranks=plan["world_size"], family=family, chip=chip))
    return tuple(estimates)


def estimate(
    program: str,
    args: Mapping[str, Any],
    *,
    ranks: int,
    family: str,
    chip: Callable[[], str | None],
    run: Callable[[Sequence[str]], Ended] | None = None,
) -> Estimate:
    """Estimate one program. `chip` returns the devices' chip model, None: unknown. `run` runs a command, None: here."""
    model = args.get("chip") or ("" if family == "cpu" else chip())
    if model is None:
        reason = Text("estimate.unknown-chip", "unknown chip model")
        return Estimate(None, (_unknown(reason), Text("estimate.set-chip", "hint: --set args.chip=910B3")))
    if run is None and find_spec("torch") is None:
        reason = Text("estimate.no-torch", "torch not found on this machine")
        return Estimate(None, (_unknown(reason), _on_a_node()))
    given = {**args, "mode": PLAN_MODE, "world_size": ranks, **({"chip": model} if model else {})}
    return judge((run or run_here)([sys.executable, "-m", f"{PROGRAMS_PACKAGE}.{program}", *make_arguments(given)]))


def judge(ended: Ended) -> Estimate:
    lines = tuple(line for line in ended.out.splitlines() if line.strip())
    if ended.code == 0:
        return Estimate(True, lines)
    if ended.error.startswith(TOO_LARGE):
        return Estimate(False, (*lines, *(_too_large(line) for line in ended.error[len(TOO_LARGE) :].splitlines())))
    error = next((ended.error[len(kind) :] for kind in BAD_INPUT if ended.error.startswith(kind)), ended.error)
    reason = error or Text("estimate.exit-code", "exit code {code}", code=ended.code)
    return Estimate(None, (*lines, _unknown(reason), _on_a_node()))


def _too_large(line: str) -> Text:
    return Text("estimate.too-large", "does not fit: {reason}", reason=line)


def _unknown(reason: Text | str) -> Text:
    return Text("estimate.unknown", "memory estimate: unknown ({reason})", reason=reason)


def _on_a_node() -> Text:
    return Text("estimate.on-a-node", "hint: compute it on a node: --set args.mode=plan")


def run_here(argv: Sequence[str]) -> Ended:
    """Run in a child process: torch is never imported into this process."""
    environ = {name: value for name, value in os.environ.items() if name not in TRAINING_ENV}
    with tempfile.TemporaryDirectory(prefix="ascendrun-plan-") as folder:
        error_file = Path(folder) / "error.json"
        environ.update(TORCHELASTIC_ERROR_FILE=str(error_file), PYTHONPATH=str(Path(__file__).resolve().parents[2]))
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
            return Ended(None, "", str(Text("estimate.timeout", "timed out after {limit_s:duration}", limit_s=LIMIT_S)))
        return Ended(child.returncode, child.stdout, _error_in(error_file) or child.stderr.strip()[-500:])


def _error_in(path: Path) -> str:
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["message"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""  # no error, or it ended before it could write its error
