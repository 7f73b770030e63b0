"""Check versions, NPU, operators, an optimizer step and HCCL of this machine; --device=cpu without an NPU."""

import sys

import scripts  # noqa: F401  # reports a missing ascendrun

if __name__ == "__main__":
    from ascendrun.programs.nanochat.check import main

    sys.exit(main())
