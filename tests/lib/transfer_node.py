"""A node with one run for the transfer of files: requests are answered by the node's own code, and may be lost."""

from collections import Counter
from pathlib import Path
from typing import Any, Callable

from ascendrun.core.node_messages import Failure
from ascendrun.head.protocol.file_messages import Outputs, PutFile, PutFileReply
from ascendrun.head.protocol.messages import Request
from ascendrun.head.protocol.remote import Reply
from ascendrun.head.spool.transfer import fetch_files, send_files, send_one
from ascendrun.node import layout
from ascendrun.node.agent.transfer import list_outputs, put_file, read_output
from ascendrun.node.op_errors import OperationError

RUN = "head-j-0001"
LOST = Failure("connection-lost", "cut")


class Node:
    """A node with one run, and the blocks that it sent. `cuts`: numbers of reads whose reply is lost. `stored_bytes`:
    of a file as the node lists it, in place of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.work = Path(layout.work_dir(str(root), RUN))
        self.work.mkdir(parents=True)
        self.sent: Counter[tuple[str, int]] = Counter()
        self.cuts: set[int] = set()
        self.damages: set[int] = set()
        self.stored_bytes: dict[str, int] = {}
        self.before_read: Callable[[], None] = lambda: None

    def write(self, path: str, data: bytes) -> bytes:
        place = self.work / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
        return data

    def ask(self, request: Request[Any], *, deadline_s: float, body: bytes = b"") -> Reply[Any]:
        header = request.to_header()
        try:
            if isinstance(request, PutFile):
                return self.put(request, header, body)
            if isinstance(request, Outputs):
                fields = list_outputs(str(self.root), header)
                fields["files"] = [[*row[:3], self.stored_bytes.get(row[0], row[3])] for row in fields["files"]]
            elif request.offset is None:
                fields, _ = read_output(str(self.root), header)
            else:
                self.before_read()
                fields, body = read_output(str(self.root), header)
                self.sent[request.path, request.offset] += 1
                number = sum(self.sent.values())
                if number in self.cuts:
                    return Reply(None, error=LOST)
                if number in self.damages:
                    body = bytes([body[0] ^ 1]) + body[1:]
        except OperationError as error:
            return Reply(None, error=Failure.of_node(error.as_json()))
        return Reply(request.REPLY.from_header(fields), body)

    def put(self, request: PutFile, header: dict[str, Any], body: bytes) -> Reply[Any]:
        """Write a block. `cuts`: the block was written, but its reply is lost; `damages`: its last byte is changed."""
        number = 0
        if request.offset is not None:
            self.before_read()
            self.sent[request.path, request.offset] += 1
            number = sum(self.sent.values())
            if number in self.damages:
                body = body[:-1] + bytes([body[-1] ^ 1])
        fields = put_file(str(self.root), header, body)
        return Reply(None, error=LOST) if number in self.cuts else Reply(PutFileReply.from_header(fields))

    def send(self, folder: str, *files: Path) -> Any:
        return send_files(self.ask, RUN, files, folder, send=send_one)

    def fetch(self, into: Path, *patterns: str) -> Any:
        return fetch_files(self.ask, RUN, patterns, into)


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
