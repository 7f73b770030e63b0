"""Hosts behind one protocol, `transport.Backend`: each is reached by its engine, a module here."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Callable, cast

from ascendrun.core.dataclass import dataclass
from ascendrun.core.hosts import Host, queue_of
from ascendrun.core.settings import Settings
from ascendrun.head.ssh.transport import Backend, Connection, Deadlines

if TYPE_CHECKING:
    from ascendrun.backends.ssh import SshBackend
    from ascendrun.core.allocations import Allocator

ENGINES: Mapping[str, str] = {
    "kubernetes": "KubernetesBackend",
    "local": "LocalBackend",
    "slurm": "SlurmBackend",
    "ssh": "SshBackend",
}
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
        self._engines: dict[str, Backend] = {}

    def connect(self, host: Host) -> Connection:
        return self.engine(host.engine_type).connect(host)

    def engine(self, name: str) -> Backend:
        """Return the backend of an engine, made and imported at the first call."""
        with self._lock:
            if name not in self._engines:
                kind = getattr(import_module(f"ascendrun.backends.{name}"), ENGINES[name])
                self._engines[name] = kind(self._settings, self._options)
            return self._engines[name]

    def allocator(self, engine: str) -> Allocator:
        return cast("Allocator", self.engine(engine))

    def allocators(self) -> Sequence[Allocator]:
        """Return those of the engines in the settings."""
        from ascendrun.core.engines import read_engines

        types = {queue_of({"engine": options}) for options in read_engines(self._settings).values()}
        return [self.allocator(engine) for engine in sorted(filter(None, types))]

    def ssh(self) -> SshBackend:
        return cast("SshBackend", self.engine("ssh"))

    def terminal_argv(self, host: Host, argv: Sequence[str], *, has_terminal: bool) -> list[str]:
        """Return the command line that runs `argv` on the host, with or without a terminal there. Raises
        UnreachableError."""
        return list(self.engine(host.engine_type).terminal_argv(host, argv, has_terminal=has_terminal))

    def close(self) -> None:
        with self._lock:
            for engine in self._engines.values():
                engine.close()
