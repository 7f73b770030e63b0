"""The `standby` block of settings files: the two machines of a head, and the hosts that vote which of them acts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Optional, Tuple

from pydantic import Field

from ascendrun.core.dataclass import dataclass
from ascendrun.core.errors import ConflictError, E, InvalidInputError, Problem
from ascendrun.core.hosts import Host
from ascendrun.core.reader.model_reader import read_model
from ascendrun.core.reader.strict import Strict, Texts
from ascendrun.core.reader.yaml_source import place_of, texts
from ascendrun.core.settings import STANDBY_BLOCK, Settings, SettingsBlocks
from ascendrun.text import Text

ReadHosts = Callable[[Path], Tuple[Host, ...]]
LEASE_S = (5.0, 300.0)
"""Least and most seconds of a lease; the most is equal to LONGEST_S of node/agent/terms.py."""


@dataclass(frozen=True)
class Standby:
    """A head on two machines, `heads` as ssh knows them; the one with the lease of most `voters` acts. `file`: of the
    block."""

    heads: tuple[str, str]
    voters: tuple[Host, ...]
    lease_s: float
    file: str = ""

    @property
    def majority(self) -> int:
        return len(self.voters) // 2 + 1

    def require_voters(self, known: Sequence[str]) -> None:
        """Raise ConflictError if the term was granted by other voters, `known` (empty: not recorded): a majority of
        these and one of those may have no host in common."""
        names = [host.name for host in self.voters]
        if known and set(known) != set(names):
            raise ConflictError.of(
                "standby.other-voters",
                "expected voters {known}, got {voters}: the voters of a head are fixed while it has a standby",
                "restore `voters` in {file}, or change them as docs/standby.md shows",
                known=list(known),
                voters=names,
                file=self.file,
            )


class StandbyModel(Texts):
    """The two machines of a head, and its voters."""

    heads: Tuple[str, str] = Field(examples=[["user@head1", "user@head2"]])
    voters: Tuple[str, ...] = Field(min_length=3, examples=[["npu01", "npu02", "npu03"]])
    hostfile: str = Field(examples=["~/cluster.hosts"])
    lease_s: Annotated[float, Field(ge=LEASE_S[0], le=LEASE_S[1])] = 20.0


class Blocks(Strict):
    standby: Optional[StandbyModel] = Field(None, examples=[{"heads": ["user@head1", "user@head2"]}])


def not_set(kind: type[E]) -> E:
    """Return the error of a request that requires a standby."""
    return kind.of(
        "standby.not-set",
        "the settings have no standby",
        "write the block `standby` into the settings of both machines: docs/standby.md",
    )


def read_standby(settings: Settings, read_hosts: ReadHosts) -> Standby | None:
    """Return the block of the strongest file that has one; None: this head has no standby. `read_hosts`: of a hostfile,
    raises InvalidInputError. Raises InvalidInputError with every problem of every file."""
    return settings.strongest(lambda blocks, problems: parse_standby(blocks, problems, read_hosts))


def parse_standby(blocks: SettingsBlocks, problems: list[Problem], read_hosts: ReadHosts) -> Standby | None:
    """Return the block of one settings file; None when it has none, or problems, which are added to `problems`."""
    node, found = blocks.root.entries.get(STANDBY_BLOCK), list[Problem]()
    model = (
        None if node is None else read_model(Blocks, {STANDBY_BLOCK: texts(node)}, blocks.root, blocks.source, found)
    )
    block = None if model is None else model.standby
    if block is None:
        problems += [replace(one, is_private=True) for one in found]
        return None

    def refuse(name: str, message: Text, hint: Text) -> None:
        found.append(place_of(blocks.root, (STANDBY_BLOCK, name)).problem(message, hint))

    hosts: dict[str, Host] = {}
    try:
        hosts = {host.name: host for host in read_hosts(blocks.file.parent / Path(block.hostfile).expanduser())}
    except InvalidInputError as error:
        problems += error.problems
    else:
        unknown = [name for name in block.voters if name not in hosts]
        if unknown:
            message = Text("standby.unknown", "{voters}: not in {file}", voters=unknown, file=block.hostfile)
            refuse("voters", message, Text("standby.unknown.hint", "name hosts of the hostfile"))
    if len(set(block.voters)) % 2 == 0 or len(set(block.voters)) != len(block.voters):
        message = Text(
            "standby.voters",
            "expected 3, 5 or another uneven number of different hosts, got {count}",
            count=len(block.voters),
        )
        refuse("voters", message, Text("standby.voters.hint", "name 3 or 5 hosts: most of them must respond"))
    if block.heads[0] == block.heads[1]:
        message = Text("standby.heads", "expected two machines, got {head} twice", head=block.heads[0])
        refuse("heads", message, Text("standby.heads.hint", "name the machine of the head and the one of its standby"))
    problems += [replace(one, is_private=True) for one in found]
    if found or not hosts:
        return None
    return Standby(block.heads, tuple(hosts[name] for name in block.voters), block.lease_s, str(blocks.file))
