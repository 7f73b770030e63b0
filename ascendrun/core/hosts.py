"""Hosts and the hostfile that lists them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Tuple

LOCAL_ADDRESS = "local"
"""`addr=local` in a hostfile: this very machine, reached without SSH, with a node root of its own."""


@dataclass(frozen=True)
class Host:
    """One machine as the hostfile names it.

    `slots`: how many ranks it takes, None: not said (the job's `devices.per_node` decides).
    `addr`: what to dial, None: the name (through `~/.ssh/config`); "local": this machine, no SSH.
    `devices`: the device ids that ascendrun may use there, None: all.
    `line`: its line in the hostfile, from 1; 0 when it came from elsewhere.
    """

    name: str
    slots: Optional[int] = None
    addr: Optional[str] = None
    user: Optional[str] = None
    port: Optional[int] = None
    devices: Optional[Tuple[int, ...]] = None
    groups: Tuple[str, ...] = ()
    line: int = 0

    @property
    def is_local(self) -> bool:
        return self.addr == LOCAL_ADDRESS
