"""The process that serves a faulty file system: `PID FOLDER CONTROL`, over FOLDER of the host whose init is PID.

It runs on the machine itself, in no namespace of the host, so that it is there whatever becomes of the host. When it
ends, however it ends, the kernel aborts the connection: each call that waits comes back with an error, and nothing
stays stuck. Orders come over the abstract socket CONTROL, one JSON object for each connection. Standard library only.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from tests.lib.vcluster import fuse
from tests.lib.vcluster import namespaces as ns

DEVICE = "/dev/fuse"
ERRORS = {
    "EACCES": None,
    "EIO": None,
    "ESTALE": None,
    "EROFS": fuse.CHANGING,
    "ENOSPC": fuse.GROWING,
    "EDQUOT": fuse.GROWING,
}
"""Errors, and the requests that get them; None: all that a program waits for."""
STICKS = {"stick": None, "stick-fsync": frozenset({"fsync"})}
"""Faults with requests that are taken and not answered, and which these are; None: all that a program waits for."""
ROOT_FD = 100
"""The descriptor under which the folder itself is open, for looks past every fault."""
LARGEST_ORDER = 4096
_FOREVER = float("inf")


@dataclass
class _Fault:
    """What is wrong now. `name`: of ERRORS or STICKS, "hang", or "" for nothing. `until_s`: by the monotonic clock."""

    name: str = ""
    until_s: float = _FOREVER

    def keeps(self, raw: bytes) -> bool:
        """Whether the request is not answered for now."""
        name = fuse.parse_request(raw).name if self.name in STICKS else ""
        return self.name in STICKS and name not in fuse.BOOKKEEPING and name in (STICKS[self.name] or {name})

    def reply(self, request: fuse.Request) -> bytes | None:
        """The error that the request gets instead of an answer; None: it is served."""
        hit = ERRORS.get(self.name, frozenset())
        writes = self.name == "EROFS" and fuse.opens_for_writing(request)
        if request.name in fuse.BOOKKEEPING or (hit is not None and request.name not in hit and not writes):
            return None
        return fuse.make_reply(request.unique, error=getattr(errno, self.name))


@dataclass
class _Server:
    """`device`: the mounted /dev/fuse. `stuck`: requests that were taken and not answered."""

    device: int
    control: socket.socket
    files: fuse.PassThrough
    fault: _Fault = field(default_factory=_Fault)
    stuck: list[bytes] = field(default_factory=list)
    served: int = 0

    def run(self, host: int) -> None:
        """Until it is told to end, is unmounted, or the init of the host (a pidfd) has ended."""
        poll = select.poll()
        for fd in (host, self.control.fileno()):
            poll.register(fd, select.POLLIN)
        while True:
            if time.monotonic() >= self.fault.until_s:
                self._begin(_Fault())
            if self.fault.name == "hang":
                _unregister(poll, self.device)
            else:
                poll.register(self.device, select.POLLIN)
            left_s = self.fault.until_s - time.monotonic()
            ready = {fd for fd, _ in poll.poll(None if left_s == _FOREVER else max(0.0, left_s) * 1000 + 1)}
            if host in ready or (self.control.fileno() in ready and not self._take_order()):
                return
            if self.device in ready and not self._take_request():
                return

    def _take_order(self) -> bool:
        """Carry out one order of a FaultFs; False: it was the last one."""
        with self.control.accept()[0] as peer:
            order: dict[str, Any] = json.loads(peer.recv(LARGEST_ORDER) or b"{}")
            if "fault" in order:
                seconds = order["seconds"]
                until_s = _FOREVER if seconds is None else time.monotonic() + seconds
                self._begin(_Fault(order["fault"], until_s))
            status = {"fault": self.fault.name, "served": self.served, "stuck": len(self.stuck)}
            peer.sendall(json.dumps(status).encode())
            return "end" not in order

    def _begin(self, fault: _Fault) -> None:
        """From now on `fault`; what stuck so far is answered, as a server does that has come back."""
        self.fault = fault
        if fault.name not in STICKS:
            stuck, self.stuck = self.stuck, []
            for raw in stuck:
                self._answer(raw)

    def _take_request(self) -> bool:
        """Serve one request; False: the file system is not mounted any more."""
        try:
            raw = os.read(self.device, fuse.READ_SIZE)
        except OSError as error:
            return error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN)
        if self.fault.keeps(raw):
            self.stuck.append(raw)
        else:
            self._answer(raw)
        return True

    def _answer(self, raw: bytes) -> None:
        request = fuse.parse_request(raw)
        self.served += 1
        reply = self.fault.reply(request) or self.files.serve(request)
        try:
            if reply is not None:
                os.write(self.device, reply)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EINVAL, errno.ENODEV):  # whoever asked is gone
                raise


def _unregister(poll: select.poll, fd: int) -> None:
    try:
        poll.unregister(fd)
    except KeyError:
        return


def main() -> None:
    """Print "!" when it is mounted. Ends by an order, when the host has ended, or with its connection."""
    pid, folder, address, kind = int(sys.argv[1]), *sys.argv[2:5]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    os.umask(0)
    control = socket.socket(socket.AF_UNIX)
    control.bind(f"\0{address}")
    control.listen(8)
    host = os.pidfd_open(pid)
    own, theirs = (os.open(f"/proc/{which}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC) for which in ("self", pid))
    device = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    ns.join_opened(theirs)
    os.dup2(os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC), ROOT_FD, inheritable=False)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
    ns.mount("vcluster-fault", folder, kind, ns.MS_NOSUID | ns.MS_NODEV, options)
    ns.join_opened(own)
    os.write(1, b"!")
    os.close(1)
    try:
        _Server(device, control, fuse.PassThrough(ROOT_FD)).run(host)
    finally:
        ns.join_opened(theirs)
        ns.unmount(folder)


if __name__ == "__main__":
    main()
