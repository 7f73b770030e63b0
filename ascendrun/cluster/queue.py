"""The queue that the users of this machine share: its jobs, and commands for jobs of other users."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Callable

from ascendrun.cluster.api import Part
from ascendrun.core.errors import ConflictError
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.core.machines import QueueDrain
    from ascendrun.head.queue.client import QueueClient
    from ascendrun.head.queue.messages import QueueRow


CALL_S = 15.0


class Queue(Part):
    """`jobs` raises ConflictError if the settings name no shared queue, UnreachableError if it does not respond."""

    def jobs(self) -> tuple[QueueRow, ...]:
        """Return the jobs of all users, the oldest first."""
        from ascendrun.head.queue.messages import ListQueue

        with self._client() as client:
            return client.call(ListQueue()).rows

    def is_admin(self) -> bool:
        """Return whether this user is an administrator of the queue; False also if the settings name none."""
        import os

        from ascendrun.head.queue.messages import QueryAdmin

        if self._head.settings.queue is None:
            return False
        with self._client() as client:
            return client.call(QueryAdmin(os.getuid()), timeout_s=CALL_S).is_admin

    def drain(self, drains: Sequence[QueueDrain]) -> tuple[QueueDrain, ...]:
        """Drain hosts for all users, or open them; return all drains. Without any, every user may query them; else
        ConflictError also for users who are not administrators."""
        from ascendrun.head.queue.messages import DrainHosts

        with self._client() as client:
            return client.call(DrainHosts(tuple(drains)), timeout_s=CALL_S).drains

    def run(
        self,
        user: str,
        command: str,
        jobs: Sequence[str],
        write: Callable[[str, bool], object],
        *,
        options: Mapping[str, Any] = MappingProxyType({}),
        words: Sequence[str] = (),
        into: str | Path = "",
    ) -> int:
        """Let the controller of a user run a command for jobs of the user: for an administrator of the queue. All users
        of the queue may `show`, `explain` and `logs` a job with `visible: group`.

        `options`: values by flag, True: a flag without a value; `words`: arguments after the jobs; `into`: a directory
        for the files of `fetch`. `write(text, is_error)` gets what is printed, which may contain control characters.
        Return the exit code. Raises NotFoundError: also for a job that is not visible; ConflictError for what this user
        may not do, if the files cannot be written, and for a change if two controllers of the user have such a job;
        UnreachableError."""
        from codecs import getincrementaldecoder

        from ascendrun.head.queue.messages import RunForOther
        from ascendrun.head.queue.others import run_at
        from ascendrun.text import language

        decoders = [getincrementaldecoder("utf-8")("replace") for _ in range(2)]
        folder = str(Path(into).absolute()) if into else ""
        request = RunForOther(command, tuple(jobs), options, tuple(words), folder, language())
        return run_at(user, request, lambda data, is_error: write(decoders[is_error].decode(data), is_error))

    def _client(self) -> QueueClient:
        folder = self._head.settings.queue
        if folder is None:
            what = Text("queue.not-set", "the settings name no shared queue")
            hint = Text("queue.not-set.hint", "set `queue: DIR` in ~/.config/ascendrun/config.yaml, or for all users")
            raise ConflictError(what, hint=hint)
        from ascendrun.head.queue.client import QueueClient

        return QueueClient(folder)
