"""What is sent to Kubernetes for an allocation."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import pytest

from ascendrun.backends.kubernetes import manifests
from ascendrun.core.allocations import AllocationRequest

OPTIONS = {"type": "kubernetes", "context": "c", "namespace": "n", "kind": "pods"}


def objects(template: dict[str, Any] | None = None, /, nodes: int = 2, devices: int = 8, **options: Any) -> list[Any]:
    more = {name: options.pop(name) for name in ("length_s", "exclude") if name in options}
    wanted = AllocationRequest("h-j-0001.1", "My Job!", {**OPTIONS, **options}, nodes, devices, grace_s=29.5, **more)
    return manifests.objects_of(wanted, holder="the holder", idle_s=600.0, template=template or {}, avoided=["bad"])


def test_each_node_is_a_pod_that_waits_and_holds_its_devices() -> None:
    first, second = objects(image="site/cann:8")
    assert first["metadata"]["labels"] == {
        "app.kubernetes.io/managed-by": "ascendrun",
        "ascendrun/key": "h-j-0001.1",
        "ascendrun/nodes": "2",
        "ascendrun/number": "0",
    }
    name = first["metadata"]["name"]
    assert name.startswith("my-job-") and second["metadata"]["name"] == f"{name[:-1]}1"
    spec, container = first["spec"], first["spec"]["containers"][0]
    assert (spec["restartPolicy"], spec["automountServiceAccountToken"]) == ("Never", False)
    assert spec["terminationGracePeriodSeconds"] == 40 and "activeDeadlineSeconds" not in spec
    assert container["resources"]["limits"] == container["resources"]["requests"] == {"huawei.com/Ascend910": "8"}
    assert (container["image"], container["imagePullPolicy"]) == ("site/cann:8", "IfNotPresent")
    packed = container["command"][-3]
    assert zlib.decompress(base64.b64decode(packed)) == b"the holder"
    term = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"][0]
    assert term["matchExpressions"][0]["values"] == ["bad"]


def test_the_container_of_the_job_replaces_what_the_engine_names() -> None:
    box = {"image": "own:1", "mounts": ("/d:/d:ro", "pvc:data:/p", "emptydir:/t"), "shm_size": "64GiB", "pull": "never"}
    (pod,) = objects(nodes=1, devices=0, image="site", mounts=("/x:/x",), container=box, length_s=600.0)
    spec, container = pod["spec"], pod["spec"]["containers"][0]
    assert (container["image"], container["imagePullPolicy"]) == ("own:1", "Never") and "resources" not in container
    volumes = {volume.pop("name"): volume for volume in spec["volumes"]}
    assert volumes == {
        "shm": {"emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}},
        "mount-0": {"hostPath": {"path": "/d"}},
        "mount-1": {"persistentVolumeClaim": {"claimName": "data"}},
        "mount-2": {"emptyDir": {}},
    }
    assert [(one["mountPath"], one.get("readOnly")) for one in container["volumeMounts"]] == [
        ("/dev/shm", None),
        ("/d", True),
        ("/p", None),
        ("/t", None),
    ]
    assert spec["activeDeadlineSeconds"] == 600


def test_a_template_keeps_what_is_the_users_and_gets_ours() -> None:
    mine = {"name": "main", "env": [{"name": "A", "value": "1"}], "securityContext": {"privileged": True}}
    template = {
        "metadata": {"labels": {"team": "a"}},
        "spec": {"tolerations": [{"operator": "Exists"}], "containers": [mine, {"name": "sidecar", "image": "s"}]},
    }
    pod = objects(template, image="i")[0]
    first, second = pod["spec"]["containers"]
    assert first["name"] == "ascend" and first["securityContext"] == {"privileged": True}
    assert [one["name"] for one in first["env"]] == ["A", "ASCENDRUN_HOLDER"] and second["name"] == "sidecar"
    assert pod["spec"]["tolerations"] == [{"operator": "Exists"}]
    assert pod["metadata"]["labels"]["team"] == "a" and "ascendrun/key" in pod["metadata"]["labels"]


@pytest.mark.parametrize("kind", ["vcjob", "ascendjob"])
def test_a_job_of_a_controller_starts_all_its_pods_or_none(kind: str) -> None:
    path = {"vcjob": ["tasks", 0], "ascendjob": ["replicaSpecs", "Worker"]}[kind]
    (job,) = objects({"spec": {"maxRetry": 1}}, nodes=3, kind=kind, image="i", queue="q")
    spec, gang = job["spec"], job["spec"] if kind == "vcjob" else job["spec"]["runPolicy"]["schedulingPolicy"]
    assert (gang["minAvailable"], gang["queue"], spec["maxRetry"]) == (3, "q", 1)
    part = spec[path[0]][path[1]]
    assert part["replicas"] == (3 if kind == "vcjob" else 2)
    assert part["template"]["metadata"]["labels"]["ascendrun/key"] == job["metadata"]["labels"]["ascendrun/key"]
    assert "Worker" not in str(objects(nodes=1, kind="ascendjob", image="i"))


def test_what_the_answer_of_the_api_server_lacks_is_what_it_does_not_know() -> None:
    sent = {"spec": {"minAvailble": 1, "suspend": False, "tasks": [{"name": "a", "labels": {}}, {"nam": "b"}]}}
    kept = {"spec": {"tasks": [{"name": "a", "uid": "1"}, {"name": ""}], "queue": "default"}, "status": {}}
    assert list(manifests.dropped(sent, kept)) == ["spec.minAvailble", "spec.tasks[1].nam"]
    assert not list(manifests.dropped(sent, sent)) and not list(manifests.dropped(sent, None))
