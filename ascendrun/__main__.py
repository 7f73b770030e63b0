"""The door of the command line: `ascendrun` and `python -m ascendrun`."""

from __future__ import annotations

import gc
import os
import sys

from ascendrun import __version__

GARBAGE_AT = 20_000
"""New objects until unused ones are searched. Imports make 100,000 that stay: a start takes a tenth less."""


def main() -> int:
    """Answers --version with nothing loaded; everything else is the command line's. Returns the exit code."""
    if sys.version_info < (3, 9):
        print("ascendrun: needs Python 3.9 or newer, this is %s" % sys.version.split()[0], file=sys.stderr)
        return 3
    gc.set_threshold(GARBAGE_AT)
    if sys.argv[1:] == ["--version"]:
        print(f"ascendrun {__version__}")
        return 0
    if sys.argv[1:] == ["controller", "ensure"]:
        state_dir = os.environ.get("ASCENDRUN_STATE_DIR")
        if state_dir:  # as in crontab: nothing else is loaded
            from ascendrun.head.loop.guard import ensure

            ensure(state_dir, detached=True)
            return 0
    if sys.argv[1:] == ["controller", "run"]:
        from ascendrun.head.loop.guard import guard

        guard()
    try:
        from ascendrun.cli import main as command_line

        return command_line()
    except KeyboardInterrupt:  # while the command line was imported
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        gc.freeze()  # the end of the process frees everything without a search


if __name__ == "__main__":
    sys.exit(main())
