"""Stops in flight while the controller is killed: each takes effect, without a second command. `--thorough`: 40."""

import os
import random
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
from test_controller_crashes import DEADLINE_S, Head, head
from test_guard import status
from test_head_bad_days import await_state, long_job

from tests.lib.vcluster.processes import await_that, is_alive

__all__ = ["head"]


@pytest.mark.timeout(3600)
def test_every_stop_in_flight_takes_effect_although_the_controller_is_killed(
    head: Head, request: pytest.FixtureRequest
) -> None:
    count, lot, cut_short = 40 if request.config.getoption("--thorough") else 3, random.Random(27), 0
    for number in range(count):
        job = long_job(head)
        ranks = [rank["pid"] for rank in head.show(job)["ranks"]]
        controller = status(head).pid
        if number % 3 == 0:
            os.kill(controller, signal.SIGSTOP)  # One that answers nothing: this stop is in flight for certain.
        argv = [sys.executable, "-m", "ascendrun", "stop", job, *(["--now"] if number % 2 else [])]
        stopping = subprocess.Popen(argv, env=head.environ(), cwd=head.folder, stderr=subprocess.PIPE, text=True)
        with suppress(subprocess.TimeoutExpired):
            stopping.wait(lot.uniform(0.2, 1.2))
        cut_short += stopping.poll() is None
        os.kill(controller, signal.SIGKILL)
        told = stopping.communicate(timeout=DEADLINE_S)[1]
        assert stopping.returncode == 0, f"{number}: {told}"
        await_state(head, job, "STOPPED")
        await_that(lambda ranks=ranks: not any(map(is_alive, ranks)))  # type: ignore[misc]
    assert cut_short >= count // 3, f"only {cut_short} stops were in flight"
