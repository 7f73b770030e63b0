"""This machine as a host: commands run as child processes, with a separate node root and no SSH."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from ascendrun.core.errors import UnreachableError
from ascendrun.core.hosts import Host
from ascendrun.core.settings import LOGIN_FILE, Settings, local_root
from ascendrun.head.ssh.child_process import ChildConnection, ChildStream
from ascendrun.node.layout import ROOT_VARIABLE


class LocalBackend:
    """This machine as a host, with `addr` "local": a node root of its own, no SSH."""

    def __init__(self, settings: Settings, options: object = None) -> None:
        self._settings = settings

    def connect(self, host: Host) -> ChildConnection:
        """Connect with the head's environment, the head's Python first in PATH, and the variables of the host's login.
        Raises UnreachableError."""
        root = local_root(self._settings, host.name)
        try:
            root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            root.mkdir(mode=0o700, exist_ok=True)
            root.chmod(0o700)
        except OSError as error:
            raise UnreachableError.of(
                "ssh.local-no-directory",
                "{host}: cannot create {path} ({error})",
                "free disk space, or set ASCENDRUN_STATE_DIR to another directory",
                host=host.name,
                path=str(root),
                error=error.strerror or str(error),
            ) from error
        folder = os.path.dirname(os.path.abspath(sys.executable))
        env = {
            **os.environ,
            ROOT_VARIABLE: str(root),
            "PATH": os.pathsep.join([folder, os.environ.get("PATH") or os.defpath]),
        }
        return ChildConnection(partial(_start, {**env, **read_login(root)}))

    def terminal_argv(self, host: Host, argv: Sequence[str], *, has_terminal: bool) -> list[str]:
        return list(argv)

    def close(self) -> None:
        """Nothing is held."""


def _start(env: Mapping[str, str], command: str) -> ChildStream:
    try:
        return ChildStream(["/bin/sh", "-c", command], env=env, cwd=os.path.expanduser("~"))
    except OSError as error:
        raise UnreachableError.of(
            "ssh.local-no-process",
            "cannot start a process on this machine ({error})",
            "check the limits of processes and open files: ulimit -a",
            error=error.strerror or str(error),
        ) from error


def read_login(root: Path) -> dict[str, str]:
    """Return the variables of the host's login; {} if it has none. Raises UnreachableError."""
    path = root / LOGIN_FILE
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise UnreachableError.of(
            "ssh.file-unreadable",
            "cannot read {path} ({error})",
            "fix or remove the file",
            path=str(path),
            error=str(error),
        ) from error
    pairs = [line.partition("=") for line in lines if line.strip() and not line.startswith("#")]
    return {name: value for name, equals, value in pairs if equals}
