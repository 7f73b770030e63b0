"""Events of a job: their codes and values, and one type that is stored and passed on as data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from enum import Enum
from typing import Any, NamedTuple

from ascendrun.core.dataclass import dataclass, load_dataclass
from ascendrun.text import Text, from_json, to_json, translations


class Severity(str, Enum):
    """Importance of an event for an operator."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class EventType(NamedTuple):
    """One code. text/en.json has its template, by `event.CODE`; docs/events.md has its meaning and values.

    A template may also use `{hosts}`, `{ranks}`, `{attempt}` and `{who}` ("ranks 0-3 on npu[01-02]", or the hosts).
    `folded`: the events of hosts and ranks at the same time are one line although these values differ; None: never.
    """

    code: str
    severity: Severity
    folded: frozenset[str] | None = None


SEPARATE = "separate-trainings"
"""Code of an event; also a name for `checks.skip`."""
_EVENT_TYPES = (
    EventType("submitted", Severity.INFO),
    EventType("submitted-to-engine", Severity.INFO),
    EventType("store-rebuilt", Severity.WARNING),
    EventType("job-rebuilt", Severity.WARNING),
    EventType("standby-in-sync", Severity.INFO),
    EventType("standby-out-of-sync", Severity.WARNING),
    EventType("standby-missing", Severity.WARNING),
    EventType("state-changed", Severity.INFO),
    EventType("completed", Severity.INFO),
    EventType("diagnosed", Severity.INFO),
    EventType("waiting", Severity.INFO),
    EventType("allocation-never", Severity.WARNING),
    EventType("allocation-granted", Severity.INFO),
    EventType("allocation-gone", Severity.WARNING),
    EventType("engine-silent", Severity.WARNING),
    EventType("engine-answers", Severity.INFO),
    EventType("held", Severity.WARNING),
    EventType("restarting", Severity.WARNING),
    EventType("gave-up", Severity.ERROR),
    EventType("host-fenced", Severity.WARNING, frozenset()),
    EventType("host-given-up", Severity.WARNING, frozenset()),
    EventType("restart-waits", Severity.WARNING),
    EventType("stop-requested", Severity.INFO),
    EventType("host-passed-over", Severity.WARNING),
    EventType("hold-started", Severity.INFO),
    EventType("hold-ended", Severity.INFO),
    EventType("preflight-warning", Severity.WARNING),
    EventType("rank-hung-at-exit", Severity.WARNING, frozenset({"why"})),
    EventType("rank-killed-at-exit", Severity.WARNING, frozenset()),
    EventType("adopted", Severity.WARNING),
    EventType("node-lost", Severity.ERROR, frozenset()),
    EventType("power-off", Severity.WARNING, frozenset()),
    EventType("node-stopped", Severity.WARNING, frozenset()),
    EventType("processes-remain", Severity.ERROR),
    EventType("leftovers-gone", Severity.INFO, frozenset()),
    EventType("processes-gone", Severity.INFO, frozenset()),
    EventType("host-released", Severity.WARNING, frozenset()),
    EventType("spares-missing", Severity.WARNING, frozenset()),
    EventType("nodes-missing", Severity.WARNING, frozenset()),
    EventType("grows-later", Severity.INFO),
    EventType("spare-ready", Severity.INFO, frozenset()),
    EventType("spare-not-ready", Severity.WARNING),
    EventType("host-strike", Severity.WARNING),
    EventType("host-closed", Severity.WARNING, frozenset()),
    EventType("host-opened", Severity.INFO, frozenset()),
    EventType("end-unconfirmed", Severity.WARNING),
    EventType("end-failed", Severity.WARNING),
    EventType("unreachable", Severity.WARNING),
    EventType("reachable", Severity.INFO),
    EventType("straggler", Severity.WARNING, frozenset({"finding", "likely_cause", "slower_by", "step_fraction"})),
    EventType("straggler-resolved", Severity.INFO, frozenset()),
    EventType("hang", Severity.ERROR),
    EventType("hang-resolved", Severity.INFO),
    EventType(SEPARATE, Severity.ERROR),
    EventType("notification-failed", Severity.WARNING),
    EventType("file-truncated", Severity.WARNING),
    EventType("file-unreadable", Severity.WARNING),
    EventType("file-limited", Severity.WARNING),
    EventType("outputs-fetched", Severity.INFO),
    EventType("outputs-missing", Severity.WARNING),
    EventType("outputs-refused", Severity.WARNING),
    EventType("outputs-waiting", Severity.WARNING),
    EventType("outputs-failed", Severity.WARNING),
    EventType("pull-paused", Severity.WARNING),
    EventType("resume-chosen", Severity.INFO),
    EventType("micro-batch-chosen", Severity.INFO),
    EventType("checkpoint-incomplete", Severity.WARNING),
    EventType("checkpoint-set-aside", Severity.WARNING),
    EventType("checkpoint-pointer-repaired", Severity.WARNING),
    EventType("records-on-network", Severity.WARNING),
    EventType("pull-resumed", Severity.INFO),
    EventType("io-error", Severity.WARNING, frozenset({"count"})),
    EventType("records-lost", Severity.WARNING, frozenset({"count"})),
)
EVENTS: Mapping[str, EventType] = {row.code: row for row in _EVENT_TYPES}
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
