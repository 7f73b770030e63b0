"""Waiting for the threads that the controller starts in the background."""

from __future__ import annotations

import threading

from ascendrun.head.waiting import in_background

DEADLINE_S = 60.0


def join_threads(prefix: str) -> None:
    """Return when every thread of such a name that was to be started so far has ended."""
    are_started = threading.Event()
    in_background(are_started.set, "after those before it")
    assert are_started.wait(DEADLINE_S)
    for thread in threading.enumerate():
        if thread.name.startswith(prefix):
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), thread.name
