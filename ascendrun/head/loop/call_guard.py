"""Guard of the controller's calls: an internal error in one of them is logged, and everything else goes on."""

from __future__ import annotations

import sys
import traceback
from contextlib import suppress
from typing import Callable

from ascendrun.head.state.state_dir import StoreDamagedError
from ascendrun.head.state.store_file import LostLeaseError


class Guard:
    """Runs calls; their internal errors are logged and do not end the controller. Use from one thread.

    Raises LostLeaseError only: a controller that has lost its lease must do nothing more. `store_is_damaged`: a call
    found damage, and the controller must check the store.
    """

    def __init__(self) -> None:
        self._last = ""
        self.store_is_damaged = False

    def __call__(self, call: Callable[[], object]) -> None:
        try:
            call()
        except LostLeaseError:
            raise
        except StoreDamagedError:  # the controller repairs it and calls again
            self.store_is_damaged = True
        except Exception:  # a bug in one operation: the log has the traceback, all other jobs keep running
            self.log_exception()

    def log_exception(self) -> None:
        """Log the current exception; a repeated one once. The disk of the log may be full."""
        text = traceback.format_exc()
        if text != self._last:
            self._last = text
            with suppress(OSError):
                print(text, file=sys.stderr, flush=True)
