"""Why a job is in its state, as data: a code, the hosts and ranks concerned, values, and a nested cause."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Any, Union

from ascendrun.core.dataclass import dataclass, load_dataclass
from ascendrun.text import Rendered, Text, carried, from_json, to_json

Detail = Union[Rendered, str]
"""Report of a node or a tool; str: its output."""


@carried("$reason")
@dataclass(frozen=True)
class Reason(Rendered):
    """Why a job is in its state. `code`: of REASONS, or of another release. `hosts`, `ranks`: those that it concerns,
    of its cause if it names none itself. `why`: its cause, None: it has none. `str()` renders it by REASONS and
    zh.json."""

    code: str
    hosts: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict, metadata={"read": from_json})
    why: Detail | None = None

    def __hash__(self) -> int:
        return hash((self.code, self.hosts, self.ranks))

    def text(self) -> Text:
        """Return the sentence. Its values are those of the reason; {host} and {rank} are the first of theirs."""
        own = {"host": next(iter(self.hosts), None), "rank": next(iter(self.ranks), None), "count": len(self.hosts)}
        shown = {**own, "hosts": self.hosts, "ranks": self.ranks, "why": self.why, **self.values}
        return Text(f"reason.{self.code}", REASONS.get(self.code, self.code), **shown)

    def render(self, lang: str) -> str:
        return self.text().render(lang)

    def to_json(self) -> dict[str, Any]:
        return {name: to_json(value) for name, value in vars(self).items()}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Reason:
        return load_dataclass(cls, row)


def because(
    code: str, /, hosts: Iterable[str] = (), ranks: Iterable[int] = (), why: Detail | None = None, **values: Any
) -> Reason:
    """Return the reason `code` of REASONS. Without hosts and ranks of its own it has those of its cause."""
    assert code in REASONS, code
    hosts, ranks = tuple(hosts), tuple(ranks)
    if isinstance(why, Reason) and not hosts:
        hosts, ranks = why.hosts, ranks or why.ranks
    return Reason(code, hosts, ranks, values, why)


REASONS: Mapping[str, str] = {
    "new": "waiting for the scheduler",
    "rebuilt": "rebuilt after damage to the job list; waiting for the nodes",
    "nodes-available": "{count:plural node nodes} available",
    "queued-behind": "waiting for {count:plural node nodes} (queued behind {job} {name})",
    "nodes-in-use": "waiting for {hosts:hosts} (in use by {job} {name})",
    "nodes-held": "waiting for {hosts:hosts} ({why})",
    "too-few-hosts": "{needed:plural host hosts} needed, {usable} usable; waiting for {hosts:hosts} ({why})",
    "host-unknown": "not in the hosts of the job",
    "host-unidentified": "no response yet; it may be a machine that is held",
    "host-away": "unreachable: {why}",
    "host-passed-over": "not ready for this job; used again after {until_s:clock}",
    "host-excluded": "excluded by restart.exclude_node_findings",
    "passed-over": "passed over {hosts:hosts}: {why}",
    "held-by-user": "held by {user}",
    "waiting-for-job": "waiting for {needed}",
    "dependency-unknown": "not started: required job {job} not found",
    "dependency-failed": "not started: {needed} ended {state}",
    "needed-job": "{job}",
    "needed-stage": "stage {stage} ({job})",
    "stage-files-lost": "{host} does not have the files that stage {stage} wrote to its working directory on {lost},"
    " which was reported as lost: `ascendrun undrain {lost}` if it responds again, or repeat the stage with --resume"
    " {pipeline} --from-stage {stage}",
    "checked": "checked {count:plural node nodes} in {seconds:duration}",
    "staged": "staged the code on {count:plural node nodes} in {seconds:duration}",
    "staging": "sent {done:bytes} of {total:bytes} ({share:percent}) to {nodes:plural node nodes}",
    "staging-slow": "sent {done:bytes} of {total:bytes} ({share:percent}) to {nodes:plural node nodes}; slowest:"
    " {hosts:hosts}",
    "running": "{count:plural rank ranks} running",
    "running-some": "{running} of {total} ranks running",
    "running-unseen": "{away}; ranks may still be running",
    "running-silent": "{away}; {running} of {total} ranks running {age_s:duration} ago",
    "hosts-silent": "{hosts:hosts} {state} since {since_s:clock}",
    "hosts-unheard": "{hosts:hosts} {state}",
    "unknown": "{state} when last seen, {seen_at_s:clock}; {why}",
    "no-response": "the controller does not respond",
    "found": "{why}",
    "succeeded": "{count:plural rank ranks} exited with code 0",
    "next-attempt": "attempt {attempt} waiting for its nodes",
    "restarting": "restart {number} of {limit} at {at_s:clock}: {why}",
    "restarting-uncounted": "restart at {at_s:clock}: {why}",
    "waiting-for-end": "waiting for {hosts:hosts}: processes of attempt {attempt} may still run there",
    "not-restarted": "{why}; not restarted: {rule}",
    "rule-cause": "restart.causes does not include {kind} ({finding})",
    "rule-never": "it would fail again ({finding})",
    "rule-max-restarts": "{used} of {limit} restarts in {window_s:duration} used",
    "rule-no-progress": "{stalled:plural restart restarts} without progress ({kind}: {finding})",
    "rule-repeated": "same failure at the same step twice ({kind}: {finding})",
    "preflight-failed": "preflight failed (no process was started): {why}",
    "training-refused": "not started: {why}",
    "rejected": "{why}",
    "held": "waiting for {host}: {why}",
    "no-common-ports": "waiting for a block of HCCL ports that is free on {hosts:hosts}",
    "on-host": "{host}: {why}",
    "ranks-ended-early": "the ranks on {host} ended before they finished",
    "supervisor-lost": "{host}: the supervisor of the job's ranks was killed",
    "start-timeout": "start timed out: {count:plural rank ranks} on {hosts:hosts} did not start within {limit_s:g} s"
    " (timeouts.start_s)",
    "time-limit": "time limit reached: {why}",
    "preempted": "preempted: {host} stopped its ranks ({why})",
    "separate-trainings": "the nodes train separately: the processes on {host} have a world size of {world_size}",
    "hung": "hung: {why}",
    "hung-without-host": "hung: {why}",
    "retried-by-user": "restarted on user request",
    "only-copy": "waiting for {hosts:hosts}: only copy of the checkpoint of step {step}",
    "stopped-by-user": "stopped on user request",
    "controller-restarted": "the controller was restarted before any process was started",
    "internal-error": "internal error: {why} (traceback: {log})",
    "stage-progress": "stage {number}/{stages} {stage}: {why}",
    "hang-finished": "its work ended more than {after_s:duration} ago; it is killed",
    "hang-finished-unknown": "its work has ended; it is killed",
    "hang-idle": "no activity for {after_s:duration} after another rank exited 0",
    "hang-idle-unknown": "no activity after another rank exited 0",
    "rank-exited": "rank {rank} on {host} exited with code {code}",
    "rank-killed": "rank {rank} on {host} was killed by signal {signal}",
    "rank-start-failed": "rank {rank} on {host} failed to start: {why}",
    "rank-failed": "rank {rank} on {host} failed first",
    "ranks-failed": "ranks {ranks:ranks} on {hosts:hosts} failed first",
    "hosts-failed": "{hosts:hosts} failed first",
    "first-unknown": "ranks failed; which of them failed first is not known",
    "launcher-exited": "the launcher of the ranks on {host} exited with code {code}",
    "launcher-killed": "the launcher of the ranks on {host} was killed by signal {signal}",
    "host-start-failed": "{host} failed to start its ranks: {why}",
    "node-rebooted": "{host} was rebooted; its ranks are lost",
    "node-directory-gone": "{host} has neither records nor processes of the job (container or home recreated); its"
    " ranks are lost",
    "node-released": "{host} was released by a user; its ranks are lost",
}
"""English template by code; zh.json has the Chinese ones by "reason." and the code."""


def hung_at_exit(cause: str, after_s: float | None) -> Detail:
    """Return why a rank counts as hung at exit. A cause of another release is returned unchanged."""
    if cause not in ("finished", "idle"):
        return cause
    return because(f"hang-{cause}-unknown") if after_s is None else because(f"hang-{cause}", after_s=after_s)


def needed(job: str, stage: str | None) -> Reason:
    """Return how a required job is named."""
    return because("needed-job", job=job) if stage is None else because("needed-stage", stage=stage, job=job)


LOST = {"rebooted": "node-rebooted", "directory-gone": "node-directory-gone", "by-user": "node-released"}
"""Code of the reason for each reason why a node is lost."""


CONFIDENCE: Mapping[str, Text] = {
    "certain": Text("confidence.certain", "certain"),
    "likely": Text("confidence.likely", "likely"),
    "unknown": Text("confidence.unknown", "unknown"),
    "preliminary": Text("confidence.preliminary", "preliminary"),
}


@dataclass(frozen=True)
class FirstFailure:
    """What failed first in an attempt. `reason`: with its hosts, and its ranks, (): the whole host. `confidence`:
    certain, likely or unknown, of the diagnosis; preliminary: by the exits alone, before the diagnosis."""

    reason: Reason
    confidence: str = "preliminary"

    @property
    def is_preliminary(self) -> bool:
        return self.confidence == "preliminary"
