"""A connection to a port of this node, or of the container that this runs in, over stdin and stdout."""

from __future__ import annotations

import os
import socket
import sys
import threading

CHUNK_BYTES = 1 << 16
EXIT_REFUSED = 76


def relay(port: int) -> int:
    """Copy bytes both ways until the program behind the port closes, then end this process; return EXIT_REFUSED if
    nothing listens."""
    try:
        connection = socket.create_connection(("localhost", port), timeout=10.0)
    except OSError as error:
        sys.stderr.write("ascendrun: port %d: %s\n" % (port, error.strerror or error))
        return EXIT_REFUSED
    connection.settimeout(None)
    threading.Thread(target=_send, args=(connection,), daemon=True).start()
    try:
        while True:
            data = memoryview(connection.recv(CHUNK_BYTES))
            if not data:
                break
            while data:
                data = data[os.write(1, data) :]
    except OSError:
        pass  # one end is gone: so is the other one's connection
    os._exit(0)  # the thread may still wait for input


def _send(connection: socket.socket) -> None:
    try:
        while True:
            data = os.read(0, CHUNK_BYTES)
            if not data:
                break
            connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # the program behind the port closed
