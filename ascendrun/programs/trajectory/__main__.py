"""`python -m ascendrun.programs.trajectory --mode=… --option=value …`: one rank of one stage."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from ascendrun.programs.trainer import options as option_table

OPTIONS = Path(__file__).with_name("options.json")
STAGES = {
    "train": ("training", "train"),
    "prepare": ("training", "prepare_stage"),
    "pretrain": ("training", "pretrain_stage"),
    "finetune": ("training", "finetune_stage"),
    "evaluate": ("evaluate_stage", "evaluate_stage"),
    "predict": ("predict", "classify"),
    "serve": ("serve", "serve_stage"),
    "plan": ("plan", "plan_stage"),
}
"""The module in `stages`, and its function of (options, runtime), by --mode."""


def main(argv: Sequence[str]) -> None:
    """Ends the process. Wrong options end it with code 2 before torch is imported."""
    options = option_table.parse_or_exit(argv, option_table.read_table(OPTIONS))
    from ascendrun.programs.trainer import runtime

    module, name = STAGES[options["mode"]]
    body = getattr(importlib.import_module(f"ascendrun.programs.trajectory.stages.{module}"), name)
    takes_none = options["mode"] == "plan" and options["chip"]
    runtime.run(
        lambda here: body(options, here),
        family="cpu" if takes_none else options["device"],
        timeout_s=options["dist_timeout_s"],
    )


if __name__ == "__main__":
    main(sys.argv[1:])
