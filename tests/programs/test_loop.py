"""The trainer's loop under bad days: killed, stopped, disk full, parts missing; what comes after equals no bad day."""

from __future__ import annotations

import pytest

WAYS = ["ddp", "fsdp2", "zero3"]


@pytest.fixture
def way(request, fork_server):
    """How the model lies over the ranks; what it needs is imported once."""
    if request.param == "zero3":
        fork_server.ask({"import": "deepspeed"})
    return request.param


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_a_rank_killed_at_some_step_changes_no_bit_of_what_comes_after_the_resume(tiny, way):
    straight = tiny(ranks=2, name="straight", how=way).succeed()
    broken = tiny(ranks=2, name="broken", how=way, checkpoint_every=4, kill=[14, 1])
    assert broken.wait()[1] == -9
    again = tiny(ranks=2, name="broken", how=way, checkpoint_every=4).succeed()
    assert "resumed at step 12/30" in again.text() or "resumed at step 8/30" in again.text()
    assert again.losses() == straight.losses()
    assert again.final() == straight.final()
