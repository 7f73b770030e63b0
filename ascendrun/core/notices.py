"""Which events become notifications, for whom, and when a delivery is retried."""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from ascendrun.core.dataclass_json import load_dataclass
from ascendrun.core.events import Event, JobEvent
from ascendrun.core.jobs.job import Job, State
from ascendrun.core.logs.redaction import redact_text
from ascendrun.text import Text, fill, from_json, language, to_json
from ascendrun.text.format import fold_hosts

SCHEMA_VERSION = 2
SERVICES = ("generic", "feishu", "lark", "dingtalk", "wecom", "slack")
TEXT_LIMIT = 1000
"""Of a reason in a notification, in characters; `explain` and `logs` show the rest."""

_STATE_KINDS: Mapping[str, str] = {
    State.RUNNING.value: "started",
    State.SUCCEEDED.value: "succeeded",
    State.STOPPED.value: "stopped",
    State.FAILED.value: "failed",
    State.BACKOFF.value: "retrying",
}
_EVENT_KINDS = frozenset({"straggler", "unreachable", "reachable"})

ON: Mapping[str, frozenset[str]] = {
    **{kind: frozenset({kind}) for kind in ("started", "succeeded", "stopped", "failed", "retrying", "straggler")},
    "ended": frozenset({"succeeded", "stopped", "failed"}),
    "unreachable": frozenset({"unreachable", "reachable"}),
}
"""Values of `events`, each with its kinds of notices."""

DEFAULT_JOBS = ("*", "!deep")
"""All but the small jobs with which `doctor --deep` measures."""
BAD_KINDS = frozenset({"failed", "unreachable", "straggler"})


@dataclass(frozen=True)
class Notice:
    """A notification about an event of a job. `id`: the same for the same event, also when it is sent twice.

    `reason`: why the state changed, or the message of the event. `event`: what it is about, None: a test.
    `head`: host name of the head node. Times are UTC seconds.
    """

    id: str
    kind: str
    at_s: float
    reason: Text
    head: str
    event: Event | None = None
    job: str | None = None
    name: str | None = None
    state: str | None = None
    attempt: int | None = None
    hosts: tuple[str, ...] = ()
    ranks: int | None = None
    created_at_s: float | None = None
    started_at_s: float | None = None
    ended_at_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        event = None if self.event is None else self.event.to_json()
        return {**vars(self), "hosts": list(self.hosts), "reason": to_json(self.reason), "event": event}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Notice:
        return load_dataclass(cls, values, hosts=tuple, reason=from_json, event=Event.from_json)


@dataclass(frozen=True)
class Target:
    """Where notices go. `type`: a service, "hook" or "deadman". `format`: "rich" (card, markdown, blocks) or "text".

    `url` and `secret` are credentials: never shown; `url_file` and `secret_file` hold them, read at every sending.
    `jobs`: globs over names and ids; one with ! before it excludes. `command`, `timeout_s`: of a hook. `suffixes`: of
    a dead-man's switch, by kind of notice, what is appended to its URL; `interval_s`: how often it is requested while a
    job is live. `lang`: None: the language of the process.
    """

    name: str
    type: str
    events: tuple[str, ...] = ("ended",)
    jobs: tuple[str, ...] = DEFAULT_JOBS
    format: str = "rich"
    lang: str | None = None
    url: str | None = field(default=None, repr=False)
    url_file: str | None = None
    secret: str | None = field(default=None, repr=False)
    secret_file: str | None = None
    command: tuple[str, ...] = ()
    timeout_s: float = 30.0
    suffixes: Mapping[str, str] = field(default_factory=dict)
    interval_s: float = 60.0

    @property
    def language(self) -> str:
        return self.lang or language()

    def selects(self, notice: Notice) -> bool:
        if notice.kind == "test":
            return True
        kinds = set(self.suffixes) if self.type == "deadman" else {kind for name in self.events for kind in ON[name]}
        return notice.kind in kinds and self.is_for(notice.name or "", notice.job or "")

    def is_for(self, name: str, job_id: str) -> bool:
        """Whether `jobs` names the job; only excluding globs mean all others."""

        def fits(glob: str) -> bool:
            return fnmatch.fnmatchcase(name, glob) or fnmatch.fnmatchcase(job_id, glob)

        wanted = [glob for glob in self.jobs if not glob.startswith("!")] or ["*"]
        return any(map(fits, wanted)) and not any(fits(glob[1:]) for glob in self.jobs if glob.startswith("!"))


def notice_of(job: Job, item: JobEvent, *, head_id: str, head: str) -> Notice | None:
    """The notification about an event of a job, None: it makes none.

    A change of state makes one for each job, attempt and state, however often it is decided.
    """
    event = item.event
    if event.code == "state-changed":
        state, reason = str(event.values.get("state")), event.values.get("reason")
        kind, mark = _STATE_KINDS.get(state), f"{job.attempt}/{state}"
    else:
        state, reason = job.state.value, event.message()
        kind, mark = event.code if event.code in _EVENT_KINDS else None, f"{job.attempt}/{event.code}/{item.number}"
    if kind is None:
        return None
    return Notice(
        id=f"{head_id}/{job.id}/{mark}",
        kind=kind,
        at_s=event.at_s,
        reason=reason if isinstance(reason, Text) else event.message(),
        head=head,
        event=event,
        job=job.id,
        name=job.name,
        state=state,
        attempt=job.attempt,
        hosts=job.hosts,
        ranks=job.world_size or None,
        created_at_s=job.created_at_s,
        started_at_s=job.started_at_s,
        ended_at_s=job.ended_at_s,
    )


