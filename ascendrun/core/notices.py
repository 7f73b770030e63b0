"""Which lines of a job's story become notices, for whom, in which words, and when each is tried again."""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from ascendrun.core.jobs.job import Job, State
from ascendrun.core.logs.redaction import redact_text
from ascendrun.core.names import fold_names

SCHEMA_VERSION = 1
SERVICES = ("generic", "feishu", "lark", "dingtalk", "wecom", "slack")
TEXT_LIMIT = 1000
"""Of a reason in a notice, in characters: a notice says that something happened; `explain` and `logs` say the rest."""

_STATE_KINDS: Mapping[str, str] = {
    State.RUNNING.value: "started",
    State.SUCCEEDED.value: "succeeded",
    State.STOPPED.value: "stopped",
    State.FAILED.value: "failed",
    State.BACKOFF.value: "retrying",
}
_STORY_KINDS: Mapping[str, str] = {"straggler": "straggler", "unreachable": "unreachable", "answers": "answers"}

ON: Mapping[str, frozenset[str]] = {
    "started": frozenset({"started"}),
    "ended": frozenset({"succeeded", "stopped", "failed"}),
    "succeeded": frozenset({"succeeded"}),
    "stopped": frozenset({"stopped"}),
    "failed": frozenset({"failed"}),
    "retrying": frozenset({"retrying"}),
    "straggler": frozenset({"straggler"}),
    "unreachable": frozenset({"unreachable", "answers"}),
}
"""What may stand in `on:`, and the kinds of notices that it asks for."""

DEFAULT_JOBS = ("*", "!deep")
"""All but the little jobs by which `doctor --deep` measures."""
BAD_KINDS = frozenset({"failed", "unreachable", "straggler"})


@dataclass(frozen=True)
class Notice:
    """One thing worth telling. `id`: the same for the same thing, also when a crash made us decide twice; whoever
    receives a notice twice knows by it. `head`: the name of the machine that watches. Times are UTC seconds.
    """

    id: str
    kind: str
    at_s: float
    text: str
    head: str
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
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Notice:
        return cls(**{**values, "hosts": tuple(values["hosts"])})


@dataclass(frozen=True)
class Target:
    """Where notices go. `kind`: a service, "hook" or "deadman". `style`: "rich" (card, markdown, blocks) or "text".

    `url` and `secret` are credentials: never shown; `url_file` and `secret_file` hold them, read at every sending.
    `jobs`: globs over names and ids; one with ! before it excludes. `command`, `timeout_s`: of a hook. `suffixes`: of
    a dead-man's switch, by kind of notice, what is appended to its URL; `every_s`: how often it is asked while a job
    is live.
    """

    name: str
    kind: str
    on: tuple[str, ...] = ("ended",)
    jobs: tuple[str, ...] = DEFAULT_JOBS
    style: str = "rich"
    lang: str = "en"
    url: str | None = field(default=None, repr=False)
    url_file: str | None = None
    secret: str | None = field(default=None, repr=False)
    secret_file: str | None = None
    command: tuple[str, ...] = ()
    timeout_s: float = 30.0
    suffixes: Mapping[str, str] = field(default_factory=dict)
    every_s: float = 60.0

    def wants(self, notice: Notice) -> bool:
        if notice.kind == "test":
            return True
        kinds = set(self.suffixes) if self.kind == "deadman" else {kind for word in self.on for kind in ON[word]}
        return notice.kind in kinds and self.is_for(notice.name or "", notice.job or "")

    def is_for(self, name: str, job_id: str) -> bool:
        """Whether the target cares for the job; only excluding globs mean all others."""

        def fits(glob: str) -> bool:
            return fnmatch.fnmatchcase(name, glob) or fnmatch.fnmatchcase(job_id, glob)

        wanted = [glob for glob in self.jobs if not glob.startswith("!")] or ["*"]
        return any(map(fits, wanted)) and not any(fits(glob[1:]) for glob in self.jobs if glob.startswith("!"))


