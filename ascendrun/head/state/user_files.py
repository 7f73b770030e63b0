"""Reading of what users write: settings, job files and hostfiles."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from ascendrun.core.settings import FORM, Settings, SettingsBlocks, parse_settings, settings_files
from ascendrun.head.state.store_place import on_local_disk, other_owner
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.core.errors import Problem
    from ascendrun.core.hosts import Host

LIMIT_BYTES = 1 << 20
"""More of a settings file is not read; the reader refuses it."""


def load_settings(
    environ: Mapping[str, str], *, flags: Mapping[str, str] | None = None, files: Sequence[Path] | None = None
) -> Settings:
    """Load settings: flag > environment > user's file > system's file > default.

    `files`: the configuration files, the weakest first; None: the usual two. A missing file is not an error. Raises
    InvalidInputError with every problem of every source.
    """
    texts: dict[Path, bytes] = {}
    problems: list[Problem] = []
    for file in files if files is not None else settings_files(environ):
        try:
            with open(file, "rb") as opened:
                texts[file] = opened.read(LIMIT_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            from ascendrun.core.errors import Problem

            message = Text("settings.cannot-read", "cannot read the file: {error}", error=error.strerror)
            problems.append(Problem(str(file), None, None, message, FORM))
    settings = parse_settings(
        texts, environ, flags=flags or {}, folder=Path.cwd(), check_blocks=_check_blocks, problems=problems
    )
    if settings.origins["state_dir"] != "default":
        return settings
    state_dir = on_local_disk(settings.state_dir)
    return replace(settings, state_dir=state_dir, owner=other_owner(state_dir))


def _check_blocks(blocks: SettingsBlocks, problems: list[Problem]) -> None:
    from ascendrun.core.notices.settings import parse_blocks
    from ascendrun.core.power_settings import parse_power
    from ascendrun.core.share_settings import parse_share
    from ascendrun.core.standby_settings import parse_standby

    parse_blocks(blocks, problems)
    parse_power(blocks, problems)
    parse_share(blocks, problems)
    parse_standby(blocks, problems, read_hostfile)


def read_source(path: Path) -> bytes:
    """Return the content of a user's file. Raises InvalidInputError: it cannot be read."""
    try:
        if not path.is_fifo():
            return path.read_bytes()
        if path.parts[1:2] not in (("dev",), ("proc",)):
            raise OSError(errno.EINVAL, "a FIFO is not a file")  # it would wait for a writer
        return _read_pipe(path, path.stat().st_ino)
    except OSError as error:
        from ascendrun.core.errors import InvalidInputError, Problem
        from ascendrun.core.reader.source_text import INIT_HINT

        why = (error.strerror or type(error).__name__).lower()
        raise InvalidInputError(
            [Problem(str(path), None, None, Text("submit.unreadable", "cannot read the file: {why}", why=why))],
            hint=INIT_HINT,
        ) from error


@lru_cache(maxsize=8)
def _read_pipe(path: Path, inode: int) -> bytes:
    """Return what a shell's `<(command)` prints. It can be read once only, and calls of one command, such as those of
    `plan` for origins, plans and the sweep, read the file each."""
    return path.read_bytes()


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Return every host of the file. Raises InvalidInputError."""
    from ascendrun.core.hosts import parse_hostfile

    return parse_hostfile(read_source(path), str(path))
