"""Whether processes of this node are connected to each other or to another host by TCP: the ranks of one training are.

A process group keeps its connection to the store on MASTER_PORT for as long as it lives, and Gloo, NCCL and HCCL keep
their own. Services have ports below 1024, or are reached on this host by processes that are no ranks.
"""

from __future__ import annotations

from ascendrun.node import procs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterable

TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
TABLE_BYTES = 8 << 20
ESTABLISHED = "01"
SERVICE_PORTS = 1024


def is_connected(first: Iterable[int], others: Iterable[int]) -> bool | None:
    """Return whether processes `first` (pids) are connected to one of `others` or to another host; None: their sockets
    or the tables of the kernel cannot be read."""
    rows = read_table()
    own, theirs = sockets_of(first), sockets_of(others)
    if not rows or own is None or theirs is None:
        return None
    local = {address for address, _, _ in rows}
    ends = {(address, peer) for address, peer, inode in rows if inode in theirs}
    for address, peer, inode in rows:
        if inode not in own or min(port_of(address), port_of(peer)) < SERVICE_PORTS:
            continue
        if (peer, address) in ends or not is_here(peer, local):
            return True
    return False


def read_table() -> list[tuple[str, str, str]]:
    """Return (local address, address of the peer, inode) of each connection, addresses as the kernel has them."""
    rows = []
    for path in TABLES:
        for line in procs.read_text(path, TABLE_BYTES).splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == ESTABLISHED:
                rows.append((plain(fields[1]), plain(fields[2]), fields[9]))
    return rows


def sockets_of(pids: Iterable[int]) -> set[str] | None:
    """Return the inodes of the sockets of processes; None: their files cannot be read."""
    files = [target for pid in pids for target in procs.open_files(pid)]
    return {target[8:-1] for target in files if target.startswith("socket:[")} if files else None


def plain(address: str) -> str:
    """Return an IPv4 address that a socket of IPv6 uses as one of IPv4."""
    mapped = "0000000000000000FFFF0000"
    return address[len(mapped) :] if address.startswith(mapped) else address


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


def is_here(peer: str, local: set[str]) -> bool:
    """Whether the address is one of this host: a loopback address, or the other end of the connection is here too."""
    return peer in local or peer[6:8] == "7F" or peer.startswith("0" * 24 + "01000000:")
