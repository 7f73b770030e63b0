"""Fixtures of the SSH tests.

lab        a folder with a client key, an ssh config that names it, a state dir; lab.server(...) starts an sshd,
           lab.backends("paramiko") connects to it; all of it is gone afterwards
reach      the three ways to reach a host, one test run each
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Callable, TypeVar

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from sshd import Ear, Sshd, descendants, make_key, trust  # its folder is no package

from ascendrun.backends import Backends, SshOptions
from ascendrun.core.errors import AscendrunError
from ascendrun.core.hosts import Host
from ascendrun.core.settings import Settings
from ascendrun.head.ssh.transport import Connection, Deadlines, Stream
from tests.lib.vcluster.processes import await_that

E = TypeVar("E", bound=AscendrunError)


class Lab:
    """A head's side: key, config, state dir; and the servers that it starts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key = make_key(folder / "id_client")
        self.settings = Settings(state_dir=folder / "state")
        self.servers: list[Sshd] = []
        self._made: list[Backends] = []
        self.config = folder / "config"
        self.write_config()

    @property
    def own_known_hosts(self) -> Path:
        return self.settings.state_dir / "known_hosts"

    def write_config(self, *lines: str, identity: Path | None = None) -> None:
        """The lines come first, since the first value counts."""
        text = [
            *lines,
            "Host *",
            f"  IdentityFile {identity or self.key}",
            "  IdentitiesOnly yes",
            f"  UserKnownHostsFile {self.folder}/users_known_hosts",
            "  GlobalKnownHostsFile none",
        ]
        self.config.write_text("\n".join(text) + "\n")
        self.config.chmod(0o600)

    def server(self, *, options: Sequence[str] = (), host_key: str = "ed25519", trusted: bool = True) -> Sshd:
        server = Sshd(self.folder / f"server{len(self.servers)}", self.key, options=options, host_key=host_key)
        self.servers.append(server)
        server.start()
        if trusted:
            trust(self.own_known_hosts, server)
        return server

    def backends(
        self, transport: str = "auto", *, ask: Callable[[str], str | None] | None = None, **deadlines: float
    ) -> Backends:
        made = Backends(self.settings, SshOptions(ask, transport, self.config, Deadlines(**deadlines)))
        self._made.append(made)
        return made

    def refused(self, kind: type[E], host: Host, match: str | None = None, **options: Any) -> E:
        """The error of a connection to `host`; `options`: of `backends`."""
        with pytest.raises(kind, match=match) as caught:
            self.backends(**options).connect(host)
        return caught.value

    def close(self) -> None:
        for made in self._made:
            made.close()
        for server in self.servers:
            server.stop()


@pytest.fixture
def lab() -> Iterator[Lab]:
    folder = Path(tempfile.mkdtemp(prefix="ascendrun-ssh-lab-"))
    made = Lab(folder)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(folder)


class Reach:
    """One way to one host."""

    def __init__(self, kind: str, lab: Lab) -> None:
        self.kind = kind
        self.server = lab.server() if kind != "local" else None
        self.backends = lab.backends("auto" if kind == "local" else kind)
        self.host = self.server.host() if self.server else Host(name="here", addr="local")
        self._connections: list[Connection] = []

    def connect(self) -> Connection:
        connection = self.backends.connect(self.host)
        self._connections.append(connection)
        return connection

    def open(self, command: str, connection: Connection | None = None) -> tuple[Stream, Ear]:
        ear = Ear()
        stream = (connection or self.connect()).open(command, ear.receiver(), deadline_s=20.0)
        return stream, ear

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


@pytest.fixture(params=["paramiko", "openssh", "local"])
def reach(request: pytest.FixtureRequest, lab: Lab) -> Iterator[Reach]:
    made = Reach(request.param, lab)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    import os

    threads = set(threading.enumerate())
    children = set(descendants(os.getpid()))
    yield
    await_that(lambda: set(threading.enumerate()) <= threads, "the test's threads end")
    await_that(lambda: set(descendants(os.getpid())) <= children, "the test's processes end")
