"""Hosts behind one protocol: `Backends` reaches this machine itself, and other hosts by SSH (ssh.py).

The local machine as a host: commands run as child processes, with a separate node root and no SSH.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Callable

from ascendrun.core.dataclass import dataclass
from ascendrun.core.errors import UnreachableError
from ascendrun.core.hosts import Host
from ascendrun.core.settings import LOGIN_FILE, Settings, local_root
from ascendrun.head.ssh.child_process import ChildStream
from ascendrun.head.ssh.transport import CLOSED_HERE, Connection, Deadlines, Receiver, StreamClosedError

if TYPE_CHECKING:
    from ascendrun.backends.ssh import SshBackend

ROOT_VARIABLE = "ASCENDRUN_NODE_ROOT"


@dataclass(frozen=True)
class SshOptions:
    """`prompt`: prompts for a key's passphrase, None: no prompt is possible. `transport`: "auto", "paramiko" or
    "openssh". `config`: an ssh config file that replaces the user's and the system's."""

    prompt: Callable[[str], str | None] | None = None
    transport: str = "auto"
    config: Path | None = None
    deadlines: Deadlines = Deadlines()


class Backends:
    """Implementation of `transport.Backend` for any host: "addr=local" runs here, other hosts are reached by SSH.
    Thread-safe."""

    def __init__(self, settings: Settings, options: SshOptions | None = None) -> None:
        self._settings, self._options = settings, options or SshOptions()
        self._lock = threading.Lock()
        self._ssh: SshBackend | None = None

    def connect(self, host: Host) -> Connection:
        return connect_local(self._settings, host) if host.is_local else self.ssh().connect(host)

    def ssh(self) -> SshBackend:
        """Return the backend for hosts behind SSH, created at the first call; paramiko is imported only to connect."""
        with self._lock:
            if self._ssh is None:
                from ascendrun.backends.ssh import SshBackend

                self._ssh = SshBackend(self._settings, self._options)
            return self._ssh

    def close(self) -> None:
        with self._lock:
            if self._ssh is not None:
                self._ssh.close()


class LocalConnection:
    """Implementation of `transport.Connection`; each opened command is a child in a separate session."""

    peer_address: str | None = None

    def __init__(self, env: dict[str, str]) -> None:
        self._env = env
        self._streams: list[ChildStream] = []
        self._is_closed = False

    def open(self, command: str, receiver: Receiver, *, deadline_s: float) -> ChildStream:
        if self._is_closed:
            raise StreamClosedError(CLOSED_HERE)
        try:
            stream = ChildStream(["/bin/sh", "-c", command], env=self._env, cwd=os.path.expanduser("~"))
        except OSError as error:
            raise UnreachableError.of(
                "ssh.local-no-process",
                "cannot start a process on this machine ({error})",
                "check the limits of processes and open files: ulimit -a",
                error=error.strerror or str(error),
            ) from error
        stream.start(receiver)
        self._streams.append(stream)
        return stream

    def close(self) -> None:
        self._is_closed = True
        for stream in self._streams:
            stream.close()
        self._streams.clear()


def connect_local(settings: Settings, host: Host) -> LocalConnection:
    """Connect to a host with `addr` "local": the head's environment with a node root of its own, the head's Python
    first in PATH, and the variables of the host's login. Raises UnreachableError."""
    root = local_root(settings, host.name)
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
    return LocalConnection({**env, **read_login(root)})


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
