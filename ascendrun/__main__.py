"""The door of the command line: `ascendrun` and `python -m ascendrun`."""

from __future__ import annotations

import sys

from ascendrun import __version__


def main() -> int:
    """Answers --version with nothing loaded; everything else is the command line's. Returns the exit code."""
    if sys.version_info < (3, 9):
        print("ascendrun: needs Python 3.9 or newer, this is %s" % sys.version.split()[0], file=sys.stderr)
        return 3
    if sys.argv[1:] == ["--version"]:
        print(f"ascendrun {__version__}")
        return 0
    from ascendrun.cli import main as command_line

    return command_line()


if __name__ == "__main__":
    sys.exit(main())
