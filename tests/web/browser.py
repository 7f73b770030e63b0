"""A real browser: Chromium without a window, one for each page."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DEADLINE_S = 120.0
QUIET = """
    --headless --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars
    --force-device-scale-factor=1 --virtual-time-budget=4000 --enable-logging=stderr
    """.split()


@dataclass(frozen=True)
class Seen:
    """`dom`: the page as it is after its scripts. `complaints`: what the console said. `picture`: a PNG of it."""

    dom: str
    complaints: list[str]
    picture: Path


Browse = Callable[..., Seen]


def find_browser() -> str | None:
    return next((path for name in BROWSERS for path in (shutil.which(name),) if path), None)


def open_page(
    browser: str, page: Path, folder: Path, *, width: int = 1240, height: int = 3000, dark: bool = False
) -> Seen:
    """Opens a file in a browser of its own and waits until it stands still."""
    picture = folder / f"{page.stem}.png"
    command = [
        browser,
        *QUIET,
        f"--window-size={width},{height}",
        f"--user-data-dir={folder / 'profile'}",
        f"--screenshot={picture}",
        "--dump-dom",
    ]
    if os.geteuid() == 0:
        command.append("--no-sandbox")
    if dark:
        command.append("--blink-settings=preferredColorScheme=0")
    ran = subprocess.run(
        [*command, page.as_uri()],
        capture_output=True,
        timeout=DEADLINE_S,
        check=True,
        cwd=folder,
        env={**os.environ, "HOME": str(folder)},
    )
    complaints = re.findall(r"CONSOLE.*", ran.stderr.decode(errors="replace"))
    return Seen(ran.stdout.decode(), complaints, picture)
