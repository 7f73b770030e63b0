"""The messages about files of a node: requests to list, read and write them, and what an agent sends without one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ascendrun.head.protocol.agent_messages import AgentInfo, Sizes
from ascendrun.head.protocol.messages import Message, Request, converted


class OutputsReply(Message):
    """Reply to Outputs. `files`: (path, bytes, mtime_ns, bytes that are stored) by path; `links`: (path, text);
    `refused`: links that are not copied; `missing`: patterns without a file; `folder`: the working directory."""

    folder: str
    files: tuple[tuple[str, int, int, int], ...] = converted(
        lambda rows: tuple((str(row[0]), int(row[1]), int(row[2]), int(row[3])) for row in rows)
    )
    missing: tuple[str, ...] = converted(tuple)
    links: tuple[tuple[str, str], ...] = converted(lambda rows: tuple((str(p), str(t)) for p, t in rows), default=())
    refused: tuple[str, ...] = converted(tuple, default=())


class Outputs(Request[OutputsReply], op="outputs"):
    """List the files that match patterns; see node/agent/transfer.py. `run`: whose working directory they are in; None:
    the user's home directory."""

    run: str | None
    patterns: Sequence[str]


class ReadOutputReply(Message):
    """Reply to ReadOutput: the body or the length of a hole, and `size_bytes` and `mtime_ns` of the file after the
    read; or its hash."""

    size_bytes: int = 0
    mtime_ns: int = 0
    hole_bytes: int = 0
    sha256: str | None = None


class ReadOutput(Request[ReadOutputReply], op="read_output"):
    """Read a block of a file that Outputs listed; `offset` None: its hash. See node/agent/transfer.py."""

    run: str | None
    path: str
    offset: int | None = None


class PutFileReply(Message):
    """`have`: bytes of the file that are on the node. `done`: it is complete, verified and has its place."""

    have: int
    done: bool


class PutFile(Request[PutFileReply], op="put_file"):
    """Write a block of a file, a hole and the body, or complete it; see node/agent/transfer.py. `offset` None: write
    nothing. `link`: make a link with this text."""

    run: str | None
    path: str
    size_bytes: int
    mtime_ns: int
    mode: int
    offset: int | None = None
    hole_bytes: int | None = None
    sha256: str | None = None
    link: str | None = None


class PutTree(Request[PutFileReply], op="put_tree"):
    """As PutFile, for the tar of a staged directory, which the node unpacks and verifies: `tree` is its hash."""

    tree: str
    size_bytes: int
    offset: int | None = None
    hole_bytes: int | None = None
    sha256: str | None = None


class OfferReply(Message):
    """Reply to Offer."""

    port: int


class Offer(Request[OfferReply], op="offer"):
    """Let other nodes read what arrives here of a PutTree or PutFile, `put`; see node/agent/relay.py. `identity`: a key
    and its certificate, PEM."""

    put: Mapping[str, Any]
    identity: str


class TakeReply(PutFileReply):
    """Reply to Take. `is_met`: whether the other node accepted a connection."""

    is_met: bool = False


class Take(Request[TakeReply], op="take"):
    """As for `put`, with bytes that another node offers at one of the addresses, for at most `seconds`."""

    put: Mapping[str, Any]
    identity: str
    addresses: Sequence[str]
    port: int
    seconds: float


class FilesReply(Message):
    """Reply to Files. `phase`: of the attempt when the sizes were read, see ProcessesReply."""

    files: Sizes
    phase: str | None = None


class Files(Request[FilesReply], op="files"):
    """Query the size of every followed file of an attempt."""

    tag: str


class FileData(Message, op="data"):
    """Data of a followed file: the body."""

    tag: str
    file: str
    generation: int
    offset: int


class FileTrouble(Message):
    """Trouble with a followed file. `CODE`: of the job's event, which has the same values."""

    CODE: ClassVar[str]

    tag: str
    file: str
    generation: int


class FileTruncated(FileTrouble, op="truncated"):
    """A followed file became smaller than the part that was sent."""

    CODE = "file-truncated"

    size: int


class FileUnreadable(FileTrouble, op="follow_held"):
    """A followed file, or with the file "events" the attempt's folder, cannot be read now; it is sent when it can."""

    CODE = "file-unreadable"

    error: str


class FileLimited(FileTrouble, op="follow_limited"):
    """A followed file is larger than its limit; only its start is sent."""

    CODE = "file-limited"

    size: int
    limit: int


class ArtifactData(Message, op="gathered"):
    """Data of a file that Gather found: the body."""

    tag: str
    name: str
    file: str
    offset: int


EVENTS: Mapping[str, type[Message]] = {
    kind.OP: kind for kind in (AgentInfo, FileData, FileTruncated, FileUnreadable, FileLimited, ArtifactData)
}
