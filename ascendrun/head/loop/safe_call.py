"""Calls whose fault must not end the keeper of all jobs: it is told in the log, and the next call is made."""

from __future__ import annotations

import sys
import traceback
from contextlib import suppress
from typing import Callable

from ascendrun.head.state.store import LostLeaseError


class Guard:
    """Use from one thread. Raises LostLeaseError alone: a controller that has lost its lease must do nothing more."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, call: Callable[[], object]) -> None:
        try:
            call()
        except LostLeaseError:
            raise
        except Exception:  # a fault of ours in one matter: the log keeps the trace, all other jobs go on
            self.log_exception()

    def log_exception(self) -> None:
        """The exception at hand; once while it comes again and again. The log's own disk may be full."""
        text = traceback.format_exc()
        if text != self._last:
            self._last = text
            with suppress(OSError):
                print(text, file=sys.stderr, flush=True)
