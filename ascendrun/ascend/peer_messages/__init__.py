"""Lines of HCCL, NCCL, gloo and torch about other ranks: which rank is reported, waited for or lost.

read_messages("... Connection closed by peer [10.0.0.3]:41022")    a "lost" message about 10.0.0.3
"""

from __future__ import annotations

from collections.abc import Iterator

from ascendrun.ascend.peer_messages import hccl, torch_groups
from ascendrun.ascend.peer_messages.message import CONNECT, EXEC, LOST, Addresses, PeerMessage

__all__ = ["CONNECT", "EXEC", "LOST", "Addresses", "PeerMessage", "read_messages"]


def read_messages(text: str) -> Iterator[PeerMessage]:
    """Yield the messages of a line, HCCL's first; usually there is none or one."""
    yield from hccl.TABLE.read(text)
    yield from torch_groups.TABLE.read(text)
