"""python -m ascendrun.sim.npu build [--python PATH]: prints the toolkit directory; env: the lines to source."""

from __future__ import annotations

import argparse
import sys

from ascendrun.core.errors import AscendrunError
from ascendrun.sim.npu.build import build, find_target


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m ascendrun.sim.npu", description=__doc__)
    parser.add_argument("verb", choices=["build", "env"])
    parser.add_argument("--python", default=sys.executable, help="the Python that has torch_npu")
    options = parser.parse_args()
    try:
        home = build(find_target(options.python))
    except (AscendrunError, OSError) as error:
        print(f"error: {error}", *filter(None, [getattr(error, "hint", None)]), sep="\n  hint: ", file=sys.stderr)
        return 3
    print(f"source {home}/set_env.sh" if options.verb == "env" else home)
    return 0


if __name__ == "__main__":
    sys.exit(main())
