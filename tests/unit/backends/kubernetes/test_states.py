"""What the objects of an allocation say of its state, and what kubectl says of a request that failed."""

from __future__ import annotations

from typing import Any

import pytest

from ascendrun.backends.kubernetes import error_of, states
from ascendrun.core.allocations import Gone, Granted, Waiting

RUNS = {"phase": "Running", "podIP": "10.0.0.1", "containerStatuses": [{"state": {"running": {}}}]}
UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available: 3 Insufficient x."}


def pod(number: int = 0, *, nodes: int = 1, deleted: str | None = None, **status: Any) -> dict[str, Any]:
    labels = {"ascendrun/key": "k", "ascendrun/nodes": str(nodes), "ascendrun/number": str(number)}
    metadata = {"name": f"p-{number}", "labels": labels, **({"deletionTimestamp": deleted} if deleted else {})}
    return {"kind": "Pod", "metadata": metadata, "spec": {"nodeName": "n"}, "status": status or RUNS}


def owner(**status: Any) -> dict[str, Any]:
    labels = {"ascendrun/key": "k", "ascendrun/nodes": "1"}
    return {"kind": "Job", "metadata": {"name": "j", "labels": labels}, "spec": {}, "status": status}


def waiting(state: str) -> dict[str, Any]:
    return {"phase": "Pending", "containerStatuses": [{"state": {"waiting": {"reason": state, "message": "m"}}}]}


def ended(phase: str = "Failed", **more: Any) -> dict[str, Any]:
    return {"phase": phase, **more}


def test_all_pods_that_run_are_granted_in_their_order() -> None:
    state = states.state_of([pod(10, nodes=2), pod(9, nodes=2)], place="n@c")
    assert isinstance(state, Granted)
    assert [(host.name, host.addr, host.engine, host.allocation) for host in state.hosts] == [
        ("p-9", "10.0.0.1", "kubernetes", "n@c"),
        ("p-10", "10.0.0.1", "kubernetes", "n@c"),
    ]


@pytest.mark.parametrize(
    ("status", "code", "will_start"),
    [
        ({"phase": "Pending"}, "kubernetes-pending", True),
        ({"phase": "Pending", "conditions": [UNSCHEDULABLE]}, "kubernetes-unschedulable", True),
        (waiting("ContainerCreating"), "kubernetes-container", True),
        (waiting("ErrImagePull"), "kubernetes-image", True),
        (waiting("ImagePullBackOff"), "kubernetes-image", False),
        (waiting("CreateContainerConfigError"), "kubernetes-container", False),
    ],
)
def test_a_pod_that_does_not_run_yet_tells_why(status: dict[str, Any], code: str, will_start: bool) -> None:
    state = states.state_of([pod(nodes=2), pod(1, nodes=2, **status)], place="n@c")
    assert isinstance(state, Waiting) and (state.reason.code, state.will_start) == (code, will_start)
    assert state.reason.values["pod"] == "p-1"


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        (ended("Succeeded"), "failed"),
        (ended(containerStatuses=[{"state": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}}]), "failed"),
        (ended(reason="Evicted", message="low on memory"), "node-failed"),
        (ended(reason="DeadlineExceeded"), "time-limit"),
        (ended(conditions=[{"type": "DisruptionTarget", "reason": "PreemptionByScheduler"}]), "preempted"),
    ],
)
def test_each_end_of_a_pod_has_its_cause(status: dict[str, Any], cause: str) -> None:
    state = states.state_of([pod(**status)], place="n@c")
    assert isinstance(state, Gone) and state.cause == cause and state.reason.code == "kubernetes-ended"


def test_a_pod_that_was_deleted_ends_the_allocation_when_it_is_gone() -> None:
    until = "2026-01-02T03:04:05Z"
    state = states.state_of([pod(nodes=2), pod(1, nodes=2, deleted=until)], place="n@c")
    assert isinstance(state, Waiting) and state.reason.code == "kubernetes-ending"
    state = states.state_of([pod(nodes=2)], place="n@c")
    assert isinstance(state, Gone) and state.cause == "node-failed"
    at_s = 1767323045.0
    late = [states.is_late(pod(deleted=until), at_s + after_s) for after_s in (-100, 29, 31)]
    assert late == [False, False, True] and not states.is_late(pod(), at_s)


@pytest.mark.parametrize(
    ("status", "kind", "what"),
    [
        ({}, Waiting, "kubernetes-unseen"),
        ({"state": {"phase": "Pending", "message": "queue is full"}}, Waiting, "kubernetes-job"),
        ({"state": {"phase": "Aborted"}}, Gone, "cancelled"),
        ({"conditions": [{"type": "Created", "status": "True"}, {"type": "Failed", "status": "True"}]}, Gone, "failed"),
    ],
)
def test_a_job_of_a_controller_tells_its_state(status: dict[str, Any], kind: type, what: str) -> None:
    state = states.state_of([owner(**status)], place="n@c")
    assert isinstance(state, kind)
    assert what == (state.cause if isinstance(state, Gone) else state.reason.code)
    assert isinstance(states.state_of([owner(state={"phase": "Running"}), pod()], place="n@c"), Granted)


def test_what_has_ended_can_be_pruned() -> None:
    assert states.is_over([pod(**ended()), pod(1, **ended("Succeeded"))])
    assert not states.is_over([pod(**ended()), pod(1)]) and not states.is_over([owner(), pod(**ended())])


@pytest.mark.parametrize(
    ("why", "code", "is_final"),
    [
        ('pods "a" is forbidden: exceeded quota: q, requested: pods=2', "kubernetes-quota", False),
        ('Error from server (Forbidden): pods is forbidden: User "u" cannot create', "kubernetes-forbidden", True),
        ('error validating data: ValidationError(Job.spec): unknown field "minAvailble"', "kubernetes-invalid", True),
        ("The connection to the server 127.0.0.1:6443 was refused", "engine-silent", False),
        ("Unable to connect to the server: net/http: TLS handshake timeout", "engine-silent", False),
        ('error: context "prod" does not exist', "kubernetes-invalid", True),
    ],
)
def test_a_request_that_would_be_refused_again_is_not_repeated(why: str, code: str, is_final: bool) -> None:
    error = error_of(why)
    assert (error.reason.code, error.is_final) == (code, is_final)
