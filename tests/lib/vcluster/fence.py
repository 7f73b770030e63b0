"""A fence agent for virtual hosts, with the options, standard input and exit codes of the fence-agents family.

fence.py --ip=SOCKET --plug=HOST --action=off|status: asks the `Bmc` that listens on SOCKET. Without
options it reads them from standard input, a `name=value` on each line.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

OK, FAILED, OFF = 0, 1, 2


class Bmc:
    """The management controllers of the hosts of a cluster; runs in the process that has the cluster.

    `answer(host, action)` may replace an answer: an exit code, or None for the true one. `asked`: every question.
    """

    def __init__(self, cluster: Any, path: Path) -> None:
        self.cluster, self.path = cluster, path
        self.answer: Callable[[str, str], int | None] = lambda host, action: None
        self.asked: list[tuple[str, str]] = []
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(path))
        self._server.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def settings(self, timeout_s: float) -> dict[str, Any]:
        """The block of the settings that uses it, for hosts with `bmc=HOST` and whatever follows a dot."""
        command = [sys.executable, "-I", __file__, f"--ip={self.path}", "--plug={bmc}"]
        return {"power": {"command": command, "timeout_s": timeout_s}}

    def close(self) -> None:
        self._server.close()

    def _serve(self) -> None:
        while True:
            try:
                peer = self._server.accept()[0]
            except OSError:
                return
            threading.Thread(target=self._handle, args=(peer,), daemon=True).start()

    def _handle(self, peer: socket.socket) -> None:
        with peer:
            plug, action = peer.recv(1000).decode().split()
            host = plug.partition(".")[0]
            self.asked.append((host, action))
            code = self.answer(host, action)
            if code is None and action == "off" and self.cluster.is_up(host):
                self.cluster.kill(host)
            if code is None:
                code = OFF if action == "status" and not self.cluster.is_up(host) else OK
            with suppress(OSError):  # the agent was killed meanwhile
                peer.sendall(str(code).encode())


def main() -> int:
    lines = sys.argv[1:] or [f"--{line.strip()}" for line in sys.stdin if "=" in line and not line.startswith("#")]
    options = dict(line[2:].split("=", 1) for line in lines)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.connect(options["ip"])
            peer.sendall(f"{options['plug']} {options['action']}".encode())
            code = int(peer.recv(10))
    except (KeyError, OSError, ValueError) as error:
        print(f"Failed: {error!r}", file=sys.stderr)
        return FAILED
    print({OK: "Success", OFF: "Status: OFF"}.get(code, "Failed: Timed out waiting to power OFF"))
    return code


if __name__ == "__main__":
    sys.exit(main())
