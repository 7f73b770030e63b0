"""A file system over a folder of a host that fails on demand: errors, silence, calls that never come back."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascendrun.core.errors import AscendrunError
from tests.lib.vcluster.fuse_server import DEVICE, ERRORS, LARGEST_ORDER, ROOT_FD
from tests.lib.vcluster.processes import await_true, start_time
from tests.lib.vcluster.requirements import NotSupportedError

_CODE = str(Path(__file__).resolve().parents[3])
_SERVER = f"import sys; sys.path.insert(0, {_CODE!r}); from tests.lib.vcluster import fuse_server as it; it.main()"
_DEADLINE_S = 20.0


class FaultFsError(AscendrunError):
    """A faulty file system could not be mounted, or does not answer any more."""

    code = "vcluster-faultfs"


@dataclass(frozen=True)
class FaultFs:
    """The faulty file system over `folder` of a host. `pid`: of the process that serves it."""

    folder: str
    address: str
    pid: int

    @property
    def below(self) -> Path:
        """The folder itself, past every fault: for a look that must not get stuck."""
        return Path(f"/proc/{self.pid}/fd/{ROOT_FD}")

    def fail(self, error: str, seconds: float | None = None) -> None:
        """Every call gets `error` (of ERRORS) that could get it on a real disk; None: until `heal`."""
        if error not in ERRORS:
            raise ValueError(f"{error}: unknown error; expected one of {', '.join(ERRORS)}")
        self._order(fault=error, seconds=seconds)

    def hang(self, seconds: float | None = None) -> None:
        """No call returns; SIGKILL ends who waits, as on a hard NFS mount."""
        self._order(fault="hang", seconds=seconds)

    def stick(self, seconds: float | None = None, *, only: str = "") -> None:
        """No call returns; who waits cannot be killed, and is in state D from the first signal on. `only`: "fsync"
        sticks, everything else is served."""
        self._order(fault=f"stick-{only}" if only else "stick", seconds=seconds)

    def heal(self) -> None:
        """No fault; each call that waited is answered."""
        self._order(fault="", seconds=None)

    def status(self) -> dict[str, Any]:
        """`fault`: its name, "" for none; `served`: requests so far; `stuck`: calls that wait because of `stick`."""
        return self._order()

    def end(self) -> None:
        """Unmount; each call that waits gets an error. The process is killed where it does not answer."""
        started = start_time(self.pid)
        try:
            self._order(end=True)
        except FaultFsError:
            _kill(self.pid)
        if not await_true(lambda: start_time(self.pid) != started or started is None, deadline_s=_DEADLINE_S):
            _kill(self.pid)

    def _order(self, **order: Any) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(_DEADLINE_S)
            try:
                peer.connect(f"\0{self.address}")
                peer.sendall(json.dumps(order).encode())
                answer = peer.recv(LARGEST_ORDER)
            except OSError as error:
                raise FaultFsError(f"{self.folder}: its file system does not answer: {error.strerror}") from error
        if not answer:
            raise FaultFsError(f"{self.folder}: its file system has ended")
        result: dict[str, Any] = json.loads(answer)
        return result


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def serve(init_pid: int, folder: str, address: str, log: Path, *, kind: str) -> subprocess.Popen[bytes]:
    """Mount a faulty file system over `folder` of the host with this init; returns once it is there.

    `log`: gets the last words of its process. `kind`: its type in /proc/mounts. Raises NotSupportedError where the
    kernel has no FUSE.
    """
    if not os.path.exists(DEVICE):
        raise NotSupportedError(f"a faulty file system requires {DEVICE}", hint="modprobe fuse, on the machine itself")
    argv = [sys.executable, "-I", "-S", "-c", _SERVER, str(init_pid), folder, address, kind]
    with open(log, "ab") as words:
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=words, start_new_session=True
        )
    assert child.stdout is not None
    with child.stdout:
        if child.stdout.read() != b"!":
            child.wait()
            raise FaultFsError(f"{folder}: no faulty file system: {log.read_text().strip()}")
    return child
