"""Notifications: their events, their targets, and the times of retries."""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from datetime import datetime, timezone

from ascendrun.core.dataclass import dataclass
from ascendrun.core.events import Event, JobEvent
from ascendrun.core.jobs.job import Job, State
from ascendrun.core.jobs.reasons import CONFIDENCE, Reason
from ascendrun.core.logs.redaction import redact_text
from ascendrun.text import Text, language, listed
from ascendrun.text.format import fold_hosts

SCHEMA_VERSION = 2
SERVICES = ("generic", "feishu", "lark", "dingtalk", "wecom", "slack", "apprise")
TEXT_LIMIT = 1000
"""Maximum characters of a reason in a notification; `explain` and `logs` show the rest."""

_STATE_KINDS: Mapping[str, str] = {
    State.RUNNING.value: "started",
    State.SUCCEEDED.value: "succeeded",
    State.STOPPED.value: "stopped",
    State.FAILED.value: "failed",
    State.BACKOFF.value: "retrying",
}
_HEAD_KINDS = frozenset({"standby-missing"})
"""Of events that belong to no job."""
_EVENT_KINDS = frozenset({"straggler", "hang", "unreachable", "reachable", "gave-up", "restart-waits"})

ON: Mapping[str, frozenset[str]] = {
    **{
        kind: frozenset({kind})
        for kind in ("started", "succeeded", "stopped", "failed", "retrying", "gave-up", "straggler", "hang")
    },
    "waits": frozenset({"restart-waits"}),
    "standby": _HEAD_KINDS,
    "ended": frozenset({"succeeded", "stopped", "failed"}),
    "unreachable": frozenset({"unreachable", "reachable"}),
}
"""Values of `events`, each with its kinds of notices."""

DEFAULT_JOBS = ("*", "!deep")
"""All jobs except the small jobs of `doctor --deep`."""
BAD_KINDS = frozenset({"failed", "unreachable", "straggler", "hang", "gave-up", "restart-waits"}) | _HEAD_KINDS


@dataclass(frozen=True)
class Notice:
    """A notification about an event of a job, or of the head (`job` is None). `id`: equal for the same event, also when
    sent twice.

    `reason`: why the state changed, or the message of the event. `event`: what it is about, None: a test.
    `head`: host name of the head node. Times are UTC seconds.
    """

    id: str
    kind: str
    at_s: float
    reason: Reason | Text
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