def make_test_notice(*, head: str, at_s: float) -> Notice:
    """What `notify --test` sends."""
    reason = Text("notice.test", "test notification; later ones look like this")
    return Notice(id=f"test/{head}/{at_s:.3f}", kind="test", at_s=at_s, head=head, reason=reason)


# ---------------------------------------------------------------- words

_TITLES: Mapping[str, str] = {
    "started": "{name} is running",
    "succeeded": "{name} succeeded",
    "stopped": "{name} was stopped",
    "failed": "{name} FAILED",
    "retrying": "{name} is being retried",
    "straggler": "{name}: slow rank",
    "unreachable": "{name}: hosts unreachable",
    "reachable": "{name}: hosts reachable again",
    "test": "test notification",
}
_LABELS: Mapping[str, str] = {
    **{name: name for name in ("job", "reason", "hosts", "ranks", "duration", "attempt")},
    "at": "time",
    "head": "head node",
    "next": "next command",
}
_ADVICE: Mapping[str, str] = {
    "failed": "ascendrun explain {job}",
    "straggler": "ascendrun top",
    "unreachable": "ascendrun show {job}",
}


@dataclass(frozen=True)
class Words:
    """A notice in one language: a title, and named facts, one a line. Free text in it is redacted and on one line."""

    title: str
    facts: tuple[tuple[str, str], ...]
    is_bad: bool

    def as_text(self) -> str:
        return "\n".join([self.title, *(f"{name}: {value}" for name, value in self.facts)])


def describe(notice: Notice, lang: str) -> Words:
    """The notice in words. Every title begins with "ascendrun": robots that demand a keyword can be given this one."""

    def label(name: str) -> str:
        return fill(f"notice.label.{name}", _LABELS[name], {}, lang=lang)

    title = fill(f"notice.title.{notice.kind}", _TITLES[notice.kind], {"name": notice.name}, lang=lang)
    facts = []
    if notice.job is not None:
        attempt = f" ({label('attempt')} {notice.attempt})" if (notice.attempt or 1) > 1 else ""
        facts.append((label("job"), f"{notice.job}{attempt}"))
    reason = " ".join(redact_text(notice.reason.render(lang)[:TEXT_LIMIT]).split())
    if reason:
        facts.append((label("reason"), reason))
    if notice.hosts:
        facts.append((label("hosts"), fold_hosts(notice.hosts)))
    if notice.ranks:
        facts.append((label("ranks"), str(notice.ranks)))
    if notice.started_at_s is not None and notice.ended_at_s is not None:
        facts.append((label("duration"), _duration(notice.ended_at_s - notice.started_at_s)))
    facts.append((label("at"), datetime.fromtimestamp(notice.at_s, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")))
    facts.append((label("head"), notice.head))
    if notice.kind in _ADVICE:
        facts.append((label("next"), _ADVICE[notice.kind].format(job=notice.job)))
    return Words(f"ascendrun: {title}", tuple(facts), notice.kind in BAD_KINDS)


def _duration(seconds: float) -> str:
    hours, rest = divmod(max(0, int(seconds)), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"


# ---------------------------------------------------------------- when

QUEUE_LIMIT = 1000
"""So many notices may wait for one target; beyond that the oldest are given up, and that is said."""
GIVE_UP_S = 6 * 3600.0
"""A notice that could not be delivered for so long helps nobody any more."""
FIRST_RETRY_S, LAST_RETRY_S = 2.0, 600.0
LONGEST_WAIT_S = 3600.0
"""However long a service asks us to wait."""

Limit = tuple[int, float]
"""So many sendings within so many seconds."""

LIMITS: Mapping[str, tuple[Limit, ...]] = {
    **dict.fromkeys(("feishu", "lark"), ((5, 1.0), (100, 60.0))),
    **dict.fromkeys(("dingtalk", "wecom"), ((20, 60.0),)),
    **dict.fromkeys(("generic", "hook"), ((20, 1.0),)),
    "slack": ((1, 1.0),),
    "deadman": ((5, 1.0),),
}
"""What the services allow one robot, see core/notice_formats.py for where they say so."""


def retry_after_s(tries: int, *, notice_id: str, asked_s: float | None = None) -> float:
    """How long to wait before the next try, after so many. `asked_s`: what the service said itself.

    Doubles from 2 s to 10 minutes, each notice up to a fifth later by its own share: what failed together does not
    come back together.
    """
    wait_s: float = min(FIRST_RETRY_S * 2.0 ** min(max(0, tries - 1), 20), LAST_RETRY_S)
    share = int(hashlib.sha256(notice_id.encode()).hexdigest()[:4], 16) / 0xFFFF
    wait_s *= 1 + share / 5
    return wait_s if asked_s is None else min(max(asked_s, wait_s), LONGEST_WAIT_S)


def free_at_s(sent_s: Sequence[float], limits: Sequence[Limit], *, now_s: float) -> float:
    """The earliest time at which one more sending stays within every limit. `sent_s`: times of earlier sendings.

    Sendings in the future (somebody set the clock) count as of now.
    """
    past = sorted(min(at_s, now_s) for at_s in sent_s)
    at_s = now_s
    for count, window_s in limits:
        if len(past) >= count:
            at_s = max(at_s, past[-count] + window_s)
    return at_s


def with_name(targets: Sequence[Target]) -> tuple[Target, ...]:
    """Targets without a name get their type as name, the second of a type `type-2`."""
    named = []
    taken = {target.name for target in targets if target.name}
    for target in targets:
        name, number = target.name or target.type, 1
        while not target.name and name in taken:
            number += 1
            name = f"{target.type}-{number}"
        taken.add(name)
        named.append(replace(target, name=name))
    return tuple(named)
