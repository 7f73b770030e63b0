"""A real sshd on a high port of 127.0.0.1, run as whoever runs the tests, with keys and files of its own; and what
the tests ask of a connection."""

from __future__ import annotations

import getpass
import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ascendrun.backends import Backends
from ascendrun.core.hosts import Host
from ascendrun.head.ssh.host_keys import HostKey, known_name, record_host_keys
from ascendrun.head.ssh.transport import Receiver
from tests.lib.vcluster.processes import await_that, is_alive
from tests.ports import free_port

SSHD = "/usr/sbin/sshd"


def make_key(path: Path, *, kind: str = "ed25519", passphrase: str = "") -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", path.name, "-f", str(path)], check=True)
    return path


def public_key(path: Path) -> HostKey:
    kind, blob = Path(f"{path}.pub").read_text().split()[:2]
    return HostKey(kind, blob)


class Ear:
    """A receiver that keeps what it hears, and that its calls came one at a time with `on_closed` once and last."""

    def __init__(self) -> None:
        self.data: list[bytes] = []
        self.error_data: list[bytes] = []
        self.ends: list[tuple[str, int | None]] = []
        self.faults: list[str] = []
        self.closed = threading.Event()
        self._busy = threading.Lock()

    def receiver(self) -> Receiver:
        return Receiver(
            lambda data: self._hear(self.data, data), lambda data: self._hear(self.error_data, data), self._end
        )

    def _hear(self, heap: list[Any], item: Any) -> None:
        if not self._busy.acquire(blocking=False):
            self.faults.append("two calls at once")
            return
        if self.ends and heap is not self.ends:
            self.faults.append("data after the end")
        heap.append(item)
        self._busy.release()

    def _end(self, reason: str, status: int | None) -> None:
        self._hear(self.ends, (reason, status))
        self.closed.set()

    @property
    def output(self) -> bytes:
        return b"".join(self.data)

    @property
    def errors(self) -> bytes:
        return b"".join(self.error_data)

    def wait(self, deadline_s: float = 60.0) -> tuple[str, int | None]:
        assert self.closed.wait(deadline_s), f"not closed within {deadline_s:g} s; heard {self.output[-200:]!r}"
        assert self.faults == [] and len(self.ends) == 1
        return self.ends[0]


def connects(backends: Backends, host: Host) -> None:
    """Connects, runs a command, and closes."""
    connection = backends.connect(host)
    try:
        ear = Ear()
        connection.open("echo fine", ear.receiver(), deadline_s=20.0)
        assert ear.wait()[1] == 0
        assert ear.output == b"fine\n"
    finally:
        connection.close()


class Sshd:
    """One sshd; `options` are lines of its config, which win over the defaults below."""

    def __init__(
        self, folder: Path, client_key: Path, *, options: Sequence[str] = (), host_key: str = "ed25519"
    ) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.host_key_file = make_key(folder / "host_key", kind=host_key)
        (folder / "home").mkdir()  # an empty one: startup files of whoever runs the tests are not what is tested
        key = Path(f"{client_key}.pub").read_text()
        (folder / "authorized_keys").write_text(f'environment="HOME={folder}/home" {key}')
        (folder / "authorized_keys").chmod(0o600)
        self.options = list(options)
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    @property
    def host_key(self) -> HostKey:
        return public_key(self.host_key_file)

    def host(self, name: str = "node1", **fields: Any) -> Host:
        return Host(name=name, addr="127.0.0.1", port=self.port, user=getpass.getuser(), **fields)

    def start(self) -> Sshd:
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        for _ in range(5):
            self.port = self.port or free_port()
            self._write_config()
            starts_before = self._log_so_far().count("Server listening")
            argv = [SSHD, "-D", "-f", str(self.folder / "config"), "-E", str(self.folder / "log")]
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            if self._listens(self.process, starts_before):
                return self
            self.port = 0  # somebody took the port in between
        raise AssertionError(f"sshd does not start: {self._log_so_far()}")

    def _listens(self, process: subprocess.Popen[bytes], starts_before: int) -> bool:
        await_that(
            lambda: process.poll() is not None or self._log_so_far().count("Server listening") > starts_before,
            "sshd listens",
        )
        return process.poll() is None

    def _log_so_far(self) -> str:
        return self.log if (self.folder / "log").exists() else ""

    def _write_config(self) -> None:
        lines = [
            *self.options,
            f"Port {self.port}",
            "ListenAddress 127.0.0.1",
            f"HostKey {self.host_key_file}",
            f"PidFile {self.folder}/pid",
            f"AuthorizedKeysFile {self.folder}/authorized_keys",
            "StrictModes no",
            "UsePAM no",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "PermitRootLogin yes",
            "PermitUserEnvironment yes",
            "LogLevel VERBOSE",
        ]
        if not any(line.startswith("MaxStartups") for line in self.options):
            lines.append("MaxStartups 100:30:200")  # of this one sshd takes the last
        (self.folder / "config").write_text("\n".join(lines) + "\n")

    def session_pids(self) -> list[int]:
        """Every process that this sshd forked and that still lives, deepest last."""
        assert self.process is not None
        return descendants(self.process.pid)

    def kill_sessions(self) -> None:
        """As a crash would: sshd's own processes first, so that none of them can say goodbye."""
        for pid in self.session_pids():
            _kill(pid)

    def stop(self) -> None:
        if self.process is None:
            return
        left = self.session_pids()
        self.process.kill()
        self.process.wait()
        for pid in left:
            _kill(pid)
        await_that(lambda: not any(is_alive(pid) for pid in left), f"sessions of sshd end: {left}")
        self.process = None


def trust(file: Path, *servers: Sshd) -> None:
    record_host_keys(file, [(known_name("127.0.0.1", server.port), server.host_key) for server in servers])


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    for child in _children(pid):
        found += [child, *descendants(child)]
    return found


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
