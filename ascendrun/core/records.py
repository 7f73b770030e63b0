"""Dataclasses as plain data for programs: `-o json`, and the JSON files of a bundle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from enum import Enum
from typing import Any

from ascendrun.core.events import Event, JobEvent
from ascendrun.core.jobs.reasons import Reason
from ascendrun.text import Rendered, Text


def as_record(value: Any) -> Any:
    """Return plain data for JSON: times as RFC 3339 UTC (`created_at_s` becomes `created_at`), other names unchanged.

    A message is an object (`message_record`) in a list; of a field NAME its text, next to NAME_code, NAME_values …
    """
    if isinstance(value, Event):
        return event_record(value)
    if isinstance(value, (Text, Reason)):
        return message_record(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        record = {}
        for field in dataclasses.fields(value):
            name, entry = field.name, getattr(value, field.name)
            if name == "at_s" or name.endswith("_at_s"):
                record[name[:-2]] = None if entry is None else format_rfc3339(entry)
            elif isinstance(entry, Rendered):
                data = as_record(entry)
                record[name] = data.pop("message")
                record.update((f"{name}_{part}", of_part) for part, of_part in data.items())
            else:
                record[name] = as_record(entry)
        return record
    if isinstance(value, Enum):
        return as_record(value.value)
    if isinstance(value, Mapping):
        return {str(key): as_record(entry) for key, entry in value.items()}
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, (set, frozenset)):
        return [as_record(entry) for entry in sorted(value)]
    if isinstance(value, (list, tuple)):
        return [as_record(entry) for entry in value]
    if isinstance(value, float) and not (float("-inf") < value < float("inf")):
        return None  # not representable in JSON
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


def message_record(message: Text | Reason) -> dict[str, Any]:
    """Return the data of a message and, as `message`, its text in the language of the process."""
    if isinstance(message, Text):
        return {"code": message.key, "values": as_record(message.values), "message": str(message)}
    why = message.why if message.why is None or isinstance(message.why, str) else as_record(message.why)
    place = {"hosts": list(message.hosts), "ranks": list(message.ranks)}
    values = as_record(message.values)
    return {"code": message.code, **place, "values": values, "why": why, "message": str(message)}


def event_record(event: Event) -> dict[str, Any]:
    """Return an event for programs. docs/events.md lists codes and values; `message`: in the process's language."""
    return {
        "at": format_rfc3339(event.at_s),
        "code": event.code,
        "severity": event.severity.value,
        "attempt": event.attempt,
        "hosts": list(event.hosts),
        "ranks": list(event.ranks),
        "values": as_record(event.values),
        "message": str(event.message()),
    }


def job_event_records(events: Sequence[JobEvent], names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return events of jobs for programs. `names`: of the jobs, by id."""
    return [
        {"number": item.number, "job": item.job, "name": names.get(item.job), **event_record(item.event)}
        for item in events
    ]


def format_rfc3339(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def flattened(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values of nested mappings as texts, each with its names joined by dots; not those that are None."""
    if isinstance(value, Mapping) and value:
        for name, part in value.items():
            yield from flattened(part, f"{path}.{name}" if path else str(name))
    elif value is not None:
        yield path, " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
