"""Migrations of stores of earlier releases: sentences become typed events and reasons, job specs get new keys."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Callable

from ascendrun.core.events import Event
from ascendrun.core.jobs import reasons
from ascendrun.core.jobs.reasons import FirstFailure
from ascendrun.core.machines import Hold, MachineState
from ascendrun.core.names import InvalidNamesError, expand_names, split_list
from ascendrun.text import Text, to_json

_CAUSES = (
    ("stop was asked for", "user"),
    ("nothing was started", "refused"),
    ("was rebooted", "node-lost"),
    ("supervisor was killed", "node-lost"),
    ("(timeouts.start_s)", "start-timeout"),
    ("controller was restarted", "head-restarted"),
    ("timeouts.max_s", "limit"),
    ("the limit of this job", "limit"),
    ("not started: ", "need"),
)
_NEXT_ATTEMPT = re.compile(r"^(?:QUEUED|BACKOFF): attempt (\d+)\b")


def _held(host: str, job: str) -> Text:
    return reasons.nodes_held([host], Hold(host, MachineState.UNCONFIRMED, job, "", 0.0).reason())


def type_events(db: sqlite3.Connection) -> None:
    """Fill `typed_events` from `events`; records get texts in place of sentences."""
    for number, record in db.execute("SELECT number, record FROM jobs WHERE id IS NOT NULL").fetchall():
        values = json.loads(record)
        rows = db.execute("SELECT number, at_s, kind, text FROM events WHERE job = ? ORDER BY seq", (values["id"],))
        reader = _Reader(values)
        for row, at_s, kind, text in rows.fetchall():
            made = reader.event(at_s, kind, text).to_json()
            columns = (json.dumps(made[name], ensure_ascii=False) for name in ("values", "hosts", "ranks"))
            db.execute(
                "INSERT INTO typed_events VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (row, values["id"], made["code"], *columns, made["attempt"], at_s),
            )
        db.execute("UPDATE jobs SET record = ? WHERE number = ?", (json.dumps(_new_record(values)), number))
    orphans = "SELECT number, job, at_s, kind, text FROM events WHERE job NOT IN (SELECT job FROM typed_events)"
    for row, job, at_s, kind, text in db.execute(orphans).fetchall():
        values = json.dumps({"text": text, "kind": kind}, ensure_ascii=False)
        db.execute("INSERT INTO typed_events VALUES (?, ?, 'legacy', ?, '[]', '[]', NULL, ?)", (row, job, values, at_s))
    for number, body in db.execute("SELECT number, body FROM notices").fetchall():
        values = json.loads(body)
        if "text" in values:
            values["kind"] = "reachable" if values["kind"] == "answers" else values["kind"]
            values["reason"] = to_json(reasons.legacy(values.pop("text")))
            db.execute("UPDATE notices SET body = ? WHERE number = ?", (json.dumps(values), number))


def rename_keys(db: sqlite3.Connection) -> None:
    """Migrate job specs (`stage`, `devices.family`, `checkpoint.grace_s`) and the `note` of exits."""
    rows = db.execute("SELECT number, spec, record FROM jobs WHERE record != ''").fetchall()
    if not rows:
        return

    for number, spec, record in rows:
        values = json.loads(record)
        for node in values.get("nodes", ()):
            for end in node["exits"].values():
                if "note" in end:
                    end["killed_at_exit"] = bool(end.pop("note"))
        db.execute("UPDATE jobs SET spec = ?, record = ? WHERE number = ?", (spec, json.dumps(values), number))


def _new_record(record: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(record)
    if "told_at_s" in values:
        values["go_sent_at_s"] = values.pop("told_at_s")
    values["nodes"] = [
        {**node, "phase": "GO_SENT" if node["phase"] == "TOLD" else node["phase"]} for node in values["nodes"]
    ]
    if isinstance(values.get("reason"), str):
        count = len(values["hosts"])
        values["reason"] = to_json(read_reason(values["reason"], count=count, ranks=values.get("world_size") or None))
    if isinstance(values.get("first_failure"), str):
        failure = read_failure(values["first_failure"])
        values["first_failure"] = to_json(asdict(failure or FirstFailure("legacy", "", detail=values["first_failure"])))
    return values


@dataclass
class _Reader:
    """Reader of the lines of one job, in order."""

    record: Mapping[str, Any]
    attempt: int = 1
    cause: str | None = None
    state: str = "QUEUED"
    since_s: float = field(default=0.0)

    def event(self, at_s: float, kind: str, text: str) -> Event:
        hosts = tuple(self.record["hosts"])
        if kind == "submitted":
            return Event("submitted", {"name": self.record["name"]}, hosts, (), self.attempt, at_s)
        if kind == "asked" and text in ("stop", "stop --now"):
            grace_s = 0.0 if text == "stop --now" else self.record.get("grace_s")
            return Event("stop-requested", {"grace_s": grace_s}, (), (), self.attempt, at_s)
        if kind == "state":
            return self._state(at_s, text)
        if kind in ("unreachable", "answers"):
            code = "unreachable" if kind == "unreachable" else "reachable"
            return Event(code, {}, _names(text.partition(": ")[0]), (), self.attempt, at_s)
        code, values, named, ranks = _LINES.get(kind, _legacy)(text, kind)
        if code == "state-changed":
            code, values = "legacy", {"text": text, "kind": kind}
        return Event(code, values, tuple(named), tuple(ranks), self.attempt, at_s)

    def _state(self, at_s: float, line: str) -> Event:
        state, _, text = line.partition(": ")
        started = _NEXT_ATTEMPT.match(line)
        if started is not None:
            self.attempt, self.cause = max(self.attempt, int(started.group(1))), None
        if state == "STOPPING":
            is_newest = self.attempt == self.record["attempt"]
            self.cause = self.record.get("cause") if is_newest and self.record.get("cause") else _cause_of(text)
        reason = read_reason(text, count=len(self.record["hosts"]), seconds=max(0.0, at_s - self.since_s))
        values = {"state": state, "previous": self.state, "reason": reason, "cause": self.cause}
        self.state, self.since_s = state, at_s
        host, rank = reason.values.get("host"), reason.values.get("rank")
        hosts = reason.values.get("hosts") or ([host] if host else [])
        return Event("state-changed", values, tuple(hosts), () if rank is None else (rank,), self.attempt, at_s)


def _cause_of(text: str) -> str:
    return next((cause for words, cause in _CAUSES if words in text), "failure")


def _names(text: str) -> tuple[str, ...]:
    try:
        return tuple(name for piece in split_list(text) for name in expand_names(piece))
    except InvalidNamesError:
        return ()


# ---------------------------------------------------------------- reasons

_FAILURES: tuple[tuple[str, Callable[[re.Match[str]], FirstFailure]], ...] = (
    (
        r"rank (\d+) on (\S+) exited with code (-?\d+)",
        lambda m: FirstFailure("rank-exited", m[2], int(m[1]), int(m[3])),
    ),
    (
        r"rank (\d+) on (\S+) was killed by signal (\d+)",
        lambda m: FirstFailure("rank-killed", m[2], int(m[1]), None, int(m[3])),
    ),
    (r"(\S+) was rebooted: its ranks are gone", lambda m: FirstFailure("node-rebooted", m[1])),
    (
        r"rank (\d+) on (\S+) could not be started: (.*)",
        lambda m: FirstFailure("start-failed", m[2], int(m[1]), detail=m[3]),
    ),
    (r"(\S+) could not be started: (.*)", lambda m: FirstFailure("start-failed", m[1], detail=m[2])),
)
_REASONS: tuple[tuple[str, Callable[[re.Match[str]], Text]], ...] = (
    (r"waits to be looked at", lambda m: reasons.new()),  # voice: ok text of an old store
    (r"attempt (\d+) waits for its nodes", lambda m: reasons.next_attempt(int(m[1]))),
    (r"all (\d+) ranks are alive", lambda m: reasons.running(int(m[1]))),
    (r"all (\d+) ranks exited 0", lambda m: reasons.succeeded(int(m[1]))),
    (r"stop was asked for", lambda m: reasons.stopped_by_user()),
    (r"the controller was restarted before GO; nothing had been started", lambda m: reasons.controller_restarted()),
    (r"nothing was started: (.*)", lambda m: reasons.preflight_failed(_leading_hosts(m[1]), m[1])),
    (r"(\S+): its ranks ended before they had finished", lambda m: reasons.ranks_ended_early(m[1])),
    (
        r"(\S+): the job's supervisor was killed, its ranks are without a keeper",  # voice: ok text of an old store
        lambda m: reasons.supervisor_lost(m[1]),
    ),
    (
        r"waits behind (\S+) \((.*)\), which wants (\S+).* too",  # voice: ok text of an old store
        lambda m: reasons.queued_behind(m[1], m[2], [m[3]]),
    ),
    (r"waits for (\S+).*: not confirmed that (\S+) is gone there", lambda m: _held(m[1], m[2])),
    (r"waits for (\S+).*, held by (\S+) \((.*)\)", lambda m: reasons.nodes_in_use(m[2], m[3], [m[1]])),
    (r"waits for stage (\S+) \((\S+)\)", lambda m: reasons.waiting_for_job(m[2], m[1])),
    (r"waits for (j-\S+)", lambda m: reasons.waiting_for_job(m[1], None)),
    (r"not started: (\S+), which it needs, is not known any more", lambda m: reasons.dependency_unknown(m[1])),
    (r"not started: stage (\S+) \((\S+)\) ended (\S+)", lambda m: reasons.dependency_failed(m[2], m[1], m[3])),
    (r"not started: (\S+) ended (\S+)", lambda m: reasons.dependency_failed(m[1], None, m[2])),
)
_START_TIMEOUT = re.compile(r"(.+): ranks not alive (\S+) s after GO \(timeouts\.start_s\)")


def read_failure(text: str) -> FirstFailure | None:
    """Return the failure that a sentence names, None: no known failure."""
    for pattern, make in _FAILURES:
        match = re.fullmatch(pattern, text, re.DOTALL)
        if match is not None:
            return make(match)
    return None


def read_reason(text: str, *, count: int, ranks: int | None = None, seconds: float = 0.0) -> Text:
    """Return the reason of a sentence. `count`: hosts of the job; `seconds`: since the previous state."""
    if text == "its nodes are free":
        return reasons.nodes_available(count)
    if text == "all nodes reported":
        return reasons.checked(count, seconds)
    if text == "all nodes hold the same code":
        return reasons.staged(count, seconds)
    late = _START_TIMEOUT.fullmatch(text)
    if late is not None:
        hosts = [host for host in late[1].split(", ") if host]
        return reasons.start_timeout(hosts, ranks or len(hosts), float(late[2]))
    if "timeouts.max_s" in text or "the limit of this job" in text:
        return reasons.time_limit(None, text)
    for pattern, make in _REASONS:
        match = re.fullmatch(pattern, text, re.DOTALL)
        if match is not None:
            return make(match)
    failure = read_failure(text)
    return failure.reason() if failure is not None else reasons.legacy(text)


def _leading_hosts(text: str) -> list[str]:
    """Return the hosts before each first colon of "npu01: …; npu02: …"."""
    found = (re.match(r"([A-Za-z0-9][A-Za-z0-9._\[\],-]*): ", piece) for piece in text.split("; "))
    return list(dict.fromkeys(name for match in found if match is not None for name in _names(match[1])))


# ---------------------------------------------------------------- other lines

_Line = tuple[str, Mapping[str, Any], Sequence[str], Sequence[int]]
_NOTES: tuple[tuple[str, Callable[[re.Match[str]], tuple[Any, ...]]], ...] = (
    (r"warning: (.*)", lambda m: ("preflight-warning", {"finding": None, "values": {}, "warning": m[1]}, (), ())),
    (
        r"rank (\d+) on (\S+) has finished but does not exit: (.*)",
        lambda m: (
            "rank-hung-at-exit",
            {"cause": m[3] if m[3] in ("finished", "idle") else None, "why": reasons.hung_at_exit(m[3], None)},
            (m[2],),
            (int(m[1]),),
        ),
    ),
    (r"rank (\d+) on (\S+): finished but did not exit", lambda m: ("rank-killed-at-exit", {}, (m[2],), (int(m[1]),))),
    (
        r"(\S+): processes ([\d, ]+) survive even SIGKILL.*",
        lambda m: (
            "processes-remain",
            {"pids": [int(pid) for pid in m[2].split(", ")], "count": m[2].count(",") + 1},
            (m[1],),
            (),
        ),
    ),
    (r"(\S+) answers again: nothing of the job is left there", lambda m: ("processes-gone", {}, (m[1],), ())),
    (
        r"(.+): unreachable, not confirmed that the job is gone there; .*",
        lambda m: ("end-unconfirmed", {}, tuple(m[1].split(", ")), ()),
    ),
    (r"(.+): answers, but cannot end the job .*", lambda m: ("end-failed", {}, tuple(m[1].split(", ")), ())),
    (
        r"(\S+): (\S+)\.(\d+) was cut there to (\d+) bytes; .*",
        lambda m: ("file-truncated", {"file": m[2], "generation": int(m[3]), "size": int(m[4])}, (m[1],), ()),
    ),
    (
        r"(\S+): (\S+)\.(\d+) cannot be opened there \((.*)\); .*",
        lambda m: ("file-unreadable", {"file": m[2], "generation": int(m[3]), "error": m[4]}, (m[1],), ()),
    ),
)
_STRAGGLER = re.compile(
    r"(?:rank (?P<rank>\d+) on (?P<host>\S+)|(?P<node>\S+) \(ranks (?P<ranks>[\d,-]+)\)) "
    r"(?:is slow: (?P<percent>\d+) % more time than the others(?:, (?P<costs>\d+) % of every step)?|stands out)"
    r"(?:; likeliest sign: (?P<sign>.*)|; nothing that is measured tells why)?",
    re.DOTALL,
)
_KEEPS_UP = re.compile(r"(?:rank (?P<rank>\d+) on )?(?P<host>\S+) keeps up again")


def _legacy(text: str, kind: str) -> _Line:
    return "legacy", {"text": text, "kind": kind}, (), ()


def _note(text: str, kind: str) -> _Line:
    for pattern, make in _NOTES:
        match = re.fullmatch(pattern, text, re.DOTALL)
        if match is not None:
            code, values, hosts, ranks = make(match)
            return code, values, hosts, ranks
    reason = read_reason(text, count=0)
    return _legacy(text, kind) if reason.key == "reason.legacy" else ("waiting", {"reason": reason}, (), ())


def _straggler(text: str, kind: str) -> _Line:
    match = _STRAGGLER.fullmatch(text)
    if match is None:
        return _legacy(text, kind)
    slower = int(match["percent"]) / 100 if match["percent"] else None
    finding = (
        Text("straggler.slower", "slower than the median by {slower_by:percent}", slower_by=slower)
        if slower is not None
        else Text("straggler.metrics-only", "with unusual device metrics")
    )
    values = {
        "slower_by": slower,
        "step_fraction": int(match["costs"]) / 100 if match["costs"] else None,
        "cause": None,
        "is_node": match["node"] is not None,
        "finding": finding,
        "likely_cause": match["sign"] or Text("straggler.unknown", "unknown: no measured metric explains it"),
    }
    ranks = [int(match["rank"])] if match["rank"] else _numbers(match["ranks"])
    return "straggler", values, (match["host"] or match["node"],), ranks


def _numbers(text: str) -> list[int]:
    found: list[int] = []
    for piece in text.split(","):
        low, _, high = piece.partition("-")
        found += range(int(low), int(high or low) + 1)
    return found


def _resolved(text: str, kind: str) -> _Line:
    match = _KEEPS_UP.fullmatch(text)
    if match is None:
        return _legacy(text, kind)
    ranks = (int(match["rank"]),) if match["rank"] else ()
    return "straggler-resolved", {"is_node": not ranks}, (match["host"],), ranks


def _notice(text: str, kind: str) -> _Line:
    target, _, reply = text.partition(": ")
    return "notification-failed", {"target": target, "kind": None, "count": 1, "reply": reply}, (), ()


_LINES: Mapping[str, Callable[[str, str], _Line]] = {
    "note": _note,
    "straggler": _straggler,
    "straggler-over": _resolved,
    "notice": _notice,
}
