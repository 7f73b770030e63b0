"""Protection against outdated start requests: per run, the newest attempt that this node knows.

The fence outlives the attempts' directories. An attempt below it, or a stopped attempt, is never prepared or started.
"""

from __future__ import annotations

import contextlib
import fcntl
import os

from ascendrun.node import layout
from ascendrun.node.files import make_private_dir, read_claim, write_json
from ascendrun.node.op_errors import OperationError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator


class Fence:
    """One run's fence. Use within `locked()`."""

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, "fence.json")
        found = read_claim(self._path) or {}
        self.attempt = int(found.get("attempt", 0))
        self.is_stopped = bool(found.get("stopped", False))

    def check(self, attempt: int) -> None:
        """Raise OperationError("attempt-stale") for an attempt that must not start any more."""
        if attempt < self.attempt:
            raise OperationError("attempt-stale", "attempt-older", attempt=attempt, newest=self.attempt)
        if attempt == self.attempt and self.is_stopped:
            raise OperationError("attempt-stale", "attempt-stopped", attempt=attempt)

    def raise_to(self, attempt: int, *, stopped: bool) -> None:
        """Raise the fence; never lower it. Raises OSError."""
        if attempt < self.attempt or (attempt == self.attempt and (self.is_stopped or not stopped)):
            return
        write_json(self._path, {"attempt": attempt, "stopped": stopped})
        self.attempt, self.is_stopped = attempt, stopped


@contextlib.contextmanager
def locked(root: str, tag: str) -> Iterator[tuple[Fence, int]]:
    """Return (the run's fence, the tag's attempt number), with other agents of this user locked out.

    Makes the run's directory. Raises ValueError on an invalid tag, OperationError, OSError.
    """
    run, attempt = layout.split_tag(tag)
    folder = layout.run_dir(root, run)
    make_private_dir(folder)
    fd = os.open(os.path.join(folder, "lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):  # no locks on this file system: the claims of files.py still apply
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield Fence(folder), attempt
    finally:
        os.close(fd)
