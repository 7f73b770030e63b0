"""Events of a job: their codes and values, and one type that is stored and passed on as data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple

from ascendrun.text import Text, from_json, to_json

FOLD_S = 1.0
"""Seconds: events of one job this close that differ only in host, rank and measurement are merged into one line."""


class Severity(str, Enum):
    """Importance of an event for an operator."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class EventType(NamedTuple):
    """One code: its English template, when it is written, and its values.

    Templates may also use `{hosts}`, `{ranks}`, `{attempt}` and `{who}` ("ranks 0-3 on npu[01-02]", or the hosts).
    `folds`: the events of hosts and ranks at the same time are one line; `folded` values may then differ.
    """

    code: str
    severity: Severity
    english: str
    meaning: str
    values: Mapping[str, str] = MappingProxyType({})
    folded: frozenset[str] | None = None


_REASON = "text with a code: docs/events.md lists the reasons"
_TYPES = (
    EventType(
        "submitted",
        Severity.INFO,
        "{name} submitted for {hosts:hosts}",
        "A job was added to the queue.",
        {"name": "name of the job"},
    ),
    EventType(
        "state-changed",
        Severity.INFO,
        "{state}: {reason}",
        "The job changed its state. With state FAILED the severity is error.",
        {
            "state": "new state",
            "previous": "state before",
            "reason": _REASON,
            "cause": "why the job is being stopped: user, refused, failure, node-lost, start-timeout, limit, "
            "head-restarted or need; null otherwise",
        },
    ),
    EventType(
        "waiting", Severity.INFO, "{reason}", "What a queued job is waiting for has changed.", {"reason": _REASON}
    ),
    EventType(
        "stop-requested",
        Severity.INFO,
        "stop requested with a grace period of {grace_s:duration}",
        "A user stopped the job.",
        {"grace_s": "seconds between SIGTERM and SIGKILL; 0 with --now"},
    ),
    EventType(
        "preflight-warning",
        Severity.WARNING,
        "preflight warning: {warning}",
        "A check before the start found something that does not prevent it.",
        {
            "finding": "code of docs/checks.md; null: recorded by an earlier release",
            "values": "of the finding",
            "warning": "text of the finding",
        },
    ),
    EventType(
        "rank-hung-at-exit",
        Severity.WARNING,
        "{who} did not exit: {why}",
        "A rank finished its work, or another rank exited 0, but its process still runs.",
        {
            "cause": 'finished (its metrics have "done": true) or idle; null: unknown',
            "why": "text: what was observed, with after_s",
        },
        frozenset({"why"}),
    ),
    EventType(
        "rank-killed-at-exit",
        Severity.WARNING,
        "{who} finished but did not exit and was killed",
        "A rank that hung at its exit was killed after all others had ended.",
        {},
        frozenset(),
    ),
    EventType(
        "processes-remain",
        Severity.ERROR,
        "{hosts:hosts}: {count:plural process processes} ({pids}) did not exit after SIGKILL (blocked in a driver or"
        " NFS); reboot the node",
        "Processes of the job cannot be killed. Only a reboot of the node helps.",
        {"pids": "process ids", "count": "how many"},
    ),
    EventType(
        "processes-gone",
        Severity.INFO,
        "{hosts:hosts} reachable again; no process of the job remains",
        "A host of which this was unknown confirmed that all processes of the job have exited.",
        {},
        frozenset(),
    ),
    EventType(
        "end-unconfirmed",
        Severity.WARNING,
        "cannot confirm that all processes exited on {hosts:hosts}: unreachable; they are stopped when the host is"
        " reachable again",
        "The job ended while hosts were unreachable. The hosts stay reserved until they confirm.",
    ),
    EventType(
        "end-failed",
        Severity.WARNING,
        "{hosts:hosts} reachable, but cannot end the job's processes (full or failed disk?); the request is repeated",
        "The job ended, but the agents on these hosts could not end its processes.",
    ),
    EventType(
        "unreachable",
        Severity.WARNING,
        "{hosts:hosts} unreachable; its ranks may still be running",
        "The connection to hosts of a running job was lost.",
    ),
    EventType("reachable", Severity.INFO, "{hosts:hosts} reachable again", "The connection to hosts is back."),
    EventType(
        "straggler",
        Severity.WARNING,
        "straggler: {who}, {finding} (likely cause: {likely_cause})",
        "Ranks, or all ranks of a host, are slower than the others.",
        {
            "finding": "text: how much slower",
            "likely_cause": "text: the measurement that explains it best",
            "slower_by": "fraction of additional time, 0.31 = 31%; null: only device metrics show it",
            "step_fraction": "fraction of each step that the job loses; null: unknown",
            "cause": "frequency, temperature, link, data, cpu, shared or health; null: unknown",
            "is_node": "true: most ranks of the host are slow",
        },
        frozenset({"finding", "likely_cause", "slower_by", "step_fraction"}),
    ),
    EventType(
        "straggler-resolved",
        Severity.INFO,
        "{who} no longer slow",
        "A straggler is as fast as the others again.",
        {"is_node": "true: the host was reported as a whole"},
        frozenset(),
    ),
    EventType(
        "notification-failed",
        Severity.WARNING,
        "notification to {target} failed: {reply}",
        "A notification could not be delivered.",
        {
            "target": "name of the target",
            "kind": "kind of the notification; null: several",
            "count": "how many notifications",
            "reply": "text: response of the service, or why no attempt is made any more",
        },
    ),
    EventType(
        "file-truncated",
        Severity.WARNING,
        "{hosts:hosts}: {file}.{generation} was truncated to {size:bytes} on the node; the earlier contents are kept"
        " on the head node",
        "A log file became shorter on the node.",
        {"file": "name", "generation": "number of the rotated file", "size": "bytes"},
    ),
    EventType(
        "file-unreadable",
        Severity.WARNING,
        "{hosts:hosts}: cannot open {file}.{generation}: {error}; its contents arrive when it can be opened",
        "A log file cannot be read on the node.",
        {"file": "name", "generation": "number of the rotated file", "error": "message of the node"},
    ),
    EventType(
        "legacy",
        Severity.INFO,
        "{text}",
        "A line that an earlier release wrote and that has no code.",
        {"text": "the line", "kind": "its kind"},
    ),
)
EVENTS: Mapping[str, EventType] = {row.code: row for row in _TYPES}


