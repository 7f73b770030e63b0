"""Checks of a checkpoint's files: of large ones only heads and tails are read, and nothing is unpickled."""

from __future__ import annotations

import json
import os
import pickletools
import re
import zipfile

from ascendrun.facts import safetensors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator

INDEX_BYTES = 64 << 20
"""Size of the largest index file (JSON, header, .metadata) that is read."""
DCP_FILE = re.compile(r"^__\d+_\d+\.distcp$")


class TornError(Exception):
    """A checkpoint is not complete. `code`: why; `name`: of the file, relative to the checkpoint."""

    def __init__(self, code: str, name: str = "") -> None:
        super().__init__(code, name)
        self.code, self.name = code, name


def tree_of(path: str) -> dict[str, int]:
    """Return the size of each file below, by relative path."""
    found = {}
    for folder, _, names in os.walk(path):
        for name in names:
            full = os.path.join(folder, name)
            try:
                found[os.path.relpath(full, path)] = os.stat(full).st_size
            except OSError:
                found[os.path.relpath(full, path)] = 0
    return found


def check_tree(path: str) -> None:
    """Check every file by its suffix. Raises TornError."""
    for name, size in sorted(tree_of(path).items()):
        base = os.path.basename(name)
        full = os.path.join(path, name)
        if base.endswith(".json"):
            read_json(path, name)
        elif base.endswith(".safetensors"):
            check_safetensors(full, name, size)
        elif base.endswith((".pt", ".pth", ".bin", ".distcp")):
            check_zip(full, name, size)
        elif base == ".metadata" and os.path.dirname(name):
            check_dcp(os.path.dirname(full))


def check_gaps(path: str, pattern: Any) -> None:
    """Check that the numbers in names have no gap."""
    names = {int(match.group(1)): match.group(0) for match in map(pattern.match, os.listdir(path)) if match}
    for number in range(min(names, default=0), max(names, default=-1)):
        if number not in names:
            raise TornError("missing", names[max(names)].replace(str(max(names)), str(number)))


def check_indexes(path: str) -> None:
    """Check that the files which an index of shards names are here."""
    names = set(os.listdir(path))
    for index in sorted(name for name in names if name.endswith(".index.json")):
        for shard in sorted(set(read_json(path, index).get("weight_map", {}).values())):
            if shard not in names:
                raise TornError("missing", shard)


def read_json(path: str, name: str) -> dict[str, Any]:
    try:
        with open(os.path.join(path, name), "rb") as file:
            data = file.read(INDEX_BYTES)
    except FileNotFoundError:
        raise TornError("missing", name) from None
    try:
        values = json.loads(data.decode())
    except ValueError:
        raise TornError("invalid", name) from None
    return values if isinstance(values, dict) else {}


def check_safetensors(path: str, name: str, size: int) -> None:
    """Check that the file is as long as its header says."""
    try:
        expected = safetensors.read_header(path).file_bytes
    except ValueError:
        raise TornError("invalid", name) from None
    if expected != size:
        raise TornError("wrong-size", name)


def check_zip(path: str, name: str, size: int) -> None:
    """Check that a file of torch.save ends with the directory of its zip archive. Other content (.bin) must exist."""
    with open(path, "rb") as file:
        head = file.read(4)
        file.seek(max(0, size - 22))
        tail = file.read(22)
    if head[:2] == b"PK" or name.endswith(".distcp"):
        if len(tail) < 22 or tail[:4] != b"PK\x05\x06":
            raise TornError("wrong-size", name)
    elif not name.endswith(".bin") or not head.strip(b"\0"):
        raise TornError("invalid", name)


# --- indexes that are pickles: read as tokens, never executed ---


def check_dcp(path: str, step: int = 0) -> None:
    """Check that each file reaches as far as the index says."""
    ends = dcp_ends(path)
    for name, end in ends.items():
        if os.stat(os.path.join(path, name)).st_size < end:
            raise TornError("wrong-size", name)
    check_tree(path)


def is_dcp(path: str) -> bool:
    return any(name == ".metadata" or DCP_FILE.match(name) for name in os.listdir(path))


def dcp_ends(path: str) -> dict[str, int]:
    """Return, by file, the end of the last element that the index of torch.distributed.checkpoint has of it."""
    index = os.path.join(path, ".metadata")
    try:
        with open(index, "rb") as file:
            data = file.read(INDEX_BYTES + 1)
    except FileNotFoundError:
        raise TornError("missing", ".metadata") from None
    if len(data) > INDEX_BYTES:
        return {}
    ends, values = {}, {}  # type: dict[str, int], dict[str, Any]
    key = None
    try:
        for value in pickle_scalars(data):
            if key in ("relative_path", "offset", "length"):
                values[key] = value
                if key == "length":
                    name, end = values["relative_path"], values["offset"] + value
                    ends[name] = max(ends.get(name, 0), end)
            key = value
    except (ValueError, KeyError, TypeError, IndexError):
        raise TornError("invalid", ".metadata") from None
    return ends


def pickled_counts(path: str, names: tuple[str, ...]) -> dict[str, int]:
    """Return the integers that follow these keys in a file of torch.save; {}: it is not readable."""
    found = {}  # type: dict[str, int]
    try:
        with zipfile.ZipFile(path) as archive:
            (member,) = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
            if member.file_size > INDEX_BYTES:
                return {}
            key = None
            for value in pickle_scalars(archive.read(member)):
                if key in names and isinstance(value, int):
                    found.setdefault(key, value)
                key = value
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return {}
    return found


def pickle_scalars(data: bytes) -> Iterator[Any]:
    """Yield the texts and numbers of a pickle in their order. Raises ValueError if it is truncated."""
    memo = {}  # type: dict[int, Any]
    last = None
    for op, argument, _ in pickletools.genops(data):
        if op.name == "MEMOIZE":
            memo[len(memo)] = last
            continue
        if op.name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[int(str(argument))] = last
            continue
        if op.name in ("GET", "BINGET", "LONG_BINGET"):
            last = memo.get(int(str(argument)))
        elif isinstance(argument, (str, int)) and op.name not in ("PROTO", "FRAME", "GLOBAL"):
            last = argument
        else:
            last = None
            continue
        if last is not None:
            yield last
