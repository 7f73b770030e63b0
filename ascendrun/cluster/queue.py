"""The queue that the users of this machine share: its jobs, and their stop by an administrator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascendrun.cluster.api import Part
from ascendrun.core.errors import ConflictError
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.head.queue.client import QueueClient
    from ascendrun.head.queue.messages import QueueRow


class Queue(Part):
    """Each call raises ConflictError if the settings name no shared queue, UnreachableError if it does not respond."""

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

    def _client(self) -> QueueClient:
        folder = self._head.settings.queue
        if folder is None:
            what = Text("queue.not-set", "the settings name no shared queue")
            hint = Text("queue.not-set.hint", "set `queue: DIR` in ~/.config/ascendrun/config.yaml, or for all users")
            raise ConflictError(what, hint=hint)
        from ascendrun.head.queue.client import QueueClient

        return QueueClient(folder)
