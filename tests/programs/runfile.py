"""Runs a file as Python does: its path, then its arguments."""

import runpy
import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> None:
    sys.argv = list(argv)
    runpy.run_path(argv[0], run_name="__main__")
