"""Killed at random steps and started again: the same bits of losses, scores and weights, in every stage that trains.

Two ranks share the optimizer's state. A step of rl is reported while the replies of the next are drawn.
"""

from __future__ import annotations

import random

import pytest

from tests.programs.nanochat.test_nanochat_rl import RL, model  # noqa: F401  # a fixture
from tests.programs.nanochat.test_nanochat_sft import BASE, SFT, base  # noqa: F401  # a fixture

ALL = ("--logging_steps=1", "--output_dir=out")
TRAINS = ("--max_steps=10", "--save_steps=3", "--eval_steps=2", "--eval_tokens=500")


@pytest.fixture
def options_of(request, tmp_path):
    """options_of(stage): the command line of a training that saves a checkpoint every third step."""

    def options(stage):
        cache = f"--data_cache_dir={tmp_path / 'cache'}"
        if stage == "rl":
            return [*RL, *ALL, f"--model_dir={request.getfixturevalue('model')}", cache, "--eval_steps=2"]
        trained = request.getfixturevalue("base")
        if stage == "base":
            return [*BASE, *ALL, *TRAINS, f"--tokenizer_dir={trained.parent / 'tok'}", cache]
        return [*SFT, *ALL, *TRAINS, f"--mode={stage}", f"--model_dir={trained}", cache]

    return options


@pytest.mark.thorough
@pytest.mark.parametrize("stage", ["base", "mid", "sft", "rl"])
def test_a_stage_killed_twice_ends_with_the_same_bits(launch, options_of, stage):
    options = options_of(stage)
    straight = launch("nanochat", options, name="straight", ranks=2).succeed()
    lot = random.Random(f"kills of {stage}")
    for step in sorted(lot.sample(range(1, 9), 2)):
        broken = launch("nanochat", options, name="broken", ranks=2)
        broken.killed_at(step, *lot.sample((0, 1), 2))
        assert not (broken.folder / "out" / "report.json").exists(), "it was not killed"
    again = launch("nanochat", options, name="broken", ranks=2).succeed()
    results = [result_of(run) for run in (again, straight)]
    assert results[0] == results[1]
    assert len(results[0]["losses"]) >= 9 and len(results[0]["evaluations"]) >= 4


def result_of(run):
    rewards = {line["step"]: line["reward"] for line in run.metrics() if "reward" in line}
    return {
        "losses": run.losses(),
        "rewards": rewards,
        "evaluations": run.report()["evaluations"],
        "weights": run.weights(),
    }
