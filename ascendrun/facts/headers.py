"""Columns, rows and tensors of Parquet and safetensors files on this node, for `ascendrun plan`. No pyarrow needed.

The end of a Parquet file is a structure of Thrift's compact protocol, its length in four bytes, and a mark. Of the
structure only the first fields are read: the version, the schema (the tree of columns, parents before children), the
rows. A safetensors file begins with a length of eight bytes, then JSON with the place of each tensor.
"""

from __future__ import annotations

import json
import os
import struct
from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator

MARK = b"PAR1"
MOST_BYTES = 64 << 20
TRUE, FALSE, BYTE, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12
NUMBERS = (4, 5, 6)
SCHEMA, ROWS = 2, 3
"""Fields of the end of the file."""
NAME, CHILDREN = 4, 5
"""Fields of an element of the schema."""


def read_parquet(path: bytes) -> dict[str, Any]:
    """Return {"fields": names of the columns, "rows": their number}. Raises OSError, and ValueError with the reason."""
    size = os.stat(path).st_size
    with open(path, "rb") as file:
        start = file.read(len(MARK))
        file.seek(max(0, size - 8))
        end = file.read(8)
        length = int.from_bytes(end[:4], "little")
        if size < 12 or start != MARK or end[4:] != MARK or length > min(size - 12, MOST_BYTES):
            raise ValueError("not a Parquet file")
        file.seek(size - 8 - length)
        data = file.read(length)
    try:
        whole = _Structure(data).read()
        return {"fields": list(_top(whole[SCHEMA])), "rows": int(whole[ROWS])}
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError("not a Parquet file") from error


def _top(elements: Any) -> Iterator[str]:
    """Yield the names of the columns; those inside of a column are not named."""
    below = 0
    for element in elements[1:]:
        if not below:
            yield element[NAME].decode("utf-8", "replace")
        below = max(0, below - 1) + element.get(CHILDREN, 0)


class _Structure:
    """The rest of a structure; each method reads what comes next."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def read(self) -> dict[int, Any]:
        """Return the values of a structure by the numbers of its fields."""
        found = {}  # type: dict[int, Any]
        number = 0
        while True:
            head = self.byte()
            if not head:
                return found
            step, kind = head >> 4, head & 15
            number = number + step if step else self.signed()
            found[number] = kind == TRUE if kind in (TRUE, FALSE) else self.value(kind)

    def value(self, kind: int) -> Any:
        if kind in NUMBERS:
            return self.signed()
        if kind == BINARY:
            return self.take(self.unsigned())
        if kind == STRUCT:
            return self.read()
        if kind in (LIST, SET):
            kind, count = self.items()
            return [self.value(kind) for _ in range(count)]
        if kind in (TRUE, FALSE, BYTE):
            return self.byte()
        if kind == DOUBLE:
            return self.take(8)
        if kind == MAP:
            count = self.unsigned()
            kinds = self.byte() if count else 0
            return [(self.value(kinds >> 4), self.value(kinds & 15)) for _ in range(count)]
        raise ValueError(kind)

    def items(self) -> tuple[int, int]:
        """Return the kind of the items of a list, and their number."""
        head = self.byte()
        return head & 15, head >> 4 if head >> 4 < 15 else self.unsigned()

    def byte(self) -> int:
        return self.take(1)[0]

    def take(self, count: int) -> bytes:
        found = self.data[self.at : self.at + count]
        if len(found) < count:
            raise ValueError(count)
        self.at += count
        return found

    def unsigned(self) -> int:
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    def signed(self) -> int:
        value = self.unsigned()
        return (value >> 1) ^ -(value & 1)


class Header(NamedTuple):
    """`file_bytes`: size of the whole file by its header. `tensors`: (dtype, shape) by name."""

    file_bytes: int
    tensors: dict[str, tuple[str, list[int]]]


def read_safetensors(path: str | bytes) -> Header:
    """Raises OSError, and ValueError with the reason."""
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= MOST_BYTES:
            raise ValueError("not a safetensors file")
        text = file.read(length)
    if len(text) < length:
        raise ValueError("truncated in its header")
    try:
        found: dict[str, Any] = json.loads(text.decode("utf-8"))
        found.pop("__metadata__", None)
        end = max((each["data_offsets"][1] for each in found.values()), default=0)
        return Header(8 + length + end, {name: (each["dtype"], each["shape"]) for name, each in found.items()})
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise ValueError("not a safetensors file") from None
