"""Parser of a port's link history (up and down): `hccn_tool -i N -link_stat -g`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime

from ascendrun.ascend.reading import field_of, lines_of, read_choice, read_int, unparsed_of
from ascendrun.ascend.tool_errors import ToolError, split_errors
from ascendrun.core.dataclass import dataclass

_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_ASCTIME = re.compile(r"[A-Z][a-z]{2} ([A-Z][a-z]{2}) {1,2}([0-9]{1,2}) ([0-9]{2}):([0-9]{2}):([0-9]{2}) ([0-9]{4})")
_DEVICE = re.compile(r"\s*\[(?:devid|device) ([0-9]{1,5})\]\s?(.*)", re.DOTALL)
_HISTORY_NAMES = ("current time", "link up count", "link down count")


@dataclass(frozen=True)
class LinkChange:
    """Time at which the link went up or down, by the device's clock, in its time zone."""

    at: datetime
    is_up: bool


@dataclass(frozen=True)
class LinkHistory:
    """Output of `-link_stat`: `changes` newest first; () if the tool prints NA, None if it prints nothing.

    `down_count` is printed by newer drivers only.
    """

    device_id: int | None
    now: datetime | None
    up_count: int | None
    down_count: int | None
    changes: tuple[LinkChange, ...] | None
    errors: tuple[ToolError, ...]
    unparsed: tuple[str, ...]


def parse_link_history(text: str) -> LinkHistory:
    errors, rest = split_errors(lines_of(text))
    unread: list[str] = []
    devices, values = set(), {}
    changes: list[LinkChange] | None = None
    for line in rest:
        found = _DEVICE.fullmatch(line)
        if not found:
            unread.append(line)
            continue
        devices.add(int(found[1]))
        field, change = field_of(found[2]), _link_change(found[2])
        if change and changes is not None:
            changes.append(change)
        elif field and field.name == "link change records":
            changes = []
            unread.extend([line] if field.value not in ("", "NA") else [])
        elif field and field.name in _HISTORY_NAMES and field.name not in values:
            values[field.name] = field.value
        else:
            unread.append(line)
    counts = [read_int(values.get(name, ""), 0, 2**40) for name in _HISTORY_NAMES[1:]]
    if len(devices) != 1 or (changes and any(a.at < b.at for a, b in zip(changes, changes[1:]))):
        return LinkHistory(None, None, None, None, None, errors, unparsed_of(rest))
    now = _asctime(values.get("current time", ""))
    unread.extend(line for name, line in values.items() if _lost(name, line, now, counts))
    records = None if changes is None else tuple(changes)
    return LinkHistory(devices.pop(), now, counts[0], counts[1], records, errors, unparsed_of(unread))


def _lost(name: str, value: str, now: datetime | None, counts: Sequence[int | None]) -> bool:
    read = (now, *counts)[_HISTORY_NAMES.index(name)]
    return read is None and value != "NA"


def _link_change(text: str) -> LinkChange | None:
    stamp, _, change = text.strip().partition("    ")
    at, state = _asctime(stamp), read_choice(change, ("LINK UP", "LINK DOWN"))
    return LinkChange(at, state == "LINK UP") if at and state else None


def _asctime(text: str) -> datetime | None:
    """Parse C's asctime without its weekday, which is often wrong on devices; None if invalid."""
    found = _ASCTIME.fullmatch(text.strip())
    if not found or found[1] not in _MONTHS:
        return None
    day, hour, minute, second, year = (int(found[n]) for n in range(2, 7))
    try:
        return datetime(year, _MONTHS.index(found[1]) + 1, day, hour, minute, second)
    except ValueError:
        return None
