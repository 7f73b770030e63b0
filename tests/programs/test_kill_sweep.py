"""Killed at any step and started again: the same bits, for every source of batches and every way to hold the state."""

from __future__ import annotations

import random

import pytest

MUON = {"muon": True, "cut_elements": 64, "shard": True}
WAYS = {
    "none": (1, {"strategy": "none"}),
    "ddp": (2, {"strategy": "ddp"}),
    "ddp, sharded Muon and AdamW": (2, {"strategy": "ddp", **MUON}),
    "fsdp2": (2, {"strategy": "fsdp2"}),
    "fsdp2, Muon": (2, {"strategy": "fsdp2", **MUON}),
    "hsdp": (4, {"strategy": "hsdp", "shard_size": 2}),
    "hsdp, Muon": (4, {"strategy": "hsdp", "shard_size": 2, **MUON}),
    "zero3": (2, {"strategy": "zero3"}),
}
SOURCES = {"planned": {}, "on policy": {"rollouts": 1}}
STEPS, SAVE_STEPS = 16, 3
QUICK = {("planned", "none"), ("on policy", "ddp, sharded Muon and AdamW"), ("planned", "fsdp2, Muon")}


@pytest.mark.parametrize(
    "source, way",
    [
        pytest.param(source, way, marks=() if (source, way) in QUICK else pytest.mark.thorough)
        for source in SOURCES
        for way in WAYS
    ],
)
def test_killed_at_three_steps_and_started_again_no_bit_differs(tiny, fork_server, source, way):
    ranks, options = WAYS[way]
    if way == "zero3":
        fork_server.ask({"import": "deepspeed"})
    chosen = {"ranks": ranks, "max_steps": STEPS, "save_steps": SAVE_STEPS, **options, **SOURCES[source]}
    straight = tiny(name="straight", **chosen).succeed()
    lot = random.Random(f"{source} {way}")
    for step in sorted(lot.sample(range(1, STEPS), 3)):
        # The write of the newest checkpoint may be cut as well; a life that resumes behind this step is not killed.
        tiny(name="broken", kill=[step, lot.randrange(ranks)], **chosen).wait()
    again = tiny(name="broken", **chosen).succeed()
    assert again.losses() == straight.losses()
    assert again.final() == straight.final()
