"""The one place that imports paramiko: without `invoke` (45 ms that we never use), and silenced."""

from __future__ import annotations

import logging
import sys


def _without_invoke() -> bool:
    """Hides `invoke` during the import below; paramiko guards that import. True when we hid it."""
    if "invoke" in sys.modules:
        return False
    sys.modules["invoke"] = None  # type: ignore[assignment]
    return True


_hidden = _without_invoke()
try:
    import paramiko
finally:
    if _hidden:
        del sys.modules["invoke"]

# Its threads log tracebacks of every refused connection; what matters reaches the user as our own errors.
logging.getLogger("paramiko").addHandler(logging.NullHandler())
logging.getLogger("paramiko").propagate = False
logging.getLogger("paramiko").setLevel(logging.CRITICAL + 1)

__all__ = ["paramiko"]
