"""`python -m ascendrun.programs.qwen_lora --option=value …`: one rank of a training, or its arithmetic."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ascendrun.programs.trainer import options as option_table

OPTIONS = Path(__file__).with_name("options.json")


def main(argv: Sequence[str]) -> None:
    """Ends the process. Wrong options end it with code 2 before torch is imported."""
    options = option_table.parse_or_exit(argv, option_table.read_table(OPTIONS))
    from ascendrun.programs.qwen_lora import modes
    from ascendrun.programs.trainer import runtime

    body = {"train": modes.train, "plan": modes.plan, "compare": modes.compare}[options["mode"]]
    family = "cpu" if options["mode"] != "train" else options["device"]
    runtime.run(lambda here: body(options, here), family=family, timeout_s=options["dist_timeout_s"])


if __name__ == "__main__":
    main(sys.argv[1:])
