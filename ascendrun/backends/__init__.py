"""Backends behind one protocol; `Backends` passes each host to the backend that reaches it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Callable

from ascendrun.core.dataclass import dataclass
from ascendrun.core.hosts import Host
from ascendrun.core.settings import Settings
from ascendrun.head.ssh.transport import Connection, Deadlines

if TYPE_CHECKING:
    from ascendrun.backends.ssh import SshBackend


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
        if not host.is_local:
            return self.ssh().connect(host)
        from ascendrun.backends.local import connect_local

        return connect_local(self._settings, host)

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
