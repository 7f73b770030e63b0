"""The messages that an agent sends without a request: its first one, and the data of files."""

from __future__ import annotations

from collections.abc import Mapping

from ascendrun.core.dataclass import dataclass
from ascendrun.head.protocol.messages import Message, converted


@dataclass(frozen=True)
class AgentInfo(Message, op="hello"):
    """The first event of an agent. Its `protocol` is checked before the rest is read.

    `machine_key`, `incarnation`: of the machine, and of its directory in `root` (node/agent/serve.py).
    `net_ns`: its network namespace. `neighbours`: keys of other machines that use `root`. `live`: tags of attempts that
    were prepared and have not ended.
    """

    root: str
    hostname: str
    boot_id: str
    user: str
    python: str
    python_version: str
    kernel: str
    arch: str
    cpus: int = converted(int)
    machine_id: str | None = None
    memory_bytes: int | None = None
    uid: int | None = None
    machine_key: str | None = None
    incarnation: str | None = None
    net_ns: int | None = None
    neighbours: tuple[str, ...] | None = converted(tuple, default=None)
    live: tuple[str, ...] | None = converted(tuple, default=None)


@dataclass(frozen=True)
class FileData(Message, op="data"):
    """Data of a followed file: the body."""

    tag: str
    file: str
    generation: int = converted(int)
    offset: int = converted(int)


@dataclass(frozen=True)
class FileTruncated(Message, op="truncated"):
    """A followed file became smaller than the part that was sent."""

    tag: str
    file: str
    generation: int
    size: int


@dataclass(frozen=True)
class FileUnreadable(Message, op="follow_held"):
    """A followed file, or with the file "events" the attempt's folder, cannot be read now; it is sent when it can."""

    tag: str
    file: str
    generation: int
    error: str


@dataclass(frozen=True)
class FileLimited(Message, op="follow_limited"):
    """A followed file is larger than its limit; only its start is sent."""

    tag: str
    file: str
    generation: int
    size: int
    limit: int


@dataclass(frozen=True)
class ArtifactData(Message, op="gathered"):
    """Data of a file that Gather found: the body."""

    tag: str
    name: str
    file: str
    offset: int = converted(int)


EVENTS: Mapping[str, type[Message]] = {
    kind.OP: kind for kind in (AgentInfo, FileData, FileTruncated, FileUnreadable, FileLimited, ArtifactData)
}
