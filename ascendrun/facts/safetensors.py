"""Headers of safetensors files: a length of eight bytes, then JSON with the place of each tensor."""

from __future__ import annotations

import json
import struct
from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MOST_BYTES = 64 << 20


class Header(NamedTuple):
    """`file_bytes`: size of the whole file by its header. `tensors`: (dtype, shape) by name."""

    file_bytes: int
    tensors: dict[str, tuple[str, list[int]]]


def read_header(path: str | bytes) -> Header:
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
