"""Context of every command: the settings, the cluster, and the screen: lines, messages and one redrawn line."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from ascendrun.cli.output import cut, sanitise, sanitise_line, screen_columns
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.cluster import Cluster
    from ascendrun.core.errors import AscendrunError
    from ascendrun.core.machines import Hold
    from ascendrun.core.node_messages import Failure
    from ascendrun.core.settings import Settings

Reply = TypeVar("Reply")
PROGRESS_S = 0.1
"""Seconds between updates of the progress line: folding the names for each of hundreds of replies is slow."""


class CliContext:
    """Made once per command line; settings and cluster are made when first used."""

    def __init__(
        self, *, environ: Mapping[str, str], make_cluster: Callable[[Settings], Cluster] | None = None
    ) -> None:
        self.environ = environ
        self.flags: dict[str, str] = {}
        self._make_cluster = make_cluster
        self._settings: Settings | None = None
        self._cluster: Cluster | None = None

    @property
    def settings(self) -> Settings:
        """The settings. Raises InvalidInputError with every invalid setting."""
        if self._settings is None:
            from ascendrun.cluster import load_settings

            self._settings = load_settings(self.environ, flags=self.flags)
        return self._settings

    @property
    def cluster(self) -> Cluster:
        if self._cluster is None:
            if self._make_cluster is None:
                from ascendrun.cluster import Cluster

                self._make_cluster = Cluster
            self._cluster = self._make_cluster(self.settings)
        return self._cluster

    def has_color(self, stream: TextIO) -> bool:
        return use_color(self.settings.color, self.environ, is_tty=stream.isatty())

    @cached_property
    def screen(self) -> Screen:
        is_live = sys.stderr.isatty() and self.environ.get("TERM") != "dumb"
        return Screen(sys.stdout, sys.stderr, has_color=lambda: self.has_color(sys.stdout), is_live=is_live)

    def gather(self, replies: Iterable[Reply], progress: Callable[[list[Reply]], Text | str]) -> list[Reply]:
        """Return all replies; until then `progress` of those that have arrived is at the bottom of the terminal."""
        found: list[Reply] = []
        shown_mono = float("-inf")
        try:
            for reply in replies:
                found.append(reply)
                if self.screen.is_live and time.monotonic() - shown_mono >= PROGRESS_S:
                    self.screen.progress(str(progress(found)))
                    shown_mono = time.monotonic()
        finally:
            self.screen.close()
        return found

    def echo(self, text: Text | str) -> None:
        """Print sanitised text to stderr, above the line at the bottom of a terminal."""
        self.screen.echo(text)

    def say(self, key: str, english: str, /, **values: Any) -> None:
        """Print a message by its key in the catalogue and its English, as `echo`."""
        self.echo(Text(key, english, **values))

    def error(self, message: Text | str, hint: Text | str | None = None) -> None:
        """Print an error that does not end the command, and its hint."""
        from ascendrun.cli.errors import error_lines, hint_lines

        self.echo("\n".join([*error_lines(message), *hint_lines(hint)]))

    def warn(self, message: Text | str, hint: Text | str | None = None) -> None:
        from ascendrun.cli.errors import hint_lines, warning_lines

        self.echo("\n".join([*warning_lines(message), *hint_lines(hint)]))

    def detach(self, message: Text, command: str | None = None) -> int:
        """Print that ^C ended only this command, and the one that continues; return the exit code."""
        self.screen.close()
        self.echo(message)
        if command is not None:
            self.hint(f"ascendrun {command}")
        return 130

    def report_rebuilt(self) -> None:
        """Warn, once, that the job list was damaged and rebuilt; only after a command that used the cluster."""
        if self._cluster is None:
            return
        from ascendrun.cluster.api import take_rebuilt

        found = take_rebuilt(self.settings)
        if found is None:
            return
        self.warn(Text("store.rebuilt", "the job list was damaged; jobs rebuilt: {count}", count=len(found["jobs"])))
        if found["file"]:
            self.warn(Text("store.rebuilt-file", "the damaged file is {path}", path=found["file"]))
        if found["lost"]:
            self.warn(Text("store.rebuilt-lost", "jobs that could not be rebuilt: {jobs}", jobs=found["lost"]))
        if found.get("machines"):
            english = "hosts whose state (drain, quarantine) is lost: {hosts:hosts}"
            self.warn(Text("store.rebuilt-machines", english, hosts=found["machines"]))

    def hint(self, hint: Text | str) -> None:
        from ascendrun.cli.errors import hint_lines

        self.echo("\n".join(hint_lines(hint)))


def use_color(mode: str, environ: Mapping[str, str], *, is_tty: bool) -> bool:
    """Return whether to use color: by flag or setting; with `auto`, NO_COLOR, then FORCE_COLOR, then `is_tty`."""
    if mode != "auto":
        return mode == "always"
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR", "0") != "0":
        return True
    return is_tty and environ.get("TERM") != "dumb"


ERASE_LINE = "\r\x1b[K"
STYLES = {"good": "\x1b[32m", "bad": "\x1b[31m", "dim": "\x1b[2m", "bold": "\x1b[1m"}
RANK_STYLES = ("\x1b[36m", "\x1b[33m", "\x1b[35m", "\x1b[34m", "\x1b[32m")
PLAIN = "\x1b[0m"


class Screen:
    """Terminal output. `is_live`: a user's terminal with a bottom line; else `progress` does nothing."""

    def __init__(self, out: TextIO, err: TextIO, *, has_color: Callable[[], bool], is_live: bool) -> None:
        self._out, self._err = out, err
        self._has_color, self.is_live = cache(has_color), is_live
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
        return f"{STYLES[style]}{text}{PLAIN}" if self._has_color() else text

    def paint_rank(self, text: str, rank: int) -> str:
        return f"{RANK_STYLES[rank % len(RANK_STYLES)]}{text}{PLAIN}" if self._has_color() else text

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
            # One cell less than the terminal: a full line would wrap, and could not be erased.
            self._err.write(cut(sanitise_line(text), screen_columns() - 1))
            self._err.flush()
            self._bottom = text


def report_unreached(ctx: CliContext, refusals: Iterable[AscendrunError | Failure], hosts: int) -> int:
    """Print why hosts sent no reply; return 0 if all of them did, 5 if none did, else 6."""
    unreached = list(refusals)
    for why in unreached:
        ctx.error(why.message, why.hint)
    return 0 if not unreached else 5 if len(unreached) == hosts else 6


def print_held(ctx: CliContext, holds: Iterable[Hold]) -> None:
    """Print why no job may use some hosts, each with what a user can do."""
    for hold in holds:
        held = Text("outcome.held", "no job starts on {host}: {why}", host=hold.host, why=hold.reason())
        fix = f"ascendrun stop {hold.tag}" if hold.is_found else f"ascendrun release {hold.host}"
        ctx.warn(held, fix)
