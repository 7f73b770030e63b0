"""The holder: starts supervisors where an engine ends everything that a connection started, with the connection.

One for each node of an allocation. The engine starts it by the text of this file, which imports nothing of ours. It
listens on a Unix socket of its user, on a local disk. A request has the descriptors of the new process, a reply their
numbers in it. Connections run their commands here too, by `relay`: the holder so knows whether a controller is there.
The agent of the first connection is started in advance (`Warm`).
SIGUSR1 and SIGTERM say that the allocation ends: every supervisor gets a SIGTERM, and its ranks time to save.
Without supervisors and connections it ends, and with it the allocation: the job is over, and its controller is gone.
"""

from __future__ import annotations

import glob
import json
import os
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Sequence

REAP_S = 1.0
WAIT_S = 20.0
"""Seconds that the agent waits for the holder of a new allocation."""
IDLE_S = 600.0
IDLE_VARIABLE = "ASCENDRUN_HOLDER_IDLE_S"
"""Where it is set, seconds in place of IDLE_S: how long an allocation is kept without supervisors and connections."""
PROGRAM = ".py"
_FDS = 250
_LENGTH = struct.Struct("!I")
_FD = struct.Struct("i")


def socket_path(name: str) -> str:
    return "/tmp/ascendrun-hold-%d/%s" % (os.getuid(), name)


class Child:
    """A process of the holder. `relay`: of a connection, gets its exit code; None: it is a supervisor."""

    def __init__(self, process: subprocess.Popen[bytes], relay: socket.socket | None) -> None:
        self.process, self.relay = process, relay

    def has_ended(self) -> bool:
        status = self.process.poll()
        if status is None:
            return False
        if self.relay is not None:
            try:
                send(self.relay, {"status": status if status >= 0 else 128 - status}, [])
            except OSError:
                pass  # the step of the connection has ended
        return True


class Warm:
    """An agent that has imported its modules, and waits for the connection that it is for. `archive`: the name of its
    file without the suffix, "": none could be started, or it was given away."""

    def __init__(self, root: str) -> None:
        self.archive = ""
        self._process: subprocess.Popen[bytes]
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                path = max(glob.glob(os.path.join(root, "agent-*.pyz")), key=os.path.getmtime)[: -len(".pyz")]
                with open("%s.%s.python" % (path, os.uname().nodename)) as file:  # it ran on this node
                    argv = [file.read().strip(), "-I", "-S", path + ".pyz", "warm", "serve"]
                self._process = subprocess.Popen(argv, stdin=theirs.fileno(), start_new_session=True, cwd="/")
                self.archive = os.path.basename(path)
            except (OSError, ValueError):
                pass  # the first connection starts the agent

    def take(self, request: dict[str, Any], fds: Sequence[int]) -> subprocess.Popen[bytes] | None:
        """Return the agent, as the process of a request; None: it is not the one that is requested."""
        is_fit = self.archive and request.get("is_relay") and self.archive in request["argv"][-1]
        if not is_fit or self._process.poll() is not None:
            return None
        send(self._socket, {"env": request["env"]}, fds)
        self.close()
        return self._process

    def close(self) -> None:
        """Let it go: without a connection it ends."""
        self.archive = ""
        self._socket.close()


def become_connected() -> None:
    """Wait as the process of a `Warm` for the connection, and take its descriptors and environment; else exit."""
    with socket.socket(fileno=os.dup(0)) as connection:
        if not connection.recv(1, socket.MSG_PEEK):
            sys.exit(0)
        request, fds = receive(connection)
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.environb.clear()
    os.environb.update({os.fsencode(key): os.fsencode(value) for key, value in request["env"].items()})


def main(source: str, name: str, idle_s: str) -> int:
    """Serve until the allocation ends, or nothing has run here for `idle_s`. `source`: this file, for `relay`."""
    path = socket_path(name)
    make_private(os.path.dirname(path))
    children: list[Child] = []
    ends: list[int] = []

    def end(number: int, _frame: object) -> None:
        ends.append(number)
        for child in children:
            if child.relay is None or number == signal.SIGTERM:
                child.process.terminate()

    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    for number, handler in ((signal.SIGUSR1, end), (signal.SIGTERM, end), (signal.SIGCHLD, lambda *_: None)):
        signal.signal(number, handler)
    with socket.socket(socket.AF_UNIX) as server:
        if os.path.lexists(path):
            os.unlink(path)
        server.bind(path)
        server.listen(16)
        write_program(path, source)
        warm = Warm(os.environ.get("ASCENDRUN_NODE_ROOT") or os.path.join(os.path.expanduser("~"), ".ascendrun"))
        busy_mono = time.monotonic()
        try:
            while True:
                supervises = any(child.relay is None for child in children)
                is_idle = not children and time.monotonic() - busy_mono >= float(idle_s)
                if is_idle or (signal.SIGTERM in ends and not supervises):  # connections end with it, and come again
                    break
                ready = select.select([server.fileno(), woken], [], [], REAP_S)[0]
                if woken in ready:
                    os.read(woken, 4096)
                if server.fileno() in ready:
                    accept(server, children, warm)
                children[:] = [child for child in children if not child.has_ended()]
                busy_mono = time.monotonic() if children else busy_mono
        finally:
            warm.close()
            os.unlink(path)
            os.unlink(path + PROGRAM)
    return 0


