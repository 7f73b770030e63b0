"""Hosts behind one protocol, `transport.Backend`: each is reached by its engine, a module here."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

from ascendrun.core.dataclass import dataclass
from ascendrun.core.hosts import Host
from ascendrun.core.settings import Settings
from ascendrun.head.ssh.transport import Connection, Deadlines

if TYPE_CHECKING:
    from ascendrun.backends.ssh import SshBackend

ENGINES: Mapping[str, str] = {"local": "LocalBackend", "ssh": "SshBackend"}
"""Engine types: a module here, and in it the class of its `transport.Backend`, made of Settings and SshOptions."""


@dataclass(frozen=True)
class SshOptions:
    """`prompt`: prompts for a key's passphrase, None: no prompt is possible. `transport`: "auto", "paramiko" or
    "openssh". `config`: an ssh config file that replaces the user's and the system's."""

    prompt: Callable[[str], str | None] | None = None
    transport: str = "auto"
    config: Path | None = None
    deadlines: Deadlines = Deadlines()


class Backends:
    """Implementation of `transport.Backend` for any host, by its engine. Thread-safe."""

    def __init__(self, settings: Settings, options: SshOptions | None = None) -> None:
        self._settings, self._options = settings, options or SshOptions()
        self._lock = threading.Lock()
        self._engines: dict[str, Any] = {}

    def connect(self, host: Host) -> Connection:
        connection: Connection = self.engine(host.engine_type).connect(host)
        return connection

    def engine(self, name: str) -> Any:
        """Return the backend of an engine, made and imported at the first call."""
        with self._lock:
            if name not in self._engines:
                kind = getattr(import_module(f"ascendrun.backends.{name}"), ENGINES[name])
                self._engines[name] = kind(self._settings, self._options)
            return self._engines[name]

    def ssh(self) -> SshBackend:
        backend: SshBackend = self.engine("ssh")
        return backend

    def close(self) -> None:
        with self._lock:
            for engine in self._engines.values():
                engine.close()
