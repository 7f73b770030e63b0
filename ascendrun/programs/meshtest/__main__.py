"""`python -m ascendrun.programs.meshtest --option=value …`: one rank of a measurement."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ascendrun.programs.trainer import options as option_table

OPTIONS = Path(__file__).with_name("options.json")


def main(argv: Sequence[str]) -> None:
    """Ends the process. Wrong options end it with code 2 before torch is imported."""
    options = option_table.parse_or_exit(argv, option_table.read_table(OPTIONS))
    from ascendrun.programs.meshtest import measure
    from ascendrun.programs.trainer import runtime

    runtime.run(
        lambda here: measure.measure(options, here), family=options["device"], timeout_s=options["dist_timeout_s"]
    )


if __name__ == "__main__":
    main(sys.argv[1:])
