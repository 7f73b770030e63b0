"""Writes docs/pictures/top.svg, what `top` shows of a simulated cluster: python -m docs.pictures.make."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from tests.lib.top_stage import Stage, play
from tests.lib.top_world import controller_lock, make_usual_world

FILE = Path(__file__).with_name("top.svg")
WIDTH, HEIGHT = 112, 26
DARK = TerminalTheme(
    (13, 17, 23),
    (201, 209, 217),
    [(72, 79, 88), (255, 123, 114), (63, 185, 80), (210, 153, 34)]
    + [(88, 166, 255), (188, 140, 255), (57, 197, 207), (177, 186, 196)],
)
FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
"""They would be loaded from another host."""


def picture(stage: Stage) -> str:
    with open("/dev/null", "w") as nowhere:
        console = Console(width=WIDTH, height=HEIGHT, record=True, force_terminal=True, file=nowhere)
        for strip in stage.app.screen._compositor.render_strips():
            line = Text.assemble(*((segment.text, segment.style or "") for segment in strip))
            console.print(line, no_wrap=True, crop=True)
    return FONTS.sub("", console.export_svg(title="ascendrun top", theme=DARK, unique_id="top"))


def main() -> None:
    async def steps(stage: Stage) -> None:
        FILE.write_text(picture(stage), encoding="utf-8")

    with tempfile.TemporaryDirectory() as folder:
        world = make_usual_world(Path(folder) / "state", busy=4, idle=3)
        with controller_lock(world.state_dir):
            play(world, steps, size=(WIDTH, HEIGHT))


if __name__ == "__main__":
    main()
