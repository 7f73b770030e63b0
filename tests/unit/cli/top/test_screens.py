"""top on a screen: what a person sees before any key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("textual")

from ascendrun.cli.output import width_of
from ascendrun.cli.top.cells import in_buckets, sparkline
from tests.lib.top_stage import Stage, play
from tests.lib.top_world import TopWorld, controller_lock, make_usual_world, make_world


@pytest.fixture
def world(tmp_path: Path) -> Iterator[TopWorld]:
    made = make_usual_world(tmp_path / "state", busy=3 + 1, idle=5)
    with controller_lock(made.state_dir):
        yield made


@pytest.mark.parametrize(
    ("lang", "size"),
    [
        ("en", (80, 24)),
        ("zh", (200, 50)),
        *(pytest.param(*both, marks=pytest.mark.thorough) for both in (("zh", (80, 24)), ("en", (200, 50)))),
    ],
)
def test_the_main_things_are_in_sight(world: TopWorld, lang: str, size: tuple[int, int]) -> None:
    async def steps(stage: Stage) -> None:
        seen = stage.screen_text()
        assert "qwen32b-lora" in seen and "npu01" in seen and "1040/5000" in seen
        assert ("利用率" if lang == "zh" else "UTIL") in seen
        assert ("帮助" if lang == "zh" else "Help") in seen and ("主机" if lang == "zh" else "Hosts") in seen
        assert all(width_of(line.rstrip()) <= size[0] for line in seen.splitlines())

    play(world, steps, lang=lang, size=size)


def test_a_tiny_terminal_shows_what_fits_and_does_not_fall(world: TopWorld) -> None:
    async def steps(stage: Stage) -> None:
        await stage.press("j", "enter", "escape", "h", "slash", "x", "escape")
        await stage.pilot.resize_terminal(200, 60)
        await stage.pilot.pause()
        assert "npu01" in stage.screen_text()

    play(world, steps, size=(20, 6))


def test_nothing_anywhere_is_said(tmp_path: Path) -> None:
    empty = make_world(tmp_path / "none")
    with controller_lock(empty.state_dir):

        async def steps(stage: Stage) -> None:
            assert "nothing to show" in stage.screen_text()
            await stage.press("j", "k", "enter", "l", "e", "g", "G")  # keys without a row do no harm
            assert len(stage.app.screen_stack) == 1

        play(empty, steps)


def test_a_sparkline_goes_from_low_to_high_with_gaps_for_what_is_not_known() -> None:
    assert sparkline([0.0, None, 50.0, 100.0], low=0, high=100) == "▁ ▅█"
    assert sparkline([None, None]) == "  "
    assert set(sparkline([7.0, 7.0])) <= set("▄▅") and sparkline([0.0, 0.0]) == "▁▁"
    assert sparkline([500.0, -5.0], low=0, high=100) == "█▁"


def test_points_are_put_into_equal_stretches_of_time() -> None:
    points = [(0.0, 1.0), (0.5, 3.0), (5.0, None), (9.9, 8.0), (10.0, 99.0), (-1.0, 99.0)]
    assert in_buckets(points, since_s=0.0, until_s=10.0, count=5) == [2.0, None, None, None, 8.0]
