"""A few cuts of the head's power; `python -m tests.crashes.takeover` does thirty."""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.crashes.takeover import MOMENTS, Cut, draw, takeover


def test_cuts_follow_from_their_seed_and_have_every_moment() -> None:
    cuts = draw(7, 2 * len(MOMENTS))
    assert cuts == draw(7, 2 * len(MOMENTS)) != draw(8, 2 * len(MOMENTS))
    assert {cut.moment for cut in cuts[: len(MOMENTS)]} == set(MOMENTS)
    assert all(0 <= cut.delay_s <= MOMENTS[cut.moment] for cut in cuts)


@pytest.mark.thorough
@pytest.mark.timeout(0)
def test_each_machine_continues_as_the_head_when_the_other_loses_its_power_in_the_middle_of_a_start_or_a_stop() -> None:
    told: list[Mapping[str, Any]] = []
    takeover(1, [Cut("start", 0.3), Cut("stop", 0.5)], told.append)
    assert [one["head"] for one in told[:-1]] == ["node1", "node2"] and told[-1]["takeovers"] == 2
