"""port: ports of this machine that lead to ports of a rank's host."""

from __future__ import annotations

import re
import selectors
import socket
import subprocess
from contextlib import ExitStack, suppress
from typing import cast

import click

from ascendrun.cli.context import CliContext
from ascendrun.cli.listening import LOOPBACK, is_loopback, is_of_this_user, listen
from ascendrun.cli.options import Parsed, cli_command
from ascendrun.core.errors import AscendrunError
from ascendrun.text import Text

PORTS = re.compile(r"(?:(?P<local>\d{1,5}):)?(?P<remote>\d{1,5})", re.ASCII)
ENDS_S = 5.0
"""Seconds that a connection has to end with the command."""


@cli_command("port")
@click.argument("job")
@click.argument("ports", nargs=-1, required=True, type=Parsed("[LOCAL:]PORT", lambda text: read_ports(text)))
@click.option("--rank", type=click.IntRange(min=0), default=0, metavar="N", help="Rank.  [default: 0]")
@click.option("--address", default=LOOPBACK, metavar="IP", help=f"Local address.  [default: {LOOPBACK}]")
def command(ctx: CliContext, job: str, ports: tuple[tuple[int, int], ...], rank: int, address: str) -> None:
    """Make ports of a running rank's host reachable on this machine: TensorBoard, notebooks, debuggers.

    PORT is that of a program on the host, or in the container, which may listen on localhost only. LOCAL is the port
    here, by default the same; 0 chooses a free one. Each connection finds the present host of the rank, also after a
    restart. It needs no open port on the node. On a loopback address, which is the default, connections of other users
    of this machine are closed. ^C ends it. Exit code 4: the job has no such rank; 5: its
    host is unreachable; 7: the rank does not run.

    Examples:
    ascendrun port j-0001 6006
    ascendrun port j-0001 --rank 3 8000:8888 0:5678
    """
    for _, remote in ports:
        ctx.cluster.files.connection(job, rank, remote)  # refuses a job or rank that does not run
    with ExitStack() as open_, selectors.DefaultSelector() as selector, suppress(KeyboardInterrupt):
        for local, remote in ports:
            listener = open_.enter_context(listen(address, local, instead=f"0:{remote}"))
            selector.register(listener, selectors.EVENT_READ, remote)
            ctx.say(
                "port.ready",
                "{local} leads to port {port} on the host of rank {rank} of {job}; ^C ends it",
                local="{}:{}".format(*listener.getsockname()[:2]),
                port=remote,
                rank=rank,
                job=job,
            )
        connections: list[subprocess.Popen[bytes]] = []
        open_.callback(_end, connections)
        while True:
            for key, _ in selector.select():
                with cast(socket.socket, key.fileobj).accept()[0] as accepted:
                    if is_loopback(address) and not is_of_this_user(accepted):
                        continue
                    try:
                        argv = ctx.cluster.files.connection(job, rank, key.data)
                    except AscendrunError as error:  # the rank has ended, and may start again
                        ctx.error(error.message, error.hint)
                        continue
                    connections[:] = [one for one in connections if one.poll() is None]
                    connections.append(subprocess.Popen(argv, stdin=accepted.fileno(), stdout=accepted.fileno()))


def read_ports(text: str) -> tuple[int, int]:
    """Return the local and the remote port of 6006 or 8000:8888. Raises ValueError."""
    found = PORTS.fullmatch(text)
    local, remote = (int(found["local"] or found["remote"]), int(found["remote"])) if found else (-1, -1)
    if not (0 <= local < 1 << 16 and 0 < remote < 1 << 16):
        raise ValueError(str(Text("port.invalid", "expected PORT or LOCAL:PORT, got {value:quote}", value=text)))
    return local, remote


def _end(connections: list[subprocess.Popen[bytes]]) -> None:
    for process in connections:
        process.terminate()
    for process in connections:
        try:
            process.wait(ENDS_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
