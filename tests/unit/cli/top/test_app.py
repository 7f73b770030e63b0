"""top with keys: the real app with real keys over a real store."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("textual")

from textual.widgets import Input

from ascendrun.cli.top.screens import SCALE, DetailScreen, EventScreen, LogScreen, TextScreen
from ascendrun.cluster import Cluster
from ascendrun.core.errors import AscendrunError
from ascendrun.core.settings import Settings
from ascendrun.head.protocol.control_socket import Answer, ControlServer
from ascendrun.head.protocol.messages import Done
from ascendrun.head.state.state_dir import spool_dir
from ascendrun.health.top.view import Choice, Order
from ascendrun.query.top_source import TopSource
from tests.lib.top_stage import DEADLINE_S, Stage, play
from tests.lib.top_world import TopWorld, controller_lock, make_usual_world

pytestmark = pytest.mark.slow


@pytest.fixture
def world(tmp_path: Path) -> Iterator[TopWorld]:
    made = make_usual_world(tmp_path / "state", busy=3 + 1, idle=5)
    with controller_lock(made.state_dir):
        yield made


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
        assert coolest is not None and coolest.metrics.temperature_c == 52.0

    play(world, steps)


def test_the_cursor_stays_with_its_row_when_a_later_look_moves_it(world: TopWorld) -> None:
    async def steps(stage: Stage) -> None:
        await stage.press("s", "s", "s", "s", "j", "j", "j")
        chosen = stage.app.selected
        assert chosen is not None
        world.now_s += 1
        world.add_samples(["npu01"], job="j-0001", age_s=0.0, changes={("npu01", 0): {"temperature_c": 99.0}})
        stage.app.begin_refresh()
        await stage.until(lambda: stage.table.lines[0].metrics.temperature_c == 99.0)
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
        stage.app.run_command("explode [/red]now")
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


def test_a_page_that_cannot_be_read_says_so_and_is_read_again(world: TopWorld) -> None:
    log = spool_dir(world.state_dir, "j-0001", 1) / "npu01" / "rank-2.out.0"
    log.unlink(missing_ok=True)
    log.mkdir()

    async def steps(stage: Stage) -> None:
        await stage.press("j", "j", "l")
        screen = stage.app.screen
        assert isinstance(screen, LogScreen)
        await stage.until(lambda: "IsADirectoryError" in screen.text)
        log.rmdir()
        log.write_bytes(b"first\n")
        screen.begin()
        await stage.until(lambda: "first" in screen.text)

    play(world, steps)


def test_e_shows_the_story_of_the_job(world: TopWorld) -> None:
    async def steps(stage: Stage) -> None:
        await stage.press("e")
        screen = stage.app.screen
        assert isinstance(screen, EventScreen)
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
        self._source = source
        self.looks, self.may_go_on = 0, threading.Event()
        self.error: Exception | None = None

    def refresh(self, *, now_s: float) -> Any:
        self.looks += 1
        if self.looks > 1:
            self.may_go_on.wait(DEADLINE_S)
        if self.error is not None:
            raise self.error
        return self._source.refresh(now_s=now_s)


def test_a_look_that_hangs_holds_up_no_key_and_is_not_doubled(world: TopWorld) -> None:
    source = HeldSource(Cluster(Settings(state_dir=world.state_dir)).samples.top())

    async def steps(stage: Stage) -> None:
        stage.app.begin_refresh()
        await stage.until(lambda: source.looks == 2)
        stage.app.begin_refresh()
        await stage.press("j", "u")
        assert stage.app.choice.only_problems and source.looks == 2
        source.may_go_on.set()
        await stage.until(lambda: stage.app._refresh_started_s is None)

    try:
        play(world, steps, source=source)
    finally:
        source.may_go_on.set()


@pytest.mark.parametrize(
    "error, says",
    [
        (AscendrunError("samples.db: the disk is gone"), "samples.db: the disk is gone"),
        (KeyError("hbm"), "KeyError: 'hbm'"),
    ],
)
def test_a_look_that_fails_is_told_and_the_last_figures_stay(world: TopWorld, error: Exception, says: str) -> None:
    source = HeldSource(Cluster(Settings(state_dir=world.state_dir)).samples.top())
    source.may_go_on.set()

    async def steps(stage: Stage) -> None:
        source.error = error
        stage.app.begin_refresh()
        await stage.until(lambda: says in stage.text("#state"))
        assert "npu01" in stage.screen_text()
        source.error = None
        stage.app.begin_refresh()
        await stage.until(lambda: says not in stage.text("#state"))

    play(world, steps, source=source)


def test_t_lists_jobs_and_only_y_stops_the_chosen_one(world: TopWorld) -> None:
    asked: list[object] = []

    def serve(op: str, header: Any, body: bytes, answer: Answer) -> None:
        asked.append((op, header.get("job")))
        answer(Done(), b"", True)

    async def steps(stage: Stage) -> None:
        await stage.press("t")
        await stage.until(lambda: "qwen32b-lora" in stage.screen_text() and "██" in stage.screen_text())
        await stage.press("j", "l")
        await stage.until(lambda: "j-0001 · Logs" in stage.screen_text())
        await stage.press("escape", "x")
        await stage.until(lambda: "j-0001 · Explain" in stage.screen_text() and "RUNNING" in stage.screen_text())
        await stage.press("escape", "S", "escape", "S", "n")
        assert "j-0001 (qwen32b-lora)" in stage.screen_text() and "stop" not in dict(asked)
        await stage.press("y")
        await stage.until(lambda: dict(asked).get("stop") == "j-0001")
        await stage.press("escape", "q")

    server = ControlServer(world.state_dir, serve)
    server.start()
    try:
        play(world, steps)
    finally:
        server.close()


def test_utilisation_has_a_bar_and_a_colour(world: TopWorld) -> None:
    async def steps(stage: Stage) -> None:
        line = stage.table.render_line(1)
        coloured = {segment.style.color.name: segment.text for segment in line if segment.style.color.name in SCALE}
        assert list(coloured) == ["green"] and "█" in coloured["green"] and coloured["green"].endswith("%")

    play(world, steps)