def notice_of(job: Job, kind: str, text: str, *, seq: int, head_id: str, head: str, at_s: float) -> Notice | None:
    """The notice that one line of a job's story makes, None: none. `seq`: the line's number in the story.

    A change of state makes one notice for each job, attempt and state, however often it is decided.
    """
    if kind == "state":
        state, _, reason = text.partition(": ")
        word, mark = _STATE_KINDS.get(state), f"{job.attempt}/{state}"
    else:
        state, reason = job.state.value, text
        word, mark = _STORY_KINDS.get(kind), f"{job.attempt}/{kind}/{seq}"
    if word is None:
        return None
    return Notice(
        id=f"{head_id}/{job.id}/{mark}",
        kind=word,
        at_s=at_s,
        text=reason[:TEXT_LIMIT],
        head=head,
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
    return Notice(
        id=f"test/{head}/{at_s:.3f}",
        kind="test",
        at_s=at_s,
        head=head,
        text="a test: notices of this kind will look like this one",
    )


# ---------------------------------------------------------------- words

_TITLES: Mapping[str, Mapping[str, str]] = {
    "en": {
        "started": "{name} runs",
        "succeeded": "{name} succeeded",
        "stopped": "{name} was stopped",
        "failed": "{name} FAILED",
        "retrying": "{name} is tried again",
        "straggler": "{name}: a rank is slow",
        "unreachable": "{name}: hosts do not answer",
        "answers": "{name}: hosts answer again",
        "test": "test notice",
    },
    "zh": {
        "started": "{name} 已开始运行",
        "succeeded": "{name} 已成功结束",
        "stopped": "{name} 已被停止",
        "failed": "{name} 失败",
        "retrying": "{name} 将重试",
        "straggler": "{name}：有 rank 变慢",
        "unreachable": "{name}：有主机无应答",
        "answers": "{name}：主机恢复应答",
        "test": "测试通知",
    },
}
_LABELS: Mapping[str, Mapping[str, str]] = {
    "en": {
        "job": "job",
        "why": "why",
        "hosts": "hosts",
        "ranks": "ranks",
        "ran": "ran for",
        "at": "at",
        "head": "watched from",
        "next": "next",
        "attempt": "attempt",
    },
    "zh": {
        "job": "作业",
        "why": "原因",
        "hosts": "主机",
        "ranks": "rank 数",
        "ran": "运行时长",
        "at": "时间",
        "head": "管理节点",
        "next": "下一步",
        "attempt": "第几次尝试",
    },
}
_ADVICE: Mapping[str, str] = {
    "failed": "ascendrun explain {job}",
    "straggler": "ascendrun top",
    "unreachable": "ascendrun show {job}",
}
LANGUAGES = tuple(_TITLES)


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
    labels = _LABELS[lang]
    title = _TITLES[lang][notice.kind].format(name=notice.name)
    facts = []
    if notice.job is not None:
        attempt = f" ({labels['attempt']} {notice.attempt})" if (notice.attempt or 1) > 1 else ""
        facts.append((labels["job"], f"{notice.job}{attempt}"))
    if notice.text:
        facts.append((labels["why"], " ".join(redact_text(notice.text).split())))
    if notice.hosts:
        facts.append((labels["hosts"], fold_names(notice.hosts)))
    if notice.ranks:
        facts.append((labels["ranks"], str(notice.ranks)))
    if notice.started_at_s is not None and notice.ended_at_s is not None:
        facts.append((labels["ran"], _duration(notice.ended_at_s - notice.started_at_s)))
    facts.append((labels["at"], datetime.fromtimestamp(notice.at_s, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")))
    facts.append((labels["head"], notice.head))
    if notice.kind in _ADVICE:
        facts.append((labels["next"], _ADVICE[notice.kind].format(job=notice.job)))
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
    "feishu": ((5, 1.0), (100, 60.0)),
    "lark": ((5, 1.0), (100, 60.0)),
    "dingtalk": ((20, 60.0),),
    "wecom": ((20, 60.0),),
    "slack": ((1, 1.0),),
    "generic": ((20, 1.0),),
    "hook": ((20, 1.0),),
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
    """Targets without a name get their kind as name, the second of a kind `kind-2`."""
    named = []
    taken = {target.name for target in targets if target.name}
    for target in targets:
        name, number = target.name or target.kind, 1
        while not target.name and name in taken:
            number += 1
            name = f"{target.kind}-{number}"
        taken.add(name)
        named.append(replace(target, name=name))
    return tuple(named)
