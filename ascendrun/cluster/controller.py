"""The controller of one state directory: started when a call needs it, queried, stopped; and its store."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ascendrun.core.errors import ConflictError, DeadlineExceededError, UnreachableError
from ascendrun.core.settings import Settings, load_settings
from ascendrun.text import Text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ascendrun.head.protocol.control_messages import ControllerStatus
    from ascendrun.head.protocol.control_socket import ControlClient
    from ascendrun.head.protocol.messages import R, Request
    from ascendrun.head.state.store import Store

POLL_S = 0.1
STATUS_S = 3.0
CONTROLLER_START_S = 20.0


class ControllerCalls:
    """Settings, requests to the controller, and reading of the store."""

    def __init__(self, settings: Settings | None = None, *, state_dir: str | Path | None = None) -> None:
        """Read the settings. `settings` None: from the environment and the settings files, as the command line does."""
        self.settings = settings or load_settings(
            os.environ, flags={} if state_dir is None else {"state_dir": str(state_dir)}
        )

    def ensure_controller(self) -> None:
        """Start the controller unless one runs. Raises UnreachableError when it does not start."""
        self._client().close()

    def controller_status(self, *, timeout_s: float = 10.0) -> ControllerStatus | None:
        """Return the state of the running controller; None: none runs. Raises DeadlineExceededError."""
        from ascendrun.head.protocol.control_messages import Status
        from ascendrun.head.protocol.control_socket import ControlClient

        try:
            with ControlClient(self.settings.state_dir) as client:
                return client.call(Status(), timeout_s=timeout_s)
        except UnreachableError:
            return None

    def liveness(self, *, timeout_s: float = STATUS_S) -> Mapping[str, Mapping[str, str]]:
        """Return liveness by job and host, from the controller; {} if none runs or it does not respond in time."""
        status = self._status_now(timeout_s)
        return {} if status is None else status.liveness

    def stop_controller(self, *, timeout_s: float = 30.0) -> None:
        """End the controller and return when it has ended; jobs keep running. Does nothing when none runs."""
        from ascendrun.head.protocol.control_messages import Shutdown
        from ascendrun.head.protocol.control_socket import ControlClient

        try:
            with ControlClient(self.settings.state_dir) as client:
                client.call(Shutdown(), timeout_s=timeout_s)
        except UnreachableError:
            return
        from ascendrun.head.loop.daemon import wait_until_free

        wait_until_free(self.settings.state_dir, timeout_s=timeout_s)

    def run_controller(self) -> None:
        """Run as the controller until it ends. Raises ConflictError if another process is the controller."""
        run_controller(self.settings)

    def _status_now(self, timeout_s: float = STATUS_S) -> ControllerStatus | None:
        """Return as `controller_status`; None also if the controller does not respond in time."""
        try:
            return self.controller_status(timeout_s=timeout_s)
        except DeadlineExceededError:
            return None

    def _client(self) -> ControlClient:
        from ascendrun.head.protocol.control_socket import ControlClient

        try:
            return ControlClient(self.settings.state_dir)
        except UnreachableError:
            from ascendrun.head.loop.daemon import start_controller

            start_controller(self.settings.state_dir, deadline_s=CONTROLLER_START_S)
            return ControlClient(self.settings.state_dir)

    def _request(self, request: Request[R], *, timeout_s: float = 60.0, repeat: bool = False) -> R:
        """Return the controller's reply. `repeat`: send the request again if the controller dies before it replies."""
        until = time.monotonic() + CONTROLLER_START_S
        while True:
            try:
                with self._client() as client:
                    return client.call(request, timeout_s=timeout_s)
            except UnreachableError:
                if not repeat or time.monotonic() > until:
                    raise
            time.sleep(POLL_S)  # a killed controller's socket may still accept for a moment

    def _reading(self) -> Store:
        from ascendrun.head.state.store import Store

        return Store.open_for_reading(self.settings.state_dir)


def run_controller(settings: Settings) -> None:
    """Run as `ControllerCalls.run_controller`; a function, so that the rest of the API is not imported."""
    from ascendrun.backends.controller import run_controller

    if not run_controller(settings):
        message = Text("controller.already-runs", "a controller already runs for {path}", path=settings.state_dir)
        raise ConflictError(message, hint="ascendrun controller status")
