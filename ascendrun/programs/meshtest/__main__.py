"""`python -m ascendrun.programs.meshtest --option=value …`: one rank of a measurement."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ascendrun.programs.trainer.options import run_program

OPTIONS = Path(__file__).with_name("options.json")


def main(argv: Sequence[str]) -> None:
    run_program(argv, OPTIONS, {"": ("measure", "measure")})


if __name__ == "__main__":
    main(sys.argv[1:])
