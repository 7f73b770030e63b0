"""The real app of `top` with real keys, while a test plays on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from textual.pilot import Pilot
from textual.widgets import Static

from ascendrun.cli.top.app import TopApp
from ascendrun.cli.top.screens import RowsTable
from ascendrun.cluster import Cluster
from ascendrun.core.settings import Settings
from ascendrun.health.top.view import Choice, Order
from ascendrun.text import use_language
from tests.lib.top_world import TopWorld

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
        return "\n".join(
            "".join(segment.text for segment in strip) for strip in self.app.screen._compositor.render_strips()
        )


def play(
    world: TopWorld,
    steps: Play,
    *,
    lang: str = "en",
    size: tuple[int, int] = (120, 40),
    source: Any | None = None,
    interval_s: float = 3600.0,
) -> TopApp:
    """`interval_s`: by default it looks once, so that what is seen is what the first look saw."""
    cluster = Cluster(Settings(state_dir=world.state_dir))
    use_language(lang)
    app = TopApp(cluster, source or cluster.samples.top(), Choice(), Order(), interval_s=interval_s)

    async def run() -> None:
        async with app.run_test(size=size, notifications=True) as pilot:
            stage = Stage(app, pilot)
            await stage.until(lambda: app.view is not None or app.failure is not None)
            await pilot.pause()
            await steps(stage)

    try:
        asyncio.run(run())
    finally:
        use_language("en")
    return app
