"""What the objects of an allocation say of its state. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from ascendrun.backends.kubernetes.manifests import KEY, NODES, NUMBER
from ascendrun.core.allocations import AllocationState, Gone, Granted, Waiting
from ascendrun.core.hosts import Host
from ascendrun.core.jobs.reasons import Reason, because

LATE_S = 30.0
"""Seconds beyond its grace period after which a pod that is deleted counts as gone: its node is off, and the control
plane cannot say more."""
NEVER = frozenset({"ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError"})
"""States of a waiting container that only a change ends."""
ENDED = frozenset({"Aborted", "Completed", "Failed", "Terminated", "Succeeded"})
"""States of a vcjob or AscendJob without pods."""


def by_key(items: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the objects of each allocation."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for item in items:
        found.setdefault(item["metadata"].get("labels", {}).get(KEY, ""), []).append(item)
    return found


def state_of(items: Sequence[Mapping[str, Any]], *, place: str) -> AllocationState:
    """Return the state of one allocation by its objects. `place`: what a host has as its allocation."""
    owners = [item for item in items if item["kind"] != "Pod"]
    pods = sorted((item for item in items if item["kind"] == "Pod"), key=_order)
    nodes = int(items[0]["metadata"]["labels"][NODES])
    for pod in pods:
        if pod["status"].get("phase") in ("Failed", "Succeeded"):
            return _end_of(pod)
    for owner in owners:
        phase = phase_of(owner)
        if phase in ENDED:
            why = because("kubernetes-job", job=name_of(owner), state=phase, why=_message_of(owner))
            return Gone("failed" if phase == "Failed" else "cancelled", why)
    ending = [name_of(item) for item in items if "deletionTimestamp" in item["metadata"]]
    if ending:
        return Waiting(because("kubernetes-ending", pods=ending))
    if not owners and len(pods) < nodes:
        return Gone("node-failed", because("kubernetes-deleted", count=nodes - len(pods)))
    waits = [wait for pod in pods for wait in _waits(pod)]
    if waits:
        return min(waits, key=lambda wait: wait.will_start)
    if len(pods) < nodes:
        job, phase = name_of(owners[0]), phase_of(owners[0])
        if not phase:
            return Waiting(because("kubernetes-unseen", job=job))
        return Waiting(because("kubernetes-job", job=job, state=phase, why=_message_of(owners[0])))
    return Granted(
        tuple(Host(name_of(pod), addr=pod["status"]["podIP"], engine="kubernetes", allocation=place) for pod in pods)
    )


def is_over(items: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether nothing of an allocation runs any more."""
    pods = [item["status"].get("phase") in ("Failed", "Succeeded") for item in items if item["kind"] == "Pod"]
    owners = [phase_of(item) in ENDED for item in items if item["kind"] != "Pod"]
    return all(pods) and all(owners) and any(pods + owners)


def phase_of(owner: Mapping[str, Any]) -> str:
    """Return the state of a vcjob or an AscendJob; "": its controller has not seen it yet."""
    status = owner.get("status") or {}
    conditions = [one["type"] for one in status.get("conditions") or () if one.get("status") == "True"]
    return str((status.get("state") or {}).get("phase") or (conditions[-1] if conditions else ""))


def _message_of(owner: Mapping[str, Any]) -> str:
    return str(((owner.get("status") or {}).get("state") or {}).get("message") or "")


def name_of(item: Mapping[str, Any]) -> str:
    return str(item["metadata"]["name"])


def _order(pod: Mapping[str, Any]) -> tuple[int, str]:
    """By number; the pods of a controller by their names, of which the longer has the higher number."""
    name = name_of(pod)
    return int(pod["metadata"]["labels"].get(NUMBER, len(name))), name


def is_late(item: Mapping[str, Any], now_s: float) -> bool:
    """Return whether a deleted object should have gone long ago, with its grace period."""
    text = item["metadata"].get("deletionTimestamp")
    if text is None:
        return False
    until = datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    return now_s > until.timestamp() + LATE_S


def _end_of(pod: Mapping[str, Any]) -> Gone:
    """Return why a pod has ended. Its eviction says so in a condition (Kubernetes 1.26), else by `reason`."""
    status = pod["status"]
    taken = [one for one in status.get("conditions") or () if one["type"] == "DisruptionTarget"]
    ends = [one.get("state", {}).get("terminated") or {} for one in status.get("containerStatuses") or ()]
    codes = [f"{one.get('reason', '')} {one.get('exitCode', '')}".strip() for one in ends if one]
    why = [*(one.get("reason") for one in taken), status.get("reason"), status.get("message"), *codes]
    reason = because("kubernetes-ended", pod=name_of(pod), why=", ".join(str(one) for one in why if one) or "-")
    if status.get("reason") == "DeadlineExceeded":
        return Gone("time-limit", reason)
    if taken:
        return Gone("preempted", reason)
    return Gone("node-failed" if status.get("reason") else "failed", reason)


def _waits(pod: Mapping[str, Any]) -> Iterator[Waiting]:
    """Yield why a pod does not run yet."""
    status, name = pod["status"], name_of(pod)
    for one in status.get("conditions") or ():
        if one["type"] == "PodScheduled" and one["status"] == "False":
            yield Waiting(
                because("kubernetes-unschedulable", pod=name, why=one.get("message") or one.get("reason") or "")
            )
            return
    for container in status.get("containerStatuses") or ():
        state = container.get("state", {}).get("waiting")
        if state is not None:
            yield _waiting(name, str(state.get("reason") or ""), str(state.get("message") or ""))
            return
    if status.get("phase") != "Running" or not status.get("podIP"):
        yield Waiting(because("kubernetes-pending", pod=name, state=str(status.get("phase") or "")))


def _waiting(name: str, state: str, why: str) -> Waiting:
    is_image = "Image" in state
    reason: Reason = because("kubernetes-image" if is_image else "kubernetes-container", pod=name, state=state, why=why)
    return Waiting(reason, will_start=state not in NEVER)
