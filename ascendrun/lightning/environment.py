"""Ranks and addresses of a launched process, as a cluster environment of Lightning."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ascendrun.lightning.package import part
from ascendrun.programs.errors import InvalidDataError
from ascendrun.text import Text

Base: Any = part("plugins.environments.ClusterEnvironment")
NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")


def is_launched(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a launcher started this process as one of several ranks, or as the only one."""
    return "RANK" in environ and "WORLD_SIZE" in environ


class LaunchedEnvironment(Base):  # type: ignore[misc]
    """Ranks from RANK, LOCAL_RANK, NODE_RANK (torchrun: GROUP_RANK) and WORLD_SIZE. The global rank is RANK: neither
    the local rank nor a product of counts, so hosts may have different numbers of ranks."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self.environ = dict(os.environ if environ is None else environ)
        self.check()

    def check(self) -> None:
        """Raise InvalidDataError with all variables that are missing, or not numbers, or contradict each other."""
        own = self.environ
        wanted = [*NUMBERS, "MASTER_ADDR"] if own.get("WORLD_SIZE") != "1" else ["RANK", "WORLD_SIZE"]
        problems = [
            Text("lightning.variable-missing", "{name} is not set", name=name) for name in wanted if not own.get(name)
        ]
        problems += [
            Text(
                "lightning.variable-number", "{name}: expected a number, got {value:quote}", name=name, value=own[name]
            )
            for name in NUMBERS
            if own.get(name) and not own[name].isdigit()
        ]
        if not problems and self.global_rank() >= self.world_size():
            rank, world = self.global_rank(), self.world_size()
            problems.append(
                Text("lightning.rank-range", "RANK {rank} must be below WORLD_SIZE {world}", rank=rank, world=world)
            )
        if problems:
            raise InvalidDataError.of(problems)

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return self.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        return int(self.environ.get("MASTER_PORT", "0"))

    @staticmethod
    def detect() -> bool:
        return is_launched()

    def world_size(self) -> int:
        return int(self.environ["WORLD_SIZE"])

    def set_world_size(self, size: int) -> None:
        """No effect: Lightning passes the product of counts, which is wrong where hosts have different ones."""

    def global_rank(self) -> int:
        return int(self.environ["RANK"])

    def set_global_rank(self, rank: int) -> None:
        """No effect, as for `set_world_size`."""

    def local_rank(self) -> int:
        return int(self.environ.get("LOCAL_RANK", "0"))

    def node_rank(self) -> int:
        return int(self.environ.get("NODE_RANK", self.environ.get("GROUP_RANK", "0")))

    def local_world_size(self) -> int:
        """Return the number of ranks of this host; all of them if the launcher does not set it."""
        return int(self.environ.get("LOCAL_WORLD_SIZE", self.environ["WORLD_SIZE"]))

    def nodes(self) -> int:
        """Return the number of hosts. Strategies use it for messages only."""
        return int(self.environ.get("GROUP_WORLD_SIZE", 0)) or max(1, self.world_size() // self.local_world_size())
