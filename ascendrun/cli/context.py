"""Context of every command: the settings, the cluster, and the output."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from ascendrun.cli.screen import Screen
    from ascendrun.cluster import Cluster
    from ascendrun.core.settings import Settings
    from ascendrun.text import Text


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

    def screen(self) -> Screen:
        from ascendrun.cli.screen import Screen

        is_live = sys.stderr.isatty() and self.environ.get("TERM") != "dumb"
        return Screen(sys.stdout, sys.stderr, color=self.has_color(sys.stdout), is_live=is_live)

    def echo(self, text: Text | str) -> None:
        """Print sanitised text to stderr."""
        from ascendrun.cli.sanitise import sanitise

        print(sanitise(str(text)), file=sys.stderr)

    def error(self, message: Text | str, hint: Text | str | None = None) -> None:
        """Print an error that does not end the command, and its hint."""
        from ascendrun.cli.errors import error_lines, hint_lines

        print("\n".join([*error_lines(message), *hint_lines(hint)]), file=sys.stderr)

    def warn(self, message: Text | str, hint: Text | str | None = None) -> None:
        from ascendrun.cli.errors import hint_lines, warning_lines

        print("\n".join([*warning_lines(message), *hint_lines(hint)]), file=sys.stderr)

    def report_rebuilt(self) -> None:
        """Warn, once, that the job list was damaged and rebuilt; only after a command that used the cluster."""
        if self._cluster is None:
            return
        from ascendrun.cluster.controller import take_rebuilt

        found = take_rebuilt(self.settings)
        if found is None:
            return
        from ascendrun.text import Text

        self.warn(Text("store.rebuilt", "the job list was damaged; jobs rebuilt: {count}", count=len(found["jobs"])))
        if found["file"]:
            self.warn(Text("store.rebuilt-file", "the damaged file is {path}", path=found["file"]))
        if found["lost"]:
            self.warn(Text("store.rebuilt-lost", "jobs that could not be rebuilt: {jobs}", jobs=found["lost"]))

    def hint(self, hint: Text | str) -> None:
        from ascendrun.cli.errors import hint_lines

        print("\n".join(hint_lines(hint)), file=sys.stderr)


def use_color(mode: str, environ: Mapping[str, str], *, is_tty: bool) -> bool:
    """Return whether to use color: by flag or setting; with `auto`, NO_COLOR, then FORCE_COLOR, then `is_tty`."""
    if mode != "auto":
        return mode == "always"
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR", "0") != "0":
        return True
    return is_tty and environ.get("TERM") != "dumb"
