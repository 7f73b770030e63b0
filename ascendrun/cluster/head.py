"""The head node behind all calls: requests to the controller, which is started when one needs it, and the store."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ascendrun.core.errors import ControllerReplacedError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ascendrun.cluster.api import Cluster
    from ascendrun.core.hosts import Host
    from ascendrun.core.settings import Settings
    from ascendrun.head.protocol.control_socket import ControlClient
    from ascendrun.head.protocol.messages import R, Request
    from ascendrun.head.state.store import Store
    from ascendrun.head.survey.submission import Submission
    from ascendrun.health.survey.check_context import CheckContext

POLL_S = 0.1
CONTROLLER_START_S = 20.0
SURVEY_S = 180.0
"""Seconds, more than the sum of all deadlines of a survey: connect, probe, compare, connection tests."""


class Head:
    """Requests to the controller of one state directory, and reading of its store."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @property
    def state_dir(self) -> Path:
        return self.settings.state_dir

    def client(self, *, start_s: float = CONTROLLER_START_S) -> ControlClient:
        """Return a connection to the controller. Raises UnreachableError when none starts within `start_s`."""
        from ascendrun.head.protocol.control_socket import ControlClient

        try:
            return ControlClient(self.state_dir)
        except UnreachableError:
            from ascendrun.head.loop.daemon import start_controller

            start_controller(self.state_dir, deadline_s=start_s)
            return ControlClient(self.state_dir)

    def request(self, request: Request[R], *, timeout_s: float = 60.0, repeat: bool = False) -> R:
        """Return the controller's reply. `repeat`: send the request again if the controller dies before it replies."""
        until = time.monotonic() + CONTROLLER_START_S
        while True:
            try:
                with self.client() as client:
                    return client.call(request, timeout_s=timeout_s)
            except ControllerReplacedError:
                if time.monotonic() > until:
                    raise
            except UnreachableError:
                if not repeat or time.monotonic() > until:
                    raise
            time.sleep(POLL_S)  # a killed controller's socket may still accept for a moment

    def stream(self, request: Request[R], *, timeout_s: float) -> Iterator[tuple[R, bytes]]:
        """Yield the controller's replies as they arrive, each with its bytes."""
        with self.client() as client:
            yield from client.stream(request, timeout_s=timeout_s)

    def survey(
        self,
        hosts: Sequence[Host],
        submission: Submission | None,
        *,
        device_type: str | None = None,
        paths: Sequence[str] = (),
        training: Sequence[str] = (),
        names: Sequence[str] | None = None,
        is_full: bool = False,
        every_pair: bool = False,
    ) -> CheckContext:
        """Return what every host reports about itself; with `submission` in the environment of this job."""
        from ascendrun.head.protocol.control_messages import Survey
        from ascendrun.head.survey.survey_reader import read_world

        request = Survey(
            tuple(hosts),
            None if submission is None else submission.to_json(),
            device_type=device_type,
            paths=tuple(paths),
            training=tuple(training),
            names=None if names is None else tuple(names),
            is_full=is_full,
            every_pair=every_pair,
        )
        replies = [reply for reply, _ in self.stream(request, timeout_s=SURVEY_S)]
        return read_world(replies, submission, device_type=device_type, now_s=time.time())

    def store(self) -> Store:
        from ascendrun.head.state.store import Store

        return Store.open_for_reading(self.state_dir)


class Part:
    """Calls of one subject of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._head = cluster, cluster.head
