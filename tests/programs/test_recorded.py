"""The losses of both programs beside those that an earlier trainer had: see recorded.py."""

import json

import pytest

from tests.programs import recorded

RECORDED = json.loads(recorded.FILE.read_text())
QUICK = {"trajectory-1", "trajectory-2", "qwen_lora-ddp-2", "qwen_lora-fsdp2-2"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough) for name in recorded.CASES]
)
def test_twenty_losses_are_those_of_the_trainer_before_this_one(launch, name):
    program, ranks, options = recorded.CASES[name]
    run = launch(program, recorded.arguments(options), ranks=ranks).succeed()
    found = [loss for _, loss in sorted(run.losses().items())]
    assert len(found) == recorded.STEPS
    assert found == pytest.approx(RECORDED[name.replace("hsdp", "fsdp2")], rel=1e-6 if ranks == 1 else 1e-5)
