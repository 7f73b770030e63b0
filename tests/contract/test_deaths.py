"""Whatever dies of a runtime or an engine, at any moment: `stop` leaves no container, no pod and no process.

bin/test --thorough tests/contract/test_deaths.py --deaths 20
bin/test --kubernetes -k deaths --deaths 20
"""

from __future__ import annotations

import random
import subprocess
import time
from collections import Counter
from typing import Any

import pytest

from tests.cluster.scenes import await_that
from tests.contract.test_jobs import Place, place  # noqa: F401  # a fixture

SEED = 30
START_S, STOP_S, DOWN_S = 3.0, 1.5, 2.0
"""Spans of the moments: after the submission, after the begin of `stop`, and of the time until a daemon is back."""
VICTIMS = {
    "docker": ("controller", "command", "daemon"),
    "podman": ("controller", "command"),
    "kubernetes": ("controller", "command", "kube-apiserver", "kubelet"),
}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("place", "victim"), [(name, victim) for name, victims in VICTIMS.items() for victim in victims], indirect=["place"]
)
def test_stop_leaves_nothing_after_deaths(place: Place, victim: str, request: Any, capsys: Any) -> None:  # noqa: F811
    found = Counter[str]()
    for number in range(request.config.getoption("--deaths")):
        found.update(die(place, victim, number))
    with capsys.disabled():
        print(f"\n{place.backend['engine']}, {victim}, seed {SEED}: {dict(found)}")


def die(place: Place, victim: str, number: int) -> Counter[str]:  # noqa: F811
    """Let a victim die while a job starts, or while it is stopped; return when it was and how the job ended."""
    moments = random.Random(f"{SEED} {place.backend['engine']} {victim} {number}")
    job = place.start(
        place.job(f"{victim}{number}", "family", "print", "ready", "hang", per_node=1),
        *(*place.options()[:2], "--set", "nodes=1"),
        env=place.env(),
    )
    is_starting, state = number % 2 == 0, "stopping"
    if is_starting:
        time.sleep(moments.uniform(0.0, START_S))
        state = place.stored_state(job)
        place.kill(victim)
    else:
        place.await_line(job, "ready")
    stop = place.ascendrun.popen("stop", job, env=place.env(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if not is_starting:
        time.sleep(moments.uniform(0.0, STOP_S))
        place.kill(victim)
    if place.is_reached_by_daemons:
        time.sleep(moments.uniform(0.0, DOWN_S))
        place.revive(victim)
    stop.wait(timeout=180)
    place.ascendrun("stop", job, env=place.env())  # the first may have died with its controller
    place.await_state(job, "STOPPED", "FAILED")
    end = place.state(job)
    place.await_nobody(job)
    if not place.is_reached_by_daemons:
        place.revive(victim)
    await_that(lambda: not place.boxes(), lambda: f"{job} has left {place.boxes()}")
    await_that(lambda: not place.holders(), lambda: f"{job} has left {place.holders()}")
    return Counter({f"killed when {state}": 1, f"ended {end}": 1, "shims": place.end_shims()})
