"""A file that this node receives, passed on to other nodes while it arrives, so that the head sends few copies.

    offer  {put, identity}                  -> {port}: other nodes may read there what has arrived
    take   {put, identity, addresses, port, seconds} -> {have, done, is_met}: as for `put`, with bytes of another node's
                                               offer, for at most `seconds`; is_met: it accepted a connection

`put`: the request put_tree or put_file for it, of a file with its hash.

Both ends prove with TLS that they have the `identity`, a key and its certificate, which the head made for these
transfers and sends over ssh only. The reader sends the offset from which it lacks bytes, and gets them, also those that
arrive later. A file has its place only after its hash was verified, so that a damaged offer costs nothing but time.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time

from ascendrun.node.agent import transfer
from ascendrun.node.agent.network import listen_on
from ascendrun.node.files import BLOCK_BYTES, write_all
from ascendrun.node.op_errors import OperationError, os_failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl
    from typing import Any, Callable, Iterator, Sequence

IDLE_S = 30.0
"""An offer without a reader closes."""
STALL_S = 10.0
"""Of a reader or a sender that gives no sign."""
QUIET_S = 3.0
"""Without a new byte, a request to take ends: the head decides what follows."""
LOOK_S, MOST_LOOK_S = 0.02, 0.3
"""Pauses of a sender that has nothing new: the first, doubled up to the last. With hundreds of nodes on a slow way they
add up."""
_OFFSET = struct.Struct(">Q")


def tls_context(identity: str, folder: str, *, is_server: bool) -> ssl.SSLContext:
    """Return a context for one end: both ends have the same certificate, and trust this one alone. `identity`: PEM."""
    try:
        import ssl
    except ImportError as error:  # a Python that was built without OpenSSL
        raise OperationError("no-relay", "no-relay", error=str(error)) from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    path = os.path.join(folder, ".tmp-identity-%d-%s" % (os.getpid(), os.urandom(4).hex()))
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(identity)
        context.load_cert_chain(path)
        context.load_verify_locations(path)
    finally:
        os.unlink(path)
    return context


def offer(part: str, request: dict[str, Any]) -> dict[str, Any]:
    """Let other nodes read the part from now on. Raises OperationError."""
    try:
        context = tls_context(request["identity"], os.path.dirname(part), is_server=True)
        fd = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            listener = listen_on(0)
        except OSError:
            os.close(fd)
            raise
    except OSError as error:
        raise OperationError("no-relay", "no-relay", error=error.strerror or str(error)) from error
    serving = listener, context, fd, int(request["put"]["size_bytes"])
    threading.Thread(target=_serve, args=serving, name="relay", daemon=True).start()
    return {"port": listener.getsockname()[1]}


def _serve(listener: socket.socket, context: ssl.SSLContext, fd: int, size: int) -> None:
    readers: list[threading.Thread] = []
    listener.settimeout(IDLE_S)
    with listener, contextlib.suppress(OSError):
        while True:
            try:
                connection, _ = listener.accept()
            except socket.timeout:
                readers = [reader for reader in readers if reader.is_alive()]
                if not readers:
                    break
                continue
            readers.append(threading.Thread(target=_pass_on, args=(connection, context, fd, size), daemon=True))
            readers[-1].start()
    for reader in readers:
        reader.join()
    os.close(fd)


def _pass_on(plain: socket.socket, context: ssl.SSLContext, fd: int, size: int) -> None:
    """Send the bytes from the reader's offset on, as they arrive here. An error ends the connection: the reader has
    what it has."""
    with plain, contextlib.suppress(OSError):
        plain.settimeout(STALL_S)
        with context.wrap_socket(plain, server_side=True) as connection:
            (at,) = _OFFSET.unpack(_read(connection, _OFFSET.size))
            stalled_at, pause_s = time.monotonic() + STALL_S, LOOK_S
            while at < size and time.monotonic() < stalled_at:
                data = os.pread(fd, BLOCK_BYTES, at)
                if data:
                    connection.sendall(data)
                    at += len(data)
                    stalled_at, pause_s = time.monotonic() + STALL_S, LOOK_S
                else:
                    time.sleep(pause_s)
                    pause_s = min(2 * pause_s, MOST_LOOK_S)


def _read(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = connection.recv(length - len(data))
        if not more:
            raise ConnectionResetError("closed")
        data += more
    return data


def take(part: str, complete: Callable[[int], bool], request: dict[str, Any]) -> dict[str, Any]:
    """Read the part from another node for at most `seconds`, and complete it: as take_block. The reply of a node that
    could not read more has the bytes of before. Raises OperationError."""
    size, folder = int(request["put"]["size_bytes"]), os.path.dirname(part)
    is_met, ends_at = False, time.monotonic() + float(request["seconds"])
    try:
        context = tls_context(request["identity"], folder, is_server=False)
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            have = os.fstat(fd).st_size
            for data in _blocks(request["addresses"], int(request["port"]), context, have, size, ends_at):
                is_met = True
                write_all(fd, data)
                have += len(data)
        finally:
            os.close(fd)
        if have < size:
            reply = {"have": have, "done": False}
        else:
            reply = transfer.take_block(part, {"size_bytes": size, "sha256": ""}, b"", complete)
    except OSError as error:
        raise os_failure(error, "write-in", path=folder) from error
    except OperationError as error:
        if error.code != "tree-differs":
            raise
        reply = {"have": 0, "done": False}  # the part is gone: another source sends it
    return {**reply, "is_met": is_met}


def _blocks(
    addresses: Sequence[str], port: int, context: ssl.SSLContext, have: int, size: int, ends_at: float
) -> Iterator[bytes | memoryview]:
    """Yield b"" for an address that accepts a connection, then what the node sends from `have` on, until it is
    complete, the time `ends_at` comes, no byte comes for QUIET_S or the connection ends. A block is valid until the
    next one."""
    memory = memoryview(bytearray(BLOCK_BYTES))
    for address in addresses:
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=QUIET_S) as plain:
            yield b""
            with context.wrap_socket(plain) as connection:
                connection.sendall(_OFFSET.pack(have))
                while have < size and time.monotonic() < ends_at:
                    count = _receive(connection, memory[: size - have])
                    if not count:
                        return
                    have += count
                    yield memory[:count]
                return


def _receive(connection: ssl.SSLSocket, memory: memoryview) -> int:
    """Wait for bytes and read what has arrived; return how many, 0: the connection has ended. A read of TLS has 16 kB
    at most, and a write to the disk for each would cost as much as all else."""
    count = more = connection.recv_into(memory)
    while more and count < len(memory) and (connection.pending() or select.select([connection], [], [], 0)[0]):
        more = connection.recv_into(memory[count:])
        count += more
    return count
