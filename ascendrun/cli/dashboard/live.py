"""Parts of pages that change, as server-sent events: rendered once for all browsers that show the same page."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Callable

from starlette.concurrency import run_in_threadpool

from ascendrun.core.errors import AscendrunError

PAUSE_S, LONGEST_PAUSE_S = 1.0, 1.8
COST_RATIO = 20
"""The pause is this many times the duration of a rendering, within those limits: a browser is at most 2 s behind."""
INNER = '<div class="cells" id="'
"""The begin of a part within another one. It contains no other `div`."""
Render = Callable[[], Mapping[str, str]]


class Part:
    """A part of a page. `mark`: differs if it is to be sent again; without the content of the parts in it, `inner`."""

    def __init__(self, name: str, html: str, mark: str, inner: Mapping[str, Part]) -> None:
        self._name, self._html, self.mark, self.inner = name, html, mark, inner

    @cached_property
    def data(self) -> str:
        """JSON of its name and HTML, made once for all browsers."""
        return json.dumps([self._name, self._html])


def make_part(name: str, html: str) -> Part:
    mark, *pieces = html.split(INNER)
    inner = {}
    for piece in pieces:
        inner_name, _, more = piece.partition('">')
        content, _, after = more.partition("</div>")
        inner[inner_name] = Part(inner_name, content, content, {})
        mark += inner_name + after
    return Part(name, html, mark, inner)


class Feed:
    """The parts of one page, rendered again and again while browsers show it."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self.readers = 0
        self.parts: Mapping[str, Part] = {}
        self._ticked = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            began_s = time.monotonic()
            self.parts = await run_in_threadpool(self._make)
            pause_s = COST_RATIO * (time.monotonic() - began_s)
            ticked, self._ticked = self._ticked, asyncio.Event()
            ticked.set()
            await asyncio.sleep(min(max(PAUSE_S, pause_s), LONGEST_PAUSE_S))

    def _make(self) -> Mapping[str, Part]:
        return {name: make_part(name, html) for name, html in self._render().items()}

    async def next_parts(self) -> Mapping[str, Part]:
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
        """Yield events: `parts` with the ids and HTML of parts that changed, and `beat` when all are up to date.

        When a part cannot be rendered the stream ends, and the browser opens it again.
        """
        feed = self._open.get(key)
        if feed is None:
            feed = self._open[key] = Feed(render)
        feed.readers += 1
        sent: dict[str, str] = {}
        try:
            while not self._is_ending():
                changed = ",".join(part.data for part in _changed(await feed.next_parts(), sent))
                if changed:
                    yield f"event: parts\ndata: [{changed}]\n\n"
                yield "event: beat\ndata: now\n\n"
        except AscendrunError:  # without beats the page marks itself as old
            return
        finally:
            feed.readers -= 1
            if feed.readers == 0 and self._open.get(key) is feed:
                del self._open[key]
                await feed.close()


def _changed(parts: Mapping[str, Part], sent: dict[str, str]) -> Iterator[Part]:
    """Yield the parts that differ from those in `sent`, and note them there."""
    for name, part in parts.items():
        inner = {one: within.mark for one, within in part.inner.items()}
        if sent.get(name) != part.mark:
            sent.update(inner, **{name: part.mark})
            yield part
        for one, mark in inner.items():
            if sent.get(one) != mark:
                sent[one] = mark
                yield part.inner[one]
