"""Lines on stdout, messages on stderr, and one redrawn line at the bottom of a terminal."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from typing import TextIO

from ascendrun.cli.output import cut
from ascendrun.cli.sanitise import sanitise, sanitise_line
from ascendrun.text import Text

ERASE_LINE = "\r\x1b[K"
STYLES = {"good": "\x1b[32m", "bad": "\x1b[31m", "dim": "\x1b[2m", "bold": "\x1b[1m"}
RANK_STYLES = ("\x1b[36m", "\x1b[33m", "\x1b[35m", "\x1b[34m", "\x1b[32m")
PLAIN = "\x1b[0m"


class Screen:
    """Terminal output. `is_live`: a user's terminal with a bottom line; else `progress` does nothing."""

    def __init__(self, out: TextIO, err: TextIO, *, color: bool, is_live: bool) -> None:
        self._out = out
        self._err = err
        self.color = color
        self.is_live = is_live
        self._bottom = ""

    def lines(self, texts: Iterable[str]) -> None:
        """Print data, already sanitised by the caller."""
        block = "".join(f"{text}\n" for text in texts)
        if not block:
            return
        bottom = self._erase()
        self._out.write(block)
        self._out.flush()
        self._draw(bottom)

    def echo(self, text: Text | str) -> None:
        """Print to stderr, above the bottom line; sanitised here."""
        bottom = self._erase()
        self._err.write(sanitise(str(text)) + "\n")
        self._err.flush()
        self._draw(bottom)

    def progress(self, text: str) -> None:
        """Set the bottom line; "" for none."""
        if self.is_live and text != self._bottom:
            self._erase()
            self._draw(text)

    def close(self) -> None:
        """Remove the bottom line; repeatable."""
        self._erase()

    def paint(self, text: str, style: str) -> str:
        return f"{STYLES[style]}{text}{PLAIN}" if self.color else text

    def paint_rank(self, text: str, rank: int) -> str:
        return f"{RANK_STYLES[rank % len(RANK_STYLES)]}{text}{PLAIN}" if self.color else text

    def _erase(self) -> str:
        """Remove the bottom line from the terminal and return its text."""
        bottom = self._bottom
        if bottom:
            self._err.write(ERASE_LINE)
            self._err.flush()
            self._bottom = ""
        return bottom

    def _draw(self, text: str) -> None:
        if text and self.is_live:
            self._err.write(cut_to_terminal(sanitise_line(text)))
            self._err.flush()
            self._bottom = text


def cut_to_terminal(text: str, columns: int | None = None) -> str:
    """Truncate to one cell less than the terminal: a full line would wrap, and could not be erased."""
    return cut(text, (columns or shutil.get_terminal_size().columns) - 1)
