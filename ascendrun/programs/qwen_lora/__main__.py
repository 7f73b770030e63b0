"""`python -m ascendrun.programs.qwen_lora --option=value …`: one rank of a training or a service, or an estimate."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ascendrun.programs.trainer.options import run_program

OPTIONS = Path(__file__).with_name("options.json")
STAGES = {
    "train": ("modes", "train"),
    "prepare": ("modes", "prepare"),
    "plan": ("modes", "plan"),
    "compare": ("modes", "compare"),
    "serve": ("inference", "serve"),
    "chat": ("inference", "chat"),
}
ON_CPU = ("prepare", "plan", "compare")


def main(argv: Sequence[str]) -> None:
    run_program(argv, OPTIONS, STAGES, on_cpu=lambda values: values["mode"] in ON_CPU)


if __name__ == "__main__":
    main(sys.argv[1:])
