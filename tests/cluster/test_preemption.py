"""A job of a higher priority takes the hosts of a training, which resumes from its checkpoint afterwards."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable

import leftovers
import pytest
from invariants import check_ended
from scenes import BEAT_ON, SAVED, Scene, await_that

DEAF = ["sh", "-c", f"trap '' TERM; exec python3 training.py {SAVED}"]
"""It uses its entire grace period, and keeps saving in it."""


@pytest.fixture
def scene(training_scene_of: Callable[..., Scene]) -> Scene:
    return training_scene_of(2)


@pytest.mark.parametrize("dies", [False, True], ids=["", "and the controller dies"])
def test_a_training_is_preempted_and_resumes_from_its_checkpoint(scene: Scene, dies: bool) -> None:
    more = f"preemptible_after_s: 1\ncheckpoint: {{dir: {SAVED}, grace_period_s: 5}}\n"
    low = scene.start(scene.job("low", per_node=1, command=DEAF, more=more))
    scene.await_line(low, "saved 10")
    high = scene.start(scene.job("high", "print", "here", *BEAT_ON), "--priority", 5)
    await_that(lambda: scene.stored_state(low) == "STOPPING", lambda: str(scene.show(low)["events"]))
    if dies:
        leftovers.kill(scene.controllers(), signal.SIGKILL)
        scene.ascendrun("ps", code=0)  # it starts the next one
    scene.await_line(high, "here", count=4)
    assert scene.state(low) == "QUEUED"
    stops = [event["values"] for event in scene.show(low)["events"] if event["values"].get("state") == "STOPPING"]
    assert [stop["reason"]["code"] for stop in stops] == ["preempted-by"] and stops[0]["reason"]["values"][
        "job"
    ] == high
    assert "preempts" in json.dumps(scene.show(high)["events"])
    scene.enough()
    scene.await_state(high, "SUCCEEDED")
    scene.await_line(low, "from", count=4)
    printed = b"".join(scene.on_head(low, "rank-0.out.*").values()).decode(errors="replace")
    begun, saved = ({int(step) for step in re.findall(rf"{verb} (\d+)", printed)} for verb in ("from", "saved"))
    assert len(begun) == 2 and min(begun) == 0 and begun - {0} <= saved
    assert "restarting" not in [event["code"] for event in scene.show(low)["events"]], "it uses no restart"
    scene.ascendrun("stop", low, "--now", code=0)
    check_ended(scene, low, state="STOPPED")
