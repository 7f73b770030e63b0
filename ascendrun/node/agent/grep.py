"""Search of a rank's output on the node; only the requested lines are sent.

It runs as a separate process: a pattern that never ends is killed with it, and the agent does not notice.

Standard input: {folder, files: {"rank-3.out": [generation, offset]}, patterns, ignore_case, invert, since_ns, until_ns,
max_hits}; each file is read from its offset on, to its end now. Standard output: frames of node/wire.py,
{file, generation, offset, at_ns} with the line in UTF-8, and at last {"end": true, "truncated"}.
"""

from __future__ import annotations

import collections
import json
import os
import re
import struct
import sys

from ascendrun.node import layout, wire
from ascendrun.node.files import write_all
from ascendrun.node.op_errors import OperationError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator, Mapping

    from ascendrun.node.agent.execute import Commands

READ_BYTES = 1 << 20
SHOWN_BYTES = 64 << 10
"""Of a longer line only the start is searched and sent: as the head shows it."""
GREP_S = 20.0
MAX_HITS = 20000
MAX_BYTES = 2 << 20
TIMES = struct.Struct("!QQ")
FILE = re.compile(r"^(?:rank|node)-\d+\.(?:out|err)$")


def grep(
    root: str, request: dict[str, Any], *, agent: list[str], commands: Commands, login: Mapping[bytes, bytes]
) -> tuple[dict[str, Any], bytes]:
    """Start the process and return its output (agent's side). {"complete": false}: truncated or killed."""
    try:
        for pattern in request["patterns"]:
            re.compile(pattern)
    except re.error as error:
        raise OperationError("bad-request", "pattern-unreadable", error=str(error)) from error
    if not all(FILE.match(name) for name in request["files"]):
        raise OperationError("bad-request", "not-rank-output", files=sorted(request["files"]))
    folder = layout.streams_dir(layout.attempt_dir(root, request["tag"]))
    stdin = json.dumps(dict(request, folder=folder)).encode("utf-8")
    done = commands.carry_out(
        [os.fsencode(part) for part in agent] + [b"grep"],
        login,
        stdin,
        timeout_s=float(request.get("timeout_s") or GREP_S),
        limit=3 << 20,
    )
    if done.code not in (0, None) and not done.out:
        raise OperationError(
            "internal", "grep-failed", status=done.code, error=done.err.decode("utf-8", "replace")[-500:]
        )
    return {"complete": not done.timed_out and not done.truncated}, done.out


def main() -> int:
    """Run the process of `grep`."""
    with os.fdopen(0, "rb", closefd=False) as stdin:
        request = json.loads(stdin.read().decode("utf-8"))
    flags, invert = re.IGNORECASE if request.get("ignore_case") else 0, bool(request.get("invert"))
    searches = [re.compile(pattern, flags).search for pattern in request["patterns"]]
    since_ns = request.get("since_ns") or 0
    until_ns = float("inf") if request.get("until_ns") is None else request["until_ns"]
    hits = sent = 0
    most = int(request.get("max_hits") or MAX_HITS)
    for name, (generation, offset) in sorted(request["files"].items()):
        for line in read_lines(request["folder"], name, generation, offset):
            is_found = any(search(line.text) is not None for search in searches)
            if is_found is invert or (line.at_ns is not None and not since_ns <= line.at_ns <= until_ns):
                continue
            if hits >= most or sent > MAX_BYTES:
                write_all(1, wire.pack({"end": True, "truncated": True}))
                return 0
            body = line.text.encode("utf-8", "backslashreplace")
            write_all(
                1,
                wire.pack(
                    {"file": name, "generation": line.generation, "offset": line.offset, "at_ns": line.at_ns}, body
                ),
            )
            hits += 1
            sent += len(body)
    write_all(1, wire.pack({"end": True, "truncated": False}))
    return 0


Line = collections.namedtuple("Line", "generation offset text at_ns")
"""One line as displayed. `at_ns`: its arrival, None: not known."""


def read_lines(folder: str, name: str, generation: int, offset: int) -> Iterator[Line]:
    """Yield the lines of a stream from `offset` to its end now; a line may continue in the next generation."""
    start, kept = (generation, offset), b""
    while True:
        try:
            fd = os.open(os.path.join(folder, "%s.%d" % (name, generation)), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            break
        times = read_times(os.path.join(folder, "%s.times.%d" % (name, generation)), offset)
        end_ns: tuple[int, int | None] = (0, None)
        try:
            while True:
                data = os.pread(fd, READ_BYTES, offset)
                if not data:
                    break
                pieces = data.split(b"\n")
                for number, piece in enumerate(pieces):
                    if len(kept) <= SHOWN_BYTES:
                        kept += piece[: SHOWN_BYTES + 1]
                    if number == len(pieces) - 1:
                        break
                    offset += len(piece) + 1
                    while end_ns[0] < offset:
                        end_ns = next(times, (1 << 62, None))
                    yield Line(start[0], start[1], show(kept), end_ns[1])
                    start, kept = (generation, offset), b""
                offset += len(pieces[-1])
        finally:
            os.close(fd)
        generation, offset = generation + 1, 0
    if kept:
        yield Line(start[0], start[1], show(kept), None)


def read_times(path: str, offset: int) -> Iterator[tuple[int, int | None]]:
    """Yield (end offset, arrival) of each record that ends behind `offset`, as required."""
    try:
        with open(path, "rb") as file:
            while True:
                raw = file.read(1 << 16)
                for end, at_ns in TIMES.iter_unpack(raw[: len(raw) - len(raw) % TIMES.size]):
                    if end > offset:
                        yield end, at_ns
                if len(raw) < 1 << 16:
                    return
    except OSError:
        return


def show(raw: bytes) -> str:
    """Return the final terminal text: of a progress bar its last state. As core/logs/log_lines.py shows it."""
    raw = raw[:SHOWN_BYTES].rstrip(b"\r")
    raw = raw[raw.rfind(b"\r") + 1 :]
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        pass
    try:
        text = raw.decode("gb2312")
    except UnicodeDecodeError:
        text = ""
    return text if len(raw) - len(text) > 1 and text else raw.decode("utf-8", "backslashreplace")


if __name__ == "__main__":
    sys.exit(main())
