"""Backends behind one protocol; `Backends` passes each host to the backend that reaches it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Callable

from ascendrun.core.hosts import Host
from ascendrun.core.settings import Settings
from ascendrun.head.ssh.transport import Connection, Deadlines

if TYPE_CHECKING:
    from ascendrun.backends.ssh import SshBackend


class Backends:
    """Implementation of `transport.Backend` for any host: "addr=local" runs here, other hosts are reached by SSH.

    `prompt`: prompts for a key's passphrase, None: no prompt is possible. `transport`: "auto", "paramiko" or "openssh".
    `ssh_config`: an ssh config file that replaces the user's and the system's. Thread-safe.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        prompt: Callable[[str], str | None] | None = None,
        transport: str = "auto",
        ssh_config: Path | None = None,
    ) -> None:
        self._settings = settings
        self._prompt = prompt
        self._transport = transport
        self._ssh_config = ssh_config
        self._lock = threading.Lock()
        self._ssh: SshBackend | None = None

    def connect(self, host: Host, *, deadlines: Deadlines) -> Connection:
        if not host.is_local:
            return self.ssh().connect(host, deadlines=deadlines)
        from ascendrun.backends.local import connect_local

        return connect_local(self._settings, host)

    def ssh(self) -> SshBackend:
        """Return the backend for hosts behind SSH, created at the first call; paramiko is imported only to connect."""
        with self._lock:
            if self._ssh is None:
                from ascendrun.backends.ssh import SshBackend

                self._ssh = SshBackend(
                    self._settings, prompt=self._prompt, transport=self._transport, ssh_config=self._ssh_config
                )
            return self._ssh

    def close(self) -> None:
        with self._lock:
            if self._ssh is not None:
                self._ssh.close()
