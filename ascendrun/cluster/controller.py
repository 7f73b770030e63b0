"""The controller of one state directory: started when a call needs it, queried, stopped."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ascendrun.cluster.api import POLL_S, Part
from ascendrun.core import errors
from ascendrun.core.pulse import Sight
from ascendrun.core.settings import Settings
from ascendrun.head.loop.daemon import mark_stopped, running_pid, wait_until_free
from ascendrun.head.loop.guard import guard
from ascendrun.head.protocol.control_messages import CheckStore, ControllerStatus, Shutdown, Status
from ascendrun.head.state.state_dir import clock_now, read_pulse
from ascendrun.text import Text

PULSE_WAIT_S = 3.0
"""Seconds that a call waits for the controller to say what it knows."""
SIGHT_AGAIN_S = 15.0
"""Seconds without another such wait in one process: `top` and `logs -f` call often."""
CHECK_STORE_S = 600.0


class Controller(Part):
    """The controller of one state directory: started when a call needs it, queried, stopped."""

    _sight_mono = float("-inf")
    _sight_problem: Text | str | None = None

    def ensure(self) -> None:
        """Start the controller unless one runs. Raises UnreachableError when it does not start."""
        self._head.client().close()

    def status(self, *, timeout_s: float = 10.0) -> ControllerStatus | None:
        """Return the state of the running controller; None: none runs.

        Raises DeadlineExceededError: one runs, but does not reply (it starts, hangs, or is suspended).
        """
        from ascendrun.head.protocol.control_socket import ControlClient, no_reply

        until_mono = time.monotonic() + timeout_s
        while True:
            try:
                with ControlClient(self._head.state_dir) as client:
                    return client.call(Status(), timeout_s=max(POLL_S, until_mono - time.monotonic()))
            except (errors.ControllerReplacedError, errors.DeadlineExceededError):
                pass
            except errors.UnreachableError:
                if running_pid(self._head.state_dir) is None:
                    return None
            if time.monotonic() > until_mono:
                raise no_reply(Status.OP, timeout_s)  # not what one of the tries had left
            time.sleep(POLL_S)  # it starts, or becomes another release

    def sight(self) -> Sight:
        """Return the newest pulse of the controller. Starts it if none runs, and waits PULSE_WAIT_S for an old one.

        Call while a job is live. Never fails: the pulse may be old or missing, with the reason.
        """
        state_dir = self._head.state_dir
        sight, pid = Sight(read_pulse(state_dir), clock_now()), running_pid(state_dir)
        is_of_this = sight.pulse is not None and sight.pulse.pid == pid  # not of one that has died since
        if (sight.is_known and is_of_this) or time.monotonic() < self._sight_mono:
            return replace(sight, problem=self._sight_problem)
        try:
            if pid is None:
                self._head.client(start_s=PULSE_WAIT_S).close()
            status = self.status(timeout_s=PULSE_WAIT_S)
            if status is not None and status.pulse is not None:
                return Sight(status.pulse, clock_now(), is_new=True)
            self._sight_problem = None
        except errors.AscendrunError as error:
            self._sight_problem = error.message
        self._sight_mono = time.monotonic() + SIGHT_AGAIN_S
        return Sight(read_pulse(state_dir), clock_now(), self._sight_problem)

    def liveness(self) -> Mapping[str, Mapping[str, str]]:
        """Return liveness by live job and host, from the newest pulse; starts no controller."""
        sight = Sight(read_pulse(self._head.state_dir), clock_now())
        return {} if sight.pulse is None else {job_id: sight.job(job_id).liveness for job_id in sight.pulse.jobs}

    def stop(self, *, timeout_s: float = 30.0) -> None:
        """End the controller and return when it has ended; jobs keep running. Does nothing when none runs."""
        from ascendrun.head.protocol.control_socket import ControlClient

        deadline = time.monotonic() + timeout_s
        while True:
            try:
                with ControlClient(self._head.state_dir) as client:
                    client.call(Shutdown(), timeout_s=timeout_s)
                break
            except errors.ControllerReplacedError:
                pass
            except errors.UnreachableError:
                if mark_stopped(self._head.state_dir):
                    return
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_S)  # it starts, or it ends
        wait_until_free(self._head.state_dir, timeout_s=timeout_s)

    def check_store(self) -> None:
        """Have the controller check the job list and rebuild what is damaged. Raises UnreachableError."""
        self._head.request(CheckStore(), timeout_s=CHECK_STORE_S, repeat=True)

    def run(self) -> None:
        """Run as the controller until it ends. Raises ConflictError if another process is the controller."""
        run_controller(self._head.settings)

    def run_shared(self, folder: Path, *, admins: Sequence[str] = (), group: str | None = None) -> None:
        """Decide for all users of this machine where jobs start, until SIGTERM; `folder` has the socket. `admins`: who
        may stop jobs of others, users or @GROUP; `group`: whose members may connect, None: everybody.

        Raises ConflictError: another process does so there, or others may write there.
        """
        from ascendrun.core.jobs.fair_share import SharePolicy
        from ascendrun.core.share_settings import read_share
        from ascendrun.head.queue.server import run_queue

        run_queue(folder, read_share(self._head.settings) or SharePolicy(), admins=admins, group=group)


def run_controller(settings: Settings) -> None:
    """Run as `Controller.run`; a function, so that the rest of the API is not imported."""
    guard()
    from ascendrun.backends.controller import run_controller

    if not run_controller(settings):
        message = Text("controller.already-runs", "a controller already runs for {path}", path=settings.state_dir)
        raise errors.ConflictError(message, hint="ascendrun controller status")


def revive_controller(settings: Settings) -> bool:
    """Start a controller in the background if one ran and was killed; return whether."""
    from ascendrun.head.loop.guard import STATE_VARIABLE, ensure

    os.environ[STATE_VARIABLE] = str(settings.state_dir)
    return ensure(str(settings.state_dir), detached=True)
