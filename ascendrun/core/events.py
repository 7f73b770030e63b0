"""Events of a job: their codes and values, and one type that is stored and passed on as data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from ascendrun.core.dataclass import dataclass, load_dataclass
from ascendrun.core.event_types import EVENT_TYPES, EventType, Severity
from ascendrun.text import Text, from_json, to_json, translations

EVENTS: Mapping[str, EventType] = {row.code: row for row in EVENT_TYPES}
FOLD_S = 1.0
"""Seconds: events of one job this close that differ only in host, rank and measurement are merged into one line."""


@dataclass(frozen=True)
class Event:
    """Something that happened to a job. `attempt` None: before its first; `at_s`: UTC seconds of the head node."""

    code: str
    values: Mapping[str, Any] = field(default_factory=dict, metadata={"read": from_json})
    hosts: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    attempt: int | None = None
    at_s: float = 0.0

    @property
    def severity(self) -> Severity:
        if self.code == "state-changed" and self.values.get("state") == "FAILED":
            return Severity.ERROR
        kind = EVENTS.get(self.code)
        return kind.severity if kind is not None else Severity.INFO

    def message(self) -> Text:
        """Return the event as a message. A code of a later release is returned as it is."""
        who = name_ranks(self.hosts, () if self.values.get("is_node") else self.ranks)
        own = {"hosts": self.hosts, "ranks": self.ranks, "attempt": self.attempt, "who": who}
        key = f"event.{self.code}"
        return Text(key, translations("en").get(key, "{code}"), **{"code": self.code, **self.values, **own})

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; `from_json` reads them back, texts included."""
        return {name: to_json(value) for name, value in vars(self).items()}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Event:
        return load_dataclass(cls, record)


@dataclass(frozen=True)
class JobEvent:
    """An event among those of all jobs. `number` counts them in the order of writing."""

    number: int
    job: str
    event: Event


def name_ranks(hosts: Sequence[str], ranks: Sequence[int]) -> Text:
    """Return "rank 5 on npu03", "ranks 0-3 on npu[01-02]", or the hosts alone."""
    values = {"hosts": tuple(hosts), **({"ranks": tuple(ranks)} if ranks else {})}
    if not ranks:
        return Text("event.who-hosts", "{hosts:hosts}", **values)
    if len(ranks) == 1:
        return Text("event.who-rank", "rank {ranks:ranks} on {hosts:hosts}", **values)
    return Text("event.who-ranks", "ranks {ranks:ranks} on {hosts:hosts}", **values)


def fold_events(events: Sequence[JobEvent]) -> tuple[JobEvent, ...]:
    """Merge events of one job that several hosts or ranks had at the same time, at the position of the first."""
    folded: list[JobEvent] = []
    open_at: dict[tuple[object, ...], int] = {}
    for item in events:
        kind = EVENTS.get(item.event.code)
        if kind is None or kind.folded is None:
            folded.append(item)
            continue
        fixed = {name: value for name, value in item.event.values.items() if name not in kind.folded}
        same = json.dumps(to_json(fixed), sort_keys=True, default=repr)
        key = (item.job, item.event.code, item.event.attempt, same)
        at = open_at.get(key)
        if at is None or item.event.at_s - folded[at].event.at_s > FOLD_S:
            open_at[key] = len(folded)
            folded.append(item)
            continue
        first = folded[at].event
        worst = item.event if _rate(item.event) > _rate(first) else first
        merged = replace(
            worst,
            hosts=tuple(dict.fromkeys((*first.hosts, *item.event.hosts))),
            ranks=tuple(sorted({*first.ranks, *item.event.ranks})),
            at_s=first.at_s,
        )
        folded[at] = replace(folded[at], event=merged)
    return tuple(folded)


def _rate(event: Event) -> float:
    return float(event.values.get("slower_by") or 0.0)
