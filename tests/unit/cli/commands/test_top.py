"""top on a pseudo terminal: with keys, without textual, without colour; and who is left when it ends."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lib.terminal import PseudoTerminal
from tests.lib.top_world import TopWorld, controller_lock, make_usual_world

pytestmark = pytest.mark.slow
WITH = "import sys; from ascendrun.cli import main; sys.exit(main(sys.argv[1:]))"
WITHOUT = "import sys; sys.modules['textual'] = None; " + WITH[len("import sys; ") :]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[TopWorld]:
    made = make_usual_world(tmp_path / "state", busy=4, idle=3)
    with controller_lock(made.state_dir):
        yield made


class Terminal(PseudoTerminal):
    def __init__(self, world: TopWorld, code: str, *argv: str, **environ: str) -> None:
        left_out = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "LC_ALL", "LANGUAGE")
        kept = {name: value for name, value in os.environ.items() if name not in left_out}
        super().__init__(
            ["-c", code, *argv],
            {
                **kept,
                "ASCENDRUN_STATE_DIR": str(world.state_dir),
                "TERM": "xterm-256color",
                "LANG": "C.UTF-8",
                "XDG_CONFIG_HOME": str(world.state_dir / "config"),
                **environ,
            },
            columns=80,
        )

    def wait_for(self, *words: str) -> str:
        self.wait_until(lambda: all(word in self.text for word in words))
        return self.text


def test_on_a_terminal_it_has_keys_and_q_ends_it(world: TopWorld) -> None:
    with Terminal(world, WITH, "top") as terminal:
        terminal.wait_for("npu01", "qwen32b-lora", "Filter")
        terminal.child.send("u")
        terminal.wait_for("Alarm", "DOWN" if "LINK" in terminal.text else "npu03")
        terminal.child.send("q")
        assert terminal.end() == 0


def test_ctrl_c_ends_it_too(world: TopWorld) -> None:
    with Terminal(world, WITHOUT, "top") as terminal:
        terminal.wait_for("npu01")
        terminal.child.sendintr()
        assert terminal.end() == 0
        assert terminal.raw.rstrip().endswith(b"\x1b[?1049l")  # the screen that was there before is back


def test_without_textual_a_plain_view_says_what_to_install_and_looks_again(world: TopWorld) -> None:
    with Terminal(world, WITHOUT, "top", "--interval", "0.1s") as terminal:
        seen = terminal.wait_for("npu01", "1040/5000", "pip install 'ascendrun[tui]'")
        assert len([line for line in seen.splitlines() if line.strip()]) <= 24
        world.write_metrics("j-0001", "npu01", 0, steps=70, step_s=1.5, own=1.0)
        terminal.wait_for("1070/5000")


@pytest.mark.parametrize("code", [WITH, WITHOUT])
def test_without_colour_there_is_none(world: TopWorld, code: str) -> None:
    with Terminal(world, code, "top", "npu0*", NO_COLOR="1") as terminal:
        terminal.wait_for("npu01", "RUNNING")
        terminal.child.send("q" if code is WITH else "\x03")
        assert terminal.end() == 0
        for codes in re.findall(rb"\x1b\[([0-9;]*)m", terminal.raw):
            parts = codes.split(b";")
            if parts[:2] in ([b"38", b"2"], [b"48", b"2"]):
                assert len(set(parts[2:5])) == 1, codes  # a shade of grey
            else:
                assert not any(part in (b"31", b"32", b"33", b"34", b"35", b"36") for part in parts)


def test_a_dumb_terminal_gets_the_print(world: TopWorld) -> None:
    with Terminal(world, WITH, "top", TERM="dumb") as terminal:
        assert terminal.end() == 0
        assert b"npu01" in terminal.raw and b"\x1b" not in terminal.raw
