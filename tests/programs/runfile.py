"""Runs a file as Python does: its path, then its arguments."""

import os
import runpy
import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> None:
    sys.argv = list(argv)
    sys.path.insert(0, os.path.dirname(argv[0]))
    runpy.run_path(argv[0], run_name="__main__")
