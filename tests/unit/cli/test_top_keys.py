"""top with keys: the real app with real keys over a real store."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Optional

import pytest

sys.path.insert(0, str(Path(__file__).parent))

pytest.importorskip("textual")

from textual.pilot import Pilot
from textual.widgets import Input, Static
from top_world import TopWorld, controller_lock, make_usual_world, make_world

from ascendrun.cli.output import width_of
from ascendrun.cli.spark import in_buckets, sparkline
from ascendrun.cli.top import Order
from ascendrun.cli.topapp import TopApp
from ascendrun.cli.topdetail import DetailScreen
from ascendrun.cli.topscreens import LogScreen, StoryScreen, TextScreen
from ascendrun.cli.toptable import RowsTable
from ascendrun.cluster import Cluster
from ascendrun.core.errors import AscendrunError
from ascendrun.head.settings import Settings, spool_dir
from ascendrun.health.toprows import Choice
from ascendrun.insight import TopSource

DEADLINE_S = 60.0
Play = Callable[["Stage"], Awaitable[None]]


class Stage:
    """The app while a test plays on it."""

    def __init__(self, app: TopApp, pilot: Pilot[None]) -> None:
        self.app, self.pilot = app, pilot

    @property
    def table(self) -> RowsTable:
        return self.app.query_one(RowsTable)

    @property
    def hosts(self) -> list[str]:
        return [getattr(line, "host", "folded") for line in self.table.lines]

    def text(self, name: str) -> str:
        return str(self.app.query_one(name, Static).content)

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def until(self, is_so: Callable[[], Any]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not is_so():
            assert time.monotonic() < deadline, self.screen_text()
            await self.pilot.pause(0.02)

    def screen_text(self) -> str:
        """What a person sees, line by line."""
        return "\n".join("".join(segment.text for segment in strip) for strip in
                         self.app.screen._compositor.render_strips())


@pytest.fixture
def world(tmp_path: Path) -> Iterator[TopWorld]:
    made = make_usual_world(tmp_path / "state", busy=3 + 1, idle=5)
    with controller_lock(made.state_dir):
        yield made


def play(world: TopWorld, steps: Play, *, lang: str = "en", size: tuple[int, int] = (120, 40),
         source: Optional[Any] = None, every_s: float = 3600.0) -> TopApp:
    """`every_s`: by default it looks once, so that what is seen is what the first look saw."""
    made = source or TopSource(Cluster(Settings(state_dir=world.state_dir)))
    app = TopApp(made, Choice(), Order(), lang=lang, every_s=every_s)

    async def run() -> None:
        async with app.run_test(size=size, notifications=True) as pilot:
            stage = Stage(app, pilot)
            await stage.until(lambda: app.view is not None or app.failure is not None)
            await pilot.pause()
            await steps(stage)

    asyncio.run(run())
    return app


# ---------------------------------------------------------------- seeing


@pytest.mark.parametrize(("lang", "size"), [
    ("en", (80, 24)), ("zh", (200, 50)), *(
        pytest.param(*both, marks=pytest.mark.thorough) for both in (("zh", (80, 24)), ("en", (200, 50))))])
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


# ---------------------------------------------------------------- moving


def test_arrows_and_j_k_move_and_the_row_stays_in_sight(world: TopWorld) -> None:
    async def steps(stage: Stage) -> None:
        await stage.press("j", "down", "k")
        assert stage.table.cursor == 1
        await stage.press("G")
        assert stage.table.cursor == len(stage.table.lines) - 1
        assert "npu[05-09]" in stage.screen_text()
        await stage.press("j", "g", "k")
        assert stage.table.cursor == 0 and "npu01" in stage.screen_text()

    play(world, steps, size=(80, 24))


def test_a_new_order_shows_what_comes_first(world: TopWorld) -> None:
    async def steps(stage: Stage) -> None:
        await stage.press(*["j"] * 20)
        await stage.press("s", "s", "s", "s")  # util, mem, power, temp
        hottest = stage.app.selected
        assert stage.app.order.by == "temp" and stage.table.cursor == 0
        assert hottest is not None and (hottest.host, hottest.device) == ("npu02", 3)
        await stage.press("r")
        coolest = stage.app.selected
        assert coolest is not None and coolest.temperature_c == 52.0

    play(world, steps)


def test_the_cursor_stays_with_its_row_when_a_later_look_moves_it(world: TopWorld) -> None:
    async def steps(stage: Stage) -> None:
        await stage.press("s", "s", "s", "s", "j", "j", "j")
        chosen = stage.app.selected
        assert chosen is not None
        world.now_s += 1
        world.add_samples(["npu01"], job="j-0001", age_s=0.0, changes={("npu01", 0): {"temperature_c": 99.0}})
        stage.app.begin_look()
        await stage.until(lambda: stage.table.lines[0].temperature_c == 99.0)
        after = stage.app.selected
        assert after is not None and (after.host, after.device) == (chosen.host, chosen.device)
        assert stage.table.cursor == 4

    play(world, steps)


# ---------------------------------------------------------------- choosing


def test_slash_filters_while_one_types_and_escape_brings_all_back(world: TopWorld) -> None:
    async def steps(stage: Stage) -> None:
        before = len(stage.table.lines)
        await stage.press("slash", *"npu03")
        assert set(stage.hosts) == {"npu03"} and stage.app.query_one("#prompt", Input).has_focus
        await stage.press("enter")
        assert stage.table.has_focus and "/npu03" in stage.text("#state")
        await stage.press("escape")
        assert len(stage.table.lines) == before

    play(world, steps)


def test_q_in_the_filter_is_a_letter(world: TopWorld) -> None:
    async def steps(stage: Stage) -> None:
        await stage.press("slash", "q", "s")
        assert stage.app.choice.text == "qs" and stage.app.is_running

    play(world, steps)


def test_u_shows_what_is_not_well_and_a_what_a_job_is_on(world: TopWorld) -> None:
    async def steps(stage: Stage) -> None:
        await stage.press("u")
        assert {"npu02", "npu03", "npu04"} <= set(stage.hosts) and "npu01" not in stage.hosts
        await stage.press("u", "a")
        assert len(stage.hosts) == 32 and "folded" not in stage.hosts

    play(world, steps)


def test_h_is_a_line_a_host(world: TopWorld) -> None:
    async def steps(stage: Stage) -> None:
        await stage.press("h")
        assert stage.hosts == [f"npu{number:02d}" for number in range(1, 10)]
        assert " 88  89  90  99" in stage.screen_text()

    play(world, steps)


def test_commands_behind_a_colon(world: TopWorld) -> None:
    async def steps(stage: Stage) -> None:
        for command, is_so in (
            ("sort temp", lambda app: app.order.by == "temp"),
            ("job waits", lambda app: app.choice.job == "waits"),
            ("host npu02", lambda app: app.choice.hosts == ("npu02",)),
            ("all", lambda app: app.choice == Choice()),
            ("q", lambda app: app._exit),
        ):
            await stage.press("colon", command[0])
            stage.app.query_one("#prompt", Input).insert_text_at_cursor(command[1:])
            await stage.press("enter")
            await stage.until(lambda is_so=is_so: is_so(stage.app))

    play(world, steps)


def test_a_command_that_does_not_exist_is_told_and_changes_nothing(world: TopWorld) -> None:
    async def steps(stage: Stage) -> None:
        before = stage.app.choice, stage.app.order
        stage.app.obey("explode [/red]now")
        await stage.until(lambda: "explode [/red]now" in stage.screen_text())
        assert (stage.app.choice, stage.app.order) == before

    play(world, steps)


# ---------------------------------------------------------------- behind a row


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_enter_shows_every_figure_with_its_history(world: TopWorld, lang: str) -> None:
    async def steps(stage: Stage) -> None:
        await stage.press(*["j"] * 11, "enter")
        screen = stage.app.screen
        assert isinstance(screen, DetailScreen)
        await stage.until(lambda: screen.has_read)
        assert "910B3" in screen.text and "j-0001" in screen.text and "1100" in screen.text
        assert "▇" in screen.text or "█" in screen.text
        ten_minutes = screen.text
        await stage.press("left_square_bracket")
        await stage.until(lambda: "10m" in screen.text)
        assert screen.text != ten_minutes
        await stage.press("escape")
        assert stage.app.selected is not None and stage.app.selected.device == 3

    play(world, steps, lang=lang)


def test_keys_of_the_table_are_dead_behind_a_row(world: TopWorld) -> None:
    async def steps(stage: Stage) -> None:
        await stage.press("enter")
        await stage.press("s", "u", "h")
        await stage.press("escape")
        assert stage.app.order == Order() and stage.app.choice == Choice()

    play(world, steps)


def test_l_shows_the_last_lines_of_the_rank_made_harmless_and_follows(world: TopWorld) -> None:
    log = spool_dir(world.state_dir, "j-0001", 1) / "npu01" / "rank-2.out.0"
    log.write_bytes(b"first\n" + b"x" * 50 + b"\x1b[2Jevil [bold]not markup[/nope]\n")

    async def steps(stage: Stage) -> None:
        await stage.press("j", "j", "l")
        screen = stage.app.screen
        assert isinstance(screen, LogScreen)
        await stage.until(lambda: "first" in screen.text)
        assert "[bold]not markup[/nope]" in stage.screen_text() and "\x1b" not in screen.text
        with open(log, "ab") as file:
            file.write(b"and more\n")
        screen.begin()
        await stage.until(lambda: "and more" in screen.text)
        await stage.press("q")
        assert len(stage.app.screen_stack) == 1 and stage.app.is_running

    play(world, steps)


def test_e_shows_the_story_of_the_job(world: TopWorld) -> None:
    async def steps(stage: Stage) -> None:
        await stage.press("e")
        screen = stage.app.screen
        assert isinstance(screen, StoryScreen)
        await stage.until(lambda: "j-0001" in screen.text)

    play(world, steps)


def test_the_help_names_every_key(world: TopWorld) -> None:
    async def steps(stage: Stage) -> None:
        await stage.press("question_mark")
        assert isinstance(stage.app.screen, TextScreen)
        for key in ("/", "enter", "PgUp", ":sort"):
            assert key in stage.app.screen.text
        await stage.press("q")
        assert stage.app.is_running

    play(world, steps)


def test_q_ends(world: TopWorld) -> None:
    async def steps(stage: Stage) -> None:
        await stage.press("q")

    assert play(world, steps).return_code == 0


# ---------------------------------------------------------------- bad days


class HeldSource:
    """Looks like a source whose second look hangs, until it is let go."""

    def __init__(self, source: TopSource) -> None:
        self.cluster, self._source = source.cluster, source
        self.looks, self.may_go_on = 0, threading.Event()
        self.error: Optional[AscendrunError] = None

    def look(self, *, now_s: float) -> Any:
        self.looks += 1
        if self.looks > 1:
            self.may_go_on.wait(DEADLINE_S)
        if self.error is not None:
            raise self.error
        return self._source.look(now_s=now_s)


def test_a_look_that_hangs_holds_up_no_key_and_is_not_doubled(world: TopWorld) -> None:
    source = HeldSource(TopSource(Cluster(Settings(state_dir=world.state_dir))))

    async def steps(stage: Stage) -> None:
        stage.app.begin_look()
        await stage.until(lambda: source.looks == 2)
        stage.app.begin_look()
        await stage.press("j", "u")
        assert stage.app.choice.only_bad and source.looks == 2
        source.may_go_on.set()
        await stage.until(lambda: stage.app._look_began_s is None)

    try:
        play(world, steps, source=source)
    finally:
        source.may_go_on.set()


def test_a_look_that_fails_is_told_and_the_last_figures_stay(world: TopWorld) -> None:
    source = HeldSource(TopSource(Cluster(Settings(state_dir=world.state_dir))))
    source.may_go_on.set()

    async def steps(stage: Stage) -> None:
        source.error = AscendrunError("samples.db: the disk is gone")
        stage.app.begin_look()
        await stage.until(lambda: "the disk is gone" in stage.text("#state"))
        assert "npu01" in stage.screen_text()
        source.error = None
        stage.app.begin_look()
        await stage.until(lambda: "the disk is gone" not in stage.text("#state"))

    play(world, steps, source=source)


# ---------------------------------------------------------------- sparklines


def test_a_sparkline_goes_from_low_to_high_with_gaps_for_what_is_not_known() -> None:
    assert sparkline([0.0, None, 50.0, 100.0], low=0, high=100) == "▁ ▅█"
    assert sparkline([None, None]) == "  "
    assert set(sparkline([7.0, 7.0])) <= set("▄▅") and sparkline([0.0, 0.0]) == "▁▁"
    assert sparkline([500.0, -5.0], low=0, high=100) == "█▁"


def test_points_are_put_into_equal_stretches_of_time() -> None:
    points = [(0.0, 1.0), (0.5, 3.0), (5.0, None), (9.9, 8.0), (10.0, 99.0), (-1.0, 99.0)]
    assert in_buckets(points, since_s=0.0, until_s=10.0, count=5) == [2.0, None, None, None, 8.0]
