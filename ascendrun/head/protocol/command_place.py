"""Where a command runs: the user, and what the reading of a job file depends on there."""

from __future__ import annotations

import getpass
import os
import sys


def login_name() -> str | None:
    """Return the login name of this process; None: it has none, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return None


def reading_place() -> tuple[str, ...]:
    """Return what the reading of a job file depends on besides files and settings: where installed programs are found,
    and `~`. The first entry of `sys.path` is that of the script, or of `-m`, and no place of packages."""
    return (*sys.path[1:], os.path.expanduser("~"))
