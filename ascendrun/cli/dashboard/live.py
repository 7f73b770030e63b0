"""Parts of pages that change, as server-sent events: rendered once for all browsers that show the same page."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Callable

from starlette.concurrency import run_in_threadpool

from ascendrun.core.errors import AscendrunError

PAUSE_S = 1.0
Render = Callable[[], Mapping[str, str]]


class Feed:
    """The parts of one page, rendered again and again while browsers show it."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self.readers = 0
        self.parts: Mapping[str, str] = {}
        self._ticked = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            self.parts = await run_in_threadpool(self._render)
            ticked, self._ticked = self._ticked, asyncio.Event()
            ticked.set()
            await asyncio.sleep(PAUSE_S)

    async def next_parts(self) -> Mapping[str, str]:
        """Return the parts after the next rendering. Raises what it raised."""
        ticked = asyncio.create_task(self._ticked.wait())
        try:
            await asyncio.wait([ticked, self._task], return_when=asyncio.FIRST_COMPLETED)
        finally:
            ticked.cancel()
        if self._task.done():
            self._task.result()
        return self.parts

    async def close(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError, Exception):  # what a reader has been sent, or no reader waits for
            await self._task


class Feeds:
    """The feeds that browsers read now, by page, query and language."""

    def __init__(self, is_ending: Callable[[], bool]) -> None:
        self._is_ending = is_ending
        self._open: dict[tuple[str, str], Feed] = {}

    async def stream(self, key: tuple[str, str], render: Render) -> AsyncIterator[str]:
        """Yield events: `part` with the id and HTML of a part that changed, and `beat` when all parts are up to date.

        When a part cannot be rendered the stream ends, and the browser opens it again.
        """
        feed = self._open.get(key)
        if feed is None:
            feed = self._open[key] = Feed(render)
        feed.readers += 1
        sent: dict[str, str] = {}
        try:
            while not self._is_ending():
                parts = await feed.next_parts()
                for name, part in parts.items():
                    if sent.get(name) != part:
                        sent[name] = part
                        yield f"event: part\ndata: {json.dumps([name, part])}\n\n"
                yield "event: beat\ndata: now\n\n"
        except AscendrunError:  # without beats the page marks itself as old
            return
        finally:
            feed.readers -= 1
            if feed.readers == 0 and self._open.get(key) is feed:
                del self._open[key]
                await feed.close()
