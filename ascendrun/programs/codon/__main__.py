"""`python -m ascendrun.programs.codon --mode=… --option=value …`: one rank of one stage."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ascendrun.programs.trainer.options import run_program

OPTIONS = Path(__file__).with_name("options.json")
STAGES = {
    "prepare": ("train", "prepare_stage"),
    "pretrain": ("train", "train_stage"),
    "finetune": ("train", "train_stage"),
    "evaluate": ("train", "evaluate_stage"),
    "optimize": ("optimize", "optimize_stage"),
    "serve": ("serve", "serve_stage"),
}


def main(argv: Sequence[str]) -> None:
    run_program(argv, OPTIONS, STAGES, on_cpu=lambda values: values["mode"] == "prepare")


if __name__ == "__main__":
    main(sys.argv[1:])
