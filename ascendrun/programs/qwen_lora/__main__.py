"""`python -m ascendrun.programs.qwen_lora --option=value …`: one rank of a training or a service, or an estimate."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ascendrun.programs.trainer.options import run_program

ON_DEVICES = ("train", "serve", "chat")
OPTIONS = Path(__file__).with_name("options.json")


def main(argv: Sequence[str]) -> None:
    run_program(
        argv,
        OPTIONS,
        lambda values: ("inference" if values["mode"] in ("serve", "chat") else "modes", values["mode"]),
        on_cpu=lambda values: values["mode"] not in ON_DEVICES,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