@dataclass(frozen=True)
class Target:
    """Recipient of notices. `type`: a service, "hook" or "deadman". `format`: "rich" (card, markdown, blocks), "text".

    `url` and `secret` are credentials: never shown; `url_file` and `secret_file` contain them, read for each request.
    `jobs`: globs over names and ids; one with ! before it excludes. `command`, `timeout_s`: of a hook. `suffixes`: of
    a dead-man's switch, by kind of notice, the suffix of its URL; `interval_s`: seconds between requests while a job
    is live. `lang`: None: the language of the process.
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
    def block(self) -> str:
        """The block of the settings that has it."""
        return self.type if self.type in ("hook", "deadman") else "notify"

    @property
    def language(self) -> str:
        return self.lang or language()

    def selects(self, notice: Notice) -> bool:
        if notice.kind == "test":
            return True
        kinds = set(self.suffixes) if self.type == "deadman" else {kind for name in self.events for kind in ON[name]}
        return notice.kind in kinds and (notice.job is None or self.is_for(notice.name or "", notice.job))

    def is_for(self, name: str, job_id: str) -> bool:
        """Return whether `jobs` matches the job; if all globs exclude, all other jobs match."""

        def fits(glob: str) -> bool:
            return fnmatch.fnmatchcase(name, glob) or fnmatch.fnmatchcase(job_id, glob)

        wanted = [glob for glob in self.jobs if not glob.startswith("!")] or ["*"]
        return any(map(fits, wanted)) and not any(fits(glob[1:]) for glob in self.jobs if glob.startswith("!"))


@dataclass(frozen=True)
class NoticeSettings:
    """Targets of notifications, each with a unique name: the services, the hook, the dead man's switch. `origins`: for
    each block the file that defines it."""

    targets: tuple[Target, ...] = ()
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def deadman(self) -> Target | None:
        return next((target for target in self.targets if target.type == "deadman"), None)


def notice_of(job: Job | None, item: JobEvent, *, head_id: str, head: str) -> Notice | None:
    """Return the notification about an event of a job, or of none; None: it makes none.

    A state change makes one notification per job, attempt and state, also if decided repeatedly.
    """
    event = item.event
    if job is None:
        mark = f"{head_id}/{event.code}/{item.number}"
        made = Notice(mark, event.code, event.at_s, event.message(), head, event)
        return made if event.code in _HEAD_KINDS else None
    if event.code == "state-changed":
        state, reason = str(event.values.get("state")), event.values.get("reason")
        is_held = state == State.BACKOFF.value and event.values.get("cause") == "held"  # nothing failed
        kind, mark = None if is_held else _STATE_KINDS.get(state), f"{job.attempt}/{state}"
    else:
        state, reason = job.state.value, event.message()
        kind, mark = event.code if event.code in _EVENT_KINDS else None, f"{job.attempt}/{event.code}/{item.number}"
    if kind is None:
        return None
    return Notice(
        id=f"{head_id}/{job.id}/{mark}",
        kind=kind,
        at_s=event.at_s,
        reason=reason if isinstance(reason, Reason) else event.message(),
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


def with_diagnosis(notice: Notice, job: Job, *, is_late: bool) -> Notice | None:
    """Return the notice of a failure with what failed first as it is known now, and how certain that is; other notices
    as they are. None: the diagnosis is awaited, unless it `is_late`."""
    from ascendrun.core.jobs.draft import judge_actions

    if notice.kind != "failed" or notice.event is None or (job.state, job.attempt) != (State.FAILED, notice.attempt):
        return notice
    if judge_actions(job) and not is_late:
        return None
    confidence = None if job.first_failure is None else job.first_failure.confidence
    event = replace(notice.event, values={**notice.event.values, "reason": job.reason, "confidence": confidence})
    return replace(notice, reason=job.reason, event=event)


def make_test_notice(*, head: str, at_s: float) -> Notice:
    """Return the notice of `notify --test`."""
    reason = Text("notice.test", "test notification; later ones look like this")
    return Notice(id=f"test/{head}/{at_s:.3f}", kind="test", at_s=at_s, head=head, reason=reason)


# ---------------------------------------------------------------- text

_ADVICE: Mapping[str, str] = {
    "failed": "ascendrun explain {job}",
    "gave-up": "ascendrun explain {job}",
    "restart-waits": "ascendrun show {job}",
    "straggler": "ascendrun top",
    "hang": "ascendrun stacks {job}",
    "unreachable": "ascendrun show {job}",
    "standby-missing": "ascendrun controller status",
}


@dataclass(frozen=True)
class Words:
    """A notice in one language: a title, and named facts, one per line. Free text is redacted and on one line."""

    title: str
    facts: tuple[tuple[str, str], ...]
    is_bad: bool

    def as_text(self) -> str:
        return "\n".join([self.title, *(f"{name}: {value}" for name, value in self.facts)])


def describe(notice: Notice, lang: str) -> Words:
    """Return the notice as text. Every title starts with "ascendrun", for robots that require a keyword."""

    def label(name: str) -> str:
        return listed(f"notice.label.{name}").render(lang)

    title = listed(f"notice.title.{notice.kind}", name=notice.name).render(lang)
    facts = []
    if notice.job is not None:
        attempt = f" ({label('attempt')} {notice.attempt})" if (notice.attempt or 1) > 1 else ""
        facts.append((label("job"), f"{notice.job}{attempt}"))
    reason = " ".join(redact_text(notice.reason.render(lang)[:TEXT_LIMIT]).split())
    sure = None if notice.event is None else CONFIDENCE.get(str(notice.event.values.get("confidence")))
    if reason:
        facts.append((label("reason"), reason if sure is None else f"{reason} [{sure.render(lang)}]"))
    if notice.hosts:
        facts.append((label("hosts"), fold_hosts(notice.hosts)))
    if notice.ranks:
        facts.append((label("ranks"), str(notice.ranks)))
    if notice.started_at_s is not None and notice.ended_at_s is not None:
        seconds = max(0, int(notice.ended_at_s - notice.started_at_s))
        facts.append((label("duration"), f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"))
    facts.append((label("at"), datetime.fromtimestamp(notice.at_s, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")))
    facts.append((label("head"), notice.head))
    if notice.kind in _ADVICE:
        facts.append((label("next"), _ADVICE[notice.kind].format(job=notice.job)))
    return Words(f"ascendrun: {title}", tuple(facts), notice.kind in BAD_KINDS)


# ---------------------------------------------------------------- times

GIVE_UP_S = 6 * 3600.0
"""Seconds after which an undelivered notice is discarded."""
FIRST_RETRY_S, LAST_RETRY_S = 2.0, 600.0
LONGEST_WAIT_S = 3600.0
"""Upper limit in seconds of a pause that a service requires."""

Limit = tuple[int, float]
"""(count, seconds): maximum number of requests in this time."""

LIMITS: Mapping[str, tuple[Limit, ...]] = {
    **dict.fromkeys(("feishu", "lark"), ((5, 1.0), (100, 60.0))),
    **dict.fromkeys(("dingtalk", "wecom"), ((20, 60.0),)),
    **dict.fromkeys(("generic", "hook"), ((20, 1.0),)),
    **dict.fromkeys(("slack", "apprise"), ((1, 1.0),)),
    "deadman": ((5, 1.0),),
}
"""Limits of the services for one robot; sources: core/notices/formats.py."""


def retry_after_s(tries: int, *, notice_id: str, requested_s: float | None = None) -> float:
    """Return the seconds before the next try, after `tries` tries. `requested_s`: the pause that the service requires.

    Doubles from 2 s to 10 minutes; each notice adds up to a fifth, by its id, so that notices that failed together are
    not retried together.
    """
    wait_s: float = min(FIRST_RETRY_S * 2.0 ** min(max(0, tries - 1), 20), LAST_RETRY_S)
    share = int(hashlib.sha256(notice_id.encode()).hexdigest()[:4], 16) / 0xFFFF
    wait_s *= 1 + share / 5
    return wait_s if requested_s is None else min(max(requested_s, wait_s), LONGEST_WAIT_S)


def free_at_s(sent_s: Sequence[float], limits: Sequence[Limit], *, now_s: float) -> float:
    """Return the earliest time at which one more request stays within every limit. `sent_s`: times of earlier requests.

    Times in the future (the clock was set) count as now.
    """
    past = sorted(min(at_s, now_s) for at_s in sent_s)
    at_s = now_s
    for count, window_s in limits:
        if len(past) >= count:
            at_s = max(at_s, past[-count] + window_s)
    return at_s


def with_name(targets: Sequence[Target]) -> tuple[Target, ...]:
    """Set the type as name of targets without a name, `type-2` for the second of a type."""
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
