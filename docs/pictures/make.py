"""Writes the pictures of the documentation: python -m docs.pictures.make [top] [pages] [demo].

`top`, the dashboard and the report show a simulated cluster, the first as SVG, the others as Chromium draws them. The
demo is recorded in a terminal, as it runs.
"""

from __future__ import annotations

import base64
import html
import os
import pty
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.style import Style
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from ascendrun.cli.report.page import make_page
from ascendrun.health.report.data import make_report
from tests.lib.report_stories import month
from tests.lib.top_stage import Stage, play
from tests.lib.top_world import controller_lock, make_usual_world

HERE = Path(__file__).parent
WIDTH, HEIGHT = 112, 26
BACKGROUND, PLAIN = (13, 17, 23), (201, 209, 217)
ANSI = [(72, 79, 88), (255, 123, 114), (63, 185, 80), (210, 153, 34)] + [
    (88, 166, 255),
    (188, 140, 255),
    (57, 197, 207),
    (177, 186, 196),
]
DARK = TerminalTheme(BACKGROUND, PLAIN, ANSI)
FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
"""They would be loaded from another host."""


def picture(stage: Stage) -> str:
    with open("/dev/null", "w") as nowhere:
        console = Console(width=WIDTH, height=HEIGHT, record=True, force_terminal=True, file=nowhere)
        for strip in stage.app.screen._compositor.render_strips():
            line = Text.assemble(*((segment.text, segment.style or "") for segment in strip))
            console.print(line, no_wrap=True, crop=True)
    return FONTS.sub("", console.export_svg(title="ascendrun top", theme=DARK, unique_id="top"))


def draw_top() -> None:
    async def steps(stage: Stage) -> None:
        (HERE / "top.svg").write_text(picture(stage), encoding="utf-8")

    with tempfile.TemporaryDirectory() as folder:
        world = make_usual_world(Path(folder) / "state", busy=4, idle=3)
        with controller_lock(world.state_dir):
            play(world, steps, size=(WIDTH, HEIGHT))


def draw_pages() -> None:
    """Draw the overview of the dashboard and the report of a job."""
    sys.path.insert(0, str(HERE.parents[1] / "tests" / "web"))
    from browser import find_browser  # type: ignore[import-not-found]
    from dashboard_site import serve  # type: ignore[import-not-found]
    from live_browser import open_browser  # type: ignore[import-not-found]

    browser = find_browser()
    assert browser is not None, "Debian: apt install chromium"
    with tempfile.TemporaryDirectory() as folder:
        state_dir = Path(folder) / "state"
        make_usual_world(state_dir, busy=4, idle=8)
        with controller_lock(state_dir), serve(state_dir) as site, open_browser(browser, Path(folder)) as page:
            material = month()
            report = make_report(material, now_s=(material.job.ended_at_s or 0.0) + 60.0)
            (Path(folder) / "report.html").write_text(make_page(report), encoding="utf-8")
            for name, url in (("dashboard", site.url), ("report", f"file://{folder}/report.html")):
                page.show_as(1280)
                page.open(url, ready="document.readyState === 'complete' && document.querySelector('section') !== null")
                clip = {"x": 0, "y": 0, "width": 1280, "height": 900, "scale": 1}
                shot = page.call("Page.captureScreenshot", format="webp", quality=70, clip=clip)
                (HERE / f"{name}.webp").write_bytes(base64.b64decode(shot["data"]))


ROWS, COLUMNS, LINE_PX, CHAR_PX = 27, 100, 17, 7.83
SCENE_S = 5.0
MACHINE = re.compile(r"^(system|kernel|cpus|memory|user|python|torch) {2,}.*\n", re.MULTILINE)
"""What `doctor` shows of the machine on which the demo ran."""


def draw_demo() -> None:
    """Record the demo in a terminal; each of its scenes is shown for some seconds."""
    ours, theirs = pty.openpty()
    environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    said = b""
    with subprocess.Popen(
        [sys.executable, "-m", "ascendrun", "demo"], stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=environ
    ) as demo:
        os.close(theirs)
        while data := _read(ours):
            said += data
    assert demo.returncode == 0
    text = re.sub(r"\x1b\[[0-9]*K", "", said.decode().replace("\r\n", "\n"))
    text = re.sub(r"/tmp/[\w.-]+", "/tmp/demo", MACHINE.sub("", text.replace("checking 2 hosts", "")))
    scenes = [f"\x1b[1m{scene}" for scene in re.split(r"^\x1b\[1m(?=\S[^\n]*\.\x1b\[0m$)", text, flags=re.MULTILINE)]
    (HERE / "demo.svg").write_text(animation([scene for scene in scenes if scene.strip("\x1b[1m\n")]), encoding="utf-8")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the program has ended
        return b""


def animation(scenes: Sequence[str]) -> str:
    width, height = round(COLUMNS * CHAR_PX) + 32, ROWS * LINE_PX + 32
    share = 100 / len(scenes)
    frames = "".join(
        f'<g class="scene" style="animation-delay:{number * SCENE_S}s">{"".join(_lines(scene))}</g>'
        for number, scene in enumerate(scenes)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="the demo">'
        "<style>text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre;fill:"
        f"rgb{PLAIN}}}.scene{{opacity:0;animation:show {len(scenes) * SCENE_S}s step-end infinite}}"
        f"@keyframes show{{0%{{opacity:1}}{share:.3f}%{{opacity:0}}100%{{opacity:0}}}}"
        "@media (prefers-reduced-motion){.scene{animation:none}.scene:first-of-type{opacity:1}}</style>"
        f'<rect width="{width}" height="{height}" rx="8" fill="rgb{BACKGROUND}"/>{frames}</svg>\n'
    )


def _lines(scene: str) -> Iterator[str]:
    """Yield the first lines of a scene as SVG; the last says how many are missing."""
    lines = Text.from_ansi(scene.strip("\n")).wrap(Console(width=COLUMNS), COLUMNS)
    shown = list(lines[:ROWS]) if len(lines) <= ROWS else [*lines[: ROWS - 1], Text("…")]
    for number, line in enumerate(shown):
        spans = "".join(_span(segment.text, segment.style) for segment in line.render(Console(width=COLUMNS)))
        yield f'<text x="16" y="{16 + (number + 1) * LINE_PX - 4}">{spans}</text>'


def _span(text: str, style: Style | None) -> str:
    text = html.escape(text.rstrip("\n"))
    if style is None or not text or not (style.color or style.bold or style.dim):
        return text
    number = style.color.number if style.color else None
    looks = [f'fill="rgb{ANSI[number]}"'] if number is not None and number < len(ANSI) else []
    looks += ['font-weight="bold"'] if style.bold else []
    looks += ['opacity=".6"'] if style.dim else []
    return f"<tspan {' '.join(looks)}>{text}</tspan>"


PICTURES = {"top": draw_top, "pages": draw_pages, "demo": draw_demo}

if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]()