@dataclass(frozen=True)
class Event:
    """Something that happened to a job. `attempt` None: before its first; `at_s`: UTC seconds of the head node."""

    code: str
    values: Mapping[str, Any] = field(default_factory=dict)
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
        kind = EVENTS.get(self.code)
        who = name_ranks(self.hosts, () if self.values.get("is_node") else self.ranks)
        own = {"hosts": self.hosts, "ranks": self.ranks, "attempt": self.attempt, "who": who}
        english = kind.english if kind is not None else "{code}"
        return Text(f"event.{self.code}", english, **{"code": self.code, **self.values, **own})

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; `from_json` reads them back, texts included."""
        return {name: to_json(value) for name, value in vars(self).items()}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Event:
        return cls(
            str(record["code"]),
            from_json(record.get("values") or {}),
            tuple(record.get("hosts") or ()),
            tuple(record.get("ranks") or ()),
            record.get("attempt"),
            float(record.get("at_s") or 0.0),
        )


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


def values_for_programs(value: Any) -> Any:
    """Return values as `events -o jsonl` prints them: a text as code, values and message in this language."""
    if isinstance(value, Text):
        return {"code": value.key, "values": values_for_programs(value.values), "message": str(value)}
    if isinstance(value, Mapping):
        return {name: values_for_programs(item) for name, item in value.items()}
    return [values_for_programs(item) for item in value] if isinstance(value, (list, tuple)) else value


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
