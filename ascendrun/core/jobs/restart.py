"""Restart policy: what a failure was, what was tried before, and whether the job is started again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from enum import Enum
from typing import Any

from ascendrun.core.dataclass import dataclass, load_dataclass

KEPT_ATTEMPTS = 50
"""Past attempts that the record of a job keeps; more if its budget of restarts is larger."""
PROGRAM_RESTARTS = 3
"""Default of max_restarts for bundled programs: they resume from their checkpoints."""
TRIES = 2
"""Failed attempts in a row from one step after which it is set aside."""
MOST_ASIDE = 3
SILENT_PROGRESS_S = 1800.0
"""Seconds after which an attempt that reports no steps counts as progress."""
AVOID_S = 24 * 3600.0
"""Seconds during which a blamed host is chosen last."""


class Kind(str, Enum):
    """Class of a failure; decides whether, and how often, a job is started again. One of a later release is UNKNOWN."""

    INFRA = "infra"
    DEVICE = "device"
    HCCL = "hccl"
    HANG = "hang"
    STORAGE = "storage"
    OOM = "oom"
    PREEMPTED = "preempted"
    UNKNOWN = "unknown"
    USER = "user"

    @classmethod
    def _missing_(cls, value: object) -> Kind:
        return cls.UNKNOWN


DEFAULT_CAUSES = tuple(kind for kind in Kind if kind is not Kind.USER)
"""Kinds after which a job is started again unless its file says otherwise."""

WITHOUT_PROGRESS: Mapping[Kind, int | None] = {
    Kind.INFRA: 3,
    Kind.DEVICE: 3,
    Kind.HCCL: 3,
    Kind.HANG: 2,
    Kind.STORAGE: 2,
    Kind.OOM: 1,
    Kind.PREEMPTED: None,
    Kind.UNKNOWN: 1,
    Kind.USER: 1,
}
"""Restarts in a row without progress after which a job fails, by kind; None: no limit."""

_REPEATS = frozenset({Kind.UNKNOWN, Kind.OOM, Kind.USER})
"""Kinds of which the same failure at the same step, twice in a row, ends the job; a bad checkpoint can cause them."""


@dataclass(frozen=True)
class Failure:
    """The diagnosed failure of an attempt. `code`: of the diagnosis; `hosts`, `ranks`: the first to fail;
    `confidence`: certain, likely or unknown. `retry`: of the diagnosis: same, exclude, never or unknown. `is_proven`: a
    host of `hosts` has evidence of its own, such as an alarm or a link that went down. `fingerprint`: of the
    exception, equal for the same one of another attempt; "": there is none."""

    kind: Kind
    code: str
    hosts: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    confidence: str = "unknown"
    retry: str = "unknown"
    is_proven: bool = False
    fingerprint: str = ""

    @property
    def is_credible(self) -> bool:
        return self.confidence in ("certain", "likely")


def _listed(names: Sequence[str]) -> tuple[Kind, ...]:
    """Return the kinds of the names; those of a later release are skipped."""
    return tuple(kind for kind in Kind if kind.value in names)


@dataclass(frozen=True)
class RestartPolicy:
    """The section `restart` of a job file (docs/job-file.md). The default is that of a job without it.

    `has_epochs`: the program fences its checkpoints (docs/epochs.md): an old attempt cannot change those of a new one.
    """

    max_restarts: int = 0
    window_s: float = 86_400.0
    backoff_s: tuple[float, float] = (10.0, 300.0)
    causes: tuple[Kind, ...] = field(default=DEFAULT_CAUSES, metadata={"read": _listed})
    max_restarts_without_progress: int | None = None
    exclude_node_findings: tuple[str, ...] = ()
    on_unreachable_node: str = "auto"
    fence_after_s: float = 300.0
    has_epochs: bool = False


@dataclass(frozen=True)
class PastAttempt:
    """An attempt that ended. `started_at_s`: None, it never ran. `failure`: None, it was not diagnosed. Steps: None,
    unknown. `older_step`: of the next older checkpoint than the one that it resumed from, 0: none. `saved_step`: of the
    newest complete checkpoint on its hosts after its end, 0: none. `counted`: its end
    used one of the restarts. `avoid`: hosts chosen last after it."""

    number: int
    hosts: tuple[str, ...]
    started_at_s: float | None
    ended_at_s: float
    failure: Failure | None = None
    resumed_step: int | None = None
    last_step: int | None = None
    counted: bool = True
    avoid: tuple[str, ...] = ()
    older_step: int | None = None
    saved_step: int | None = None


@dataclass(frozen=True)
class Again:
    """Start the job again at `not_before_s` (UTC). `rule`: again or not-counted. `avoid`: hosts to choose last;
    `quarantine`: hosts that no job should use before they are examined."""

    not_before_s: float
    rule: str
    avoid: tuple[str, ...] = ()
    quarantine: tuple[str, ...] = ()


@dataclass(frozen=True)
class Enough:
    """Do not start the job again. `rule`: restarts-off, cause, never, max-restarts, no-progress or repeated."""

    rule: str


def decide(
    policy: RestartPolicy, past: Sequence[PastAttempt], failure: Failure, now_s: float, tag: str
) -> Again | Enough:
    """Return whether a job is started again after `failure`, and when. Pure.

    `past`: all attempts, oldest first, the failed one last. `tag`: its run id, which decides the length of the pause
    within its bounds, so that a new controller decides the same.
    """
    is_counted = failure.kind is not Kind.PREEMPTED
    stalled = attempts_without_progress(past)
    limit = WITHOUT_PROGRESS[failure.kind]
    if limit is not None and policy.max_restarts_without_progress is not None:
        limit = min(limit, policy.max_restarts_without_progress)
    if policy.max_restarts <= 0:
        return Enough("restarts-off")
    if failure.kind not in policy.causes:
        return Enough("cause")
    if failure.retry == "never" and failure.confidence == "certain":
        return Enough("never")
    if is_counted and restarts_used(policy, past[:-1], now_s) >= policy.max_restarts:
        return Enough("max-restarts")
    goes_back = policy.max_restarts_without_progress is None and may_try_older(past)
    has_saved = _has_saved(past, len(past) - 1)
    if limit is not None and stalled >= limit and not goes_back:
        return Enough("no-progress")
    is_repeated = (failure.kind in _REPEATS and _is_repeated(past)) or (stalled and comes_again(past))
    if is_repeated and not (goes_back or has_saved):
        return Enough("repeated")
    pause_s = _pause_s(policy, stalled, tag)
    rule = "again" if is_counted else "not-counted"
    quarantine = failure.hosts if failure.kind is Kind.DEVICE and failure.is_credible else ()
    return Again(now_s + pause_s, rule, _hosts_to_avoid(past, failure), quarantine)


def restarts_used(policy: RestartPolicy, past: Sequence[PastAttempt], now_s: float) -> int:
    """Return the counted restarts of the last `window_s` seconds. `past`: the attempts that were restarted."""
    return sum(one.counted and one.ended_at_s > now_s - policy.window_s for one in past)


def attempts_without_progress(past: Sequence[PastAttempt]) -> int:
    """Return the counted restarts since the last attempt that made progress; the first attempt counts as progress.

    The last attempt of `past` is the one that failed: the others were restarted.
    """
    count = 0
    for index in range(len(past) - 1, 0, -1):
        if _made_progress(past, index):
            break
        count += past[index - 1].counted
    return count


def set_aside(past: Sequence[PastAttempt]) -> tuple[int, ...]:
    """Return the steps from which attempts failed repeatedly, without progress since. `past`: oldest first."""
    steps = [one.resumed_step for one in _failed_loads(past)]
    return tuple(sorted({step for step in steps if step and steps.count(step) >= TRIES}))[:MOST_ASIDE]


def may_try_older(past: Sequence[PastAttempt]) -> bool:
    """Return whether a restart may be worth it although the last attempt made no progress: there is an older checkpoint
    than the one that it loaded."""
    failed = _failed_loads(past)
    return 0 < len(failed) < TRIES * MOST_ASIDE and failed[0].older_step != 0


def _failed_loads(past: Sequence[PastAttempt]) -> list[PastAttempt]:
    """Return the last attempts that resumed from a checkpoint and got no further, by a failure that it may explain."""
    found: list[PastAttempt] = []
    for one in reversed(past):
        if one.started_at_s is None and one.failure is None:
            continue  # it was never started
        is_explained = one.failure is not None and one.failure.kind in _REPEATS
        if not one.resumed_step or _got_further(one) or not is_explained:
            break
        found.append(one)
    return found


def _got_further(one: PastAttempt) -> bool:
    """Return whether an attempt went beyond the step that it resumed from; without steps, whether it ran for long."""
    if one.last_step is not None:
        return one.last_step > (one.resumed_step or 0)
    return one.started_at_s is not None and one.ended_at_s - one.started_at_s >= SILENT_PROGRESS_S


def keep(past: Sequence[PastAttempt], policy: RestartPolicy) -> tuple[PastAttempt, ...]:
    """Return the attempts that a record keeps: those that later decisions need."""
    return tuple(past[-max(KEPT_ATTEMPTS, policy.max_restarts) :])


def _made_progress(past: Sequence[PastAttempt], index: int) -> bool:
    """Return whether attempt `index` went further: by the checkpoint that it left, or that the next one resumed from,
    else by its steps."""
    one = past[index]
    if _has_saved(past, index):
        return True
    later = past[index + 1] if index + 1 < len(past) else None
    if later is not None and later.resumed_step is not None and one.resumed_step is not None:
        return later.resumed_step > one.resumed_step
    if one.last_step is not None:
        reached = [max(past[k].last_step or 0, past[k].resumed_step or 0) for k in range(index)]
        return one.last_step > max([one.resumed_step or 0, *reached])
    if one.started_at_s is None:
        return False
    return one.ended_at_s - one.started_at_s >= SILENT_PROGRESS_S


def _has_saved(past: Sequence[PastAttempt], index: int) -> bool:
    """Return whether attempt `index` left a complete checkpoint that is newer than the one that it resumed from."""
    one = past[index]
    before = one.resumed_step
    if before is None:  # unknown: what the attempts before it left
        before = max((earlier.saved_step or 0 for earlier in past[:index]), default=0)
    return one.saved_step is not None and one.saved_step > before


def _is_repeated(past: Sequence[PastAttempt]) -> bool:
    """Return whether the last two attempts failed in the same way at the same step."""
    if len(past) < 2 or not past[-2].counted or past[-2].failure is None or past[-1].failure is None:
        return False
    return len({(one.failure.code, one.failure.ranks, one.last_step) for one in past[-2:] if one.failure}) == 1


def comes_again(past: Sequence[PastAttempt]) -> bool:
    """Return whether the last two attempts ended by the same exception on all of their hosts, or on other hosts each
    time: it is of the program, whatever kind it seems. On the same hosts it may be theirs."""
    last = [(one, one.failure) for one in past[-2:] if one.failure is not None and one.failure.fingerprint]
    if len(last) < 2 or last[0][1].fingerprint != last[1][1].fingerprint or any(one.is_proven for _, one in last):
        return False
    blamed = [set(failure.hosts) for _, failure in last]
    is_of_all = all(hosts >= set(one.hosts) for hosts, (one, _) in zip(blamed, last))
    return is_of_all or not blamed[0] & blamed[1]


def _pause_s(policy: RestartPolicy, stalled: int, tag: str) -> float:
    """Return the pause: doubled with each attempt without progress, and 0.5 to 1.0 of that by the tag."""
    first_s, longest_s = policy.backoff_s
    import hashlib

    fraction = int.from_bytes(hashlib.sha256(tag.encode()).digest()[:4], "big") / 0xFFFFFFFF
    return float(min(longest_s, first_s * 2 ** min(stalled, 30)) * (0.5 + fraction / 2))


def _hosts_to_avoid(past: Sequence[PastAttempt], failure: Failure) -> tuple[str, ...]:
    """Return the blamed hosts to choose last. A hang, and a network fault without evidence on the host itself, blame it
    the second time only."""
    if failure.kind in (Kind.INFRA, Kind.DEVICE) or (failure.kind is Kind.HCCL and failure.is_proven):
        return failure.hosts if failure.is_credible else ()
    if failure.kind is Kind.STORAGE:
        return failure.hosts if failure.is_credible and len(failure.hosts) < len(past[-1].hosts) else ()
    if failure.kind not in (Kind.HCCL, Kind.HANG):
        return ()
    before = {
        host for one in past[:-1] if one.failure and one.failure.kind is failure.kind for host in one.failure.hosts
    }
    return tuple(host for host in failure.hosts if host in before)


def avoided_hosts(past: Sequence[PastAttempt], now_s: float) -> frozenset[str]:
    """Return the hosts that the next attempt uses only when no others are free."""
    return frozenset(host for one in past if one.ended_at_s > now_s - AVOID_S for host in one.avoid)


def excluded_hosts(policy: RestartPolicy, past: Sequence[PastAttempt]) -> frozenset[str]:
    """Return the hosts that the job never uses again (`exclude_node_findings`)."""
    findings = set(policy.exclude_node_findings)
    blamed = (one.failure for one in past if one.failure is not None and one.failure.is_credible)
    return frozenset(host for one in blamed if {one.kind.value, one.code} & findings for host in one.hosts)


def policy_of(spec: Mapping[str, Any]) -> RestartPolicy:
    """Return the policy of a job spec, as JSON values; without a section `restart`: the default."""
    section = spec.get("restart")
    if not isinstance(section, Mapping):
        return RestartPolicy()
    default = PROGRAM_RESTARTS if spec.get("program") else 0
    given = {name: value for name, value in section.items() if value is not None}
    has_epochs = bool(spec.get("program") or (spec.get("checkpoint") or {}).get("fenced"))
    return load_dataclass(RestartPolicy, {"max_restarts": default, **given, "has_epochs": has_epochs})
