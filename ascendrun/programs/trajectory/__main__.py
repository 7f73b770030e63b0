"""`python -m ascendrun.programs.trajectory --mode=… --option=value …`: one rank of one stage."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ascendrun.programs.trainer.options import run_program

OPTIONS = Path(__file__).with_name("options.json")

STAGES = {
    "train": ("stages.training", "train"),
    "prepare": ("stages.training", "prepare_stage"),
    "pretrain": ("stages.training", "pretrain_stage"),
    "finetune": ("stages.training", "train"),
    "evaluate": ("stages.trained", "evaluate_stage"),
    "predict": ("stages.trained", "classify"),
    "serve": ("stages.trained", "serve_stage"),
    "plan": ("stages.common", "plan_stage"),
}


def main(argv: Sequence[str]) -> None:
    run_program(argv, OPTIONS, STAGES, on_cpu=lambda values: values["mode"] == "plan" and values["chip"])


if __name__ == "__main__":
    main(sys.argv[1:])