def write_program(path: str, source: str) -> None:
    """Store the program of the relays; its first line is the interpreter, which runs it."""
    with open(os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write("#%s\n%s" % (sys.executable, source))
    os.replace(path + ".new", path + PROGRAM)


def accept(server: socket.socket, children: list[Child], warm: Warm) -> None:
    """Serve one request. Its connection is open as long as a child has it."""
    connection = server.accept()[0]
    connection.settimeout(WAIT_S)
    try:
        children.append(serve(connection, warm))
    except (OSError, ValueError, KeyError) as error:
        print("holder: %s" % error, file=sys.stderr, flush=True)


def serve(connection: socket.socket, warm: Warm | None = None) -> Child:
    """Start one process as a request asks, and reply its pid and the numbers that its other descriptors have in it."""
    request, fds = receive(connection)
    env = request["env"]
    try:
        ready = None if warm is None else warm.take(request, fds)
        child = ready or subprocess.Popen(
            request["argv"],
            stdin=fds[0],
            stdout=fds[1],
            stderr=fds[2],
            env=None if env is None else {os.fsencode(key): os.fsencode(value) for key, value in env.items()},
            cwd="/",
            start_new_session=True,
            pass_fds=fds[3:],
        )
    finally:
        for fd in fds:
            os.close(fd)
    send(connection, {"pid": child.pid, "fds": fds[3:]}, [])
    return Child(child, connection if request.get("is_relay") else None)


def relay(name: str, command: str) -> int:
    """Let the holder run the command of a connection, with the descriptors of this process; return its exit code."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(socket_path(name))
        argv = ["/bin/sh", "-c", command]
        send(connection, {"argv": argv, "env": dict(os.environ), "is_relay": True}, [0, 1, 2])
        receive(connection)
        for fd in (0, 1):  # their ends are those of the command
            os.close(fd)
        return int(receive(connection)[0]["status"])


def spawn(name: str, argv: Sequence[str], env: dict[bytes, bytes] | None, fds: Sequence[int]) -> dict[str, Any]:
    """Let the holder start a process. `env` None: that of the holder. `fds`: its input, output and error output, and
    others. Return its `pid`, and the numbers of the others in it, `fds`. Raises OSError."""
    path = socket_path(name)
    make_private(os.path.dirname(path))
    until = time.monotonic() + WAIT_S
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(WAIT_S)
        while True:
            try:
                connection.connect(path)
                break
            except (FileNotFoundError, ConnectionRefusedError):  # it is being started
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)
        texts = None if env is None else {os.fsdecode(key): os.fsdecode(value) for key, value in env.items()}
        send(connection, {"argv": list(argv), "env": texts}, fds)
        return receive(connection)[0]


def make_private(folder: str) -> None:
    """Make a directory that only this user can enter. Raises PermissionError if another user made it."""
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        found = os.lstat(folder)
        if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077:
            raise PermissionError("%s is not a private directory of this user" % folder) from None


def send(connection: socket.socket, values: dict[str, Any], fds: Sequence[int]) -> None:
    data = json.dumps(values).encode("ascii")
    packed = b"".join(_FD.pack(fd) for fd in fds)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)] if fds else []
    connection.sendmsg([_LENGTH.pack(len(data))], ancillary)
    connection.sendall(data)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return a message and its descriptors. Raises OSError, ValueError."""
    head, ancillary, _, _ = connection.recvmsg(_LENGTH.size, socket.CMSG_SPACE(_FDS * _FD.size))
    fds = [fd for _, _, packed in ancillary for (fd,) in _FD.iter_unpack(packed[: len(packed) // 4 * 4])]
    if len(head) < _LENGTH.size:
        raise ConnectionResetError("the other side ended")
    data, size = b"", _LENGTH.unpack(head)[0]
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionResetError("the other side ended")
        data += more
    return json.loads(data.decode("ascii")), fds


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) if len(sys.argv) > 3 else relay(*sys.argv[1:]))
