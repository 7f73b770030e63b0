"""Dumps of torch's and torch_npu's flight recorder: the last collectives of one rank and how far each came.

torch writes them when its watchdog sees a timeout, as a pickle or as JSON. They are read without torch, and without
running what a pickle names.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ascendrun.core.dataclass import dataclass

MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Recorded:
    """One collective, or message to one rank (`is_p2p`). `state`: scheduled, started or completed; None: not stated.
    `sizes`: shapes of the inputs and of the outputs. `frame`: the innermost frame of the program outside torch, as
    FILE:LINE; None: not recorded."""

    group: str
    seq: int
    op: str
    state: str | None
    sizes: tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]
    is_p2p: bool = False
    frame: str | None = None


@dataclass(frozen=True)
class FlightRecording:
    """`collectives`: the oldest first. `last`: by group id the last sequence numbers that were enqueued, started and
    completed, None inside: none."""

    version: str | None
    collectives: tuple[Recorded, ...]
    last: Mapping[str, tuple[int | None, int | None, int | None]]


class _Plain(pickle.Unpickler):
    """Numbers, texts, lists and dictionaries only."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name}")


def read_dump(data: bytes) -> FlightRecording | None:
    """Return the recording; None: it is truncated, too large, or no dump. Never raises."""
    if len(data) > MOST_BYTES:
        return None
    try:
        raw = json.loads(data) if data[:1] == b"{" else _Plain(io.BytesIO(data)).load()
        entries = tuple(_entry(one) for one in raw.get("entries") or ())
        last = {str(group): _last(status) for group, status in (raw.get("pg_status") or {}).items()}
        return FlightRecording(str(raw["version"]) if "version" in raw else None, entries, last)
    except Exception:  # a damaged pickle raises anything
        return None


def _entry(raw: Mapping[str, Any]) -> Recorded:
    is_p2p = bool(raw.get("is_p2p"))
    name, described = (*raw.get("process_group", ("", "")), "", "")[:2]
    return Recorded(
        group=str(described or name),
        seq=int(raw["p2p_seq_id" if is_p2p else "collective_seq_id"]),
        op=str(raw["profiling_name"]),
        state=raw.get("state"),
        sizes=(_shapes(raw.get("input_sizes")), _shapes(raw.get("output_sizes"))),
        is_p2p=is_p2p,
        frame=next(map(_place, filter(_is_of_program, raw.get("frames") or ())), None),
    )


def _shapes(raw: Sequence[Sequence[int]] | None) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, shape)) for shape in raw or ())


def _is_of_program(frame: Mapping[str, Any]) -> bool:
    return not any(part in str(frame["filename"]) for part in ("/torch/", "/torch_npu/"))


def _place(frame: Mapping[str, Any]) -> str:
    return f"{frame['filename']}:{frame['line']}"


def _last(status: Mapping[str, Any]) -> tuple[int | None, int | None, int | None]:
    numbers = (int(status.get(f"last_{what}_collective", -1)) for what in ("enqueued", "started", "completed"))
    enqueued, started, completed = (number if number >= 0 else None for number in numbers)
    return enqueued, started, completed
