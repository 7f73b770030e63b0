"""The queue that the users of this machine share: its jobs, their stop by an administrator, jobs that others show."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable

from ascendrun.cluster.api import Part
from ascendrun.core.errors import ConflictError
from ascendrun.text import Text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ascendrun.head.queue.client import QueueClient
    from ascendrun.head.queue.messages import QueueRow


class Queue(Part):
    """`jobs` and `stop` raise ConflictError if the settings name no shared queue, UnreachableError if it does not
    respond."""

    def jobs(self) -> tuple[QueueRow, ...]:
        """Return the jobs of all users, the oldest first."""
        from ascendrun.head.queue.messages import ListQueue

        with self._client() as client:
            return client.call(ListQueue()).rows

    def stop(self, user: str, job: str, *, now: bool = False) -> None:
        """Stop the job of a user as an administrator; return when the user's controller has the request. Raises
        ConflictError if this user is none, NotFoundError."""
        from ascendrun.head.queue.messages import StopOther

        with self._client() as client:
            client.call(StopOther(user, job, now))

    def print_visible(
        self, user: str, job: str, command: str, options: Mapping[str, Any], write: Callable[[str, bool], object]
    ) -> int:
        """Let the controller of a user print a job with `visible: group`, as `command` does: show, explain or logs.

        `options`: values by flag, True: a flag without a value. `write(text, is_error)` gets what is printed, which may
        contain control characters. Return the exit code. Raises NotFoundError: also for a job that is not visible;
        ConflictError: also for options that are not for others; UnreachableError."""
        from codecs import getincrementaldecoder

        from ascendrun.head.queue.messages import PrintVisible
        from ascendrun.head.queue.visible import print_visible
        from ascendrun.text import language

        decoders = [getincrementaldecoder("utf-8")("replace") for _ in range(2)]
        request = PrintVisible(job, command, options, language())
        return print_visible(user, request, lambda data, is_error: write(decoders[is_error].decode(data), is_error))

    def _client(self) -> QueueClient:
        folder = self._head.settings.queue
        if folder is None:
            what = Text("queue.not-set", "the settings name no shared queue")
            hint = Text("queue.not-set.hint", "set `queue: DIR` in ~/.config/ascendrun/config.yaml, or for all users")
            raise ConflictError(what, hint=hint)
        from ascendrun.head.queue.client import QueueClient

        return QueueClient(folder)
