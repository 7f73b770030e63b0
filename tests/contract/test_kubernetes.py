"""Jobs in pods: bin/test --kubernetes."""

from __future__ import annotations

import json
import os
import re
import signal
from textwrap import dedent
from typing import Any

import pytest

from tests.cluster.scenes import CODE, await_that, run_text
from tests.lib.vcluster.processes import await_true

ENDLESS = ("print", "ready", "hang")
RESTARTS = "restart: {max_restarts: 3, backoff_s: [0.1, 1]}\n"


def test_the_quick_start_of_the_page_runs_as_printed(scene: Any) -> None:
    page = (CODE / "docs/kubernetes.md").read_text(encoding="utf-8")
    settings, job = re.findall(r"```yaml\n((?:engines|name):.*?)```", page, re.DOTALL)
    (command,) = re.findall(r"^\$ ascendrun (submit .*)$", page, re.MULTILINE)
    (scene.folder / "ascendrun/config.yaml").write_text(
        settings.replace("prod", "admin")
        .replace("quay.io/ascend/cann:8.3", "localhost/site/python:1")
        .replace("pvc:data:/data", "/usr:/usr:ro")
        .replace("namespace: train", "namespace: default")
    )
    (scene.folder / "job.yaml").write_text(job)
    done = scene.ascendrun(*command.split())
    assert done.returncode == 0, run_text(done)
    said = b"".join(scene.on_head("j-0001", "rank-*.out.0").values())
    assert all(f"rank {rank} of 4\n".encode() in said for rank in range(4))
    scene.await_no_pod()


def test_a_killed_rank_is_started_again_in_the_same_pods(scene: Any) -> None:
    job = scene.launch("again", *ENDLESS, more=RESTARTS)
    scene.await_line(job, "ready", count=4)
    before = {pod["metadata"]["uid"] for pod in scene.pods()}
    os.kill(scene.everywhere(job)[-1], signal.SIGKILL)
    scene.await_line(job, "ready", count=8)
    assert {pod["metadata"]["uid"] for pod in scene.pods()} == before and scene.show(job)["job"]["attempt"] == 2
    done = scene.ascendrun("shell", job, "--rank", 3, "--", "sh", "-c", "echo $RANK; exit 7")
    assert (done.returncode, done.stdout) == (7, "3\n"), run_text(done)
    assert scene.ascendrun("stop", job).returncode == 0
    assert scene.state(job) == "STOPPED"
    scene.await_no_pod()


def test_a_job_of_which_every_record_is_lost_is_found_in_its_pods_and_goes_on_there(scene: Any) -> None:
    job = scene.launch("lost", *ENDLESS, more=RESTARTS)
    scene.await_line(job, "ready", count=4)
    before = {pod["metadata"]["uid"] for pod in scene.pods()}
    scene.lose_the_records(job)
    assert scene.ascendrun("ps").returncode == 0
    await_that(lambda: scene.ascendrun("show", job).returncode == 0, "the job is known again")
    scene.await_state(job, "RUNNING")
    os.kill(scene.everywhere(job)[-1], signal.SIGKILL)
    scene.await_line(job, "ready", count=8)
    assert {pod["metadata"]["uid"] for pod in scene.pods()} == before
    assert {"adopted", "restarting"} <= set(scene.codes(job))
    scene.ascendrun("stop", job, "--now")
    scene.await_no_pod()


def test_a_deleted_pod_is_a_lost_node_and_the_job_goes_on_in_new_pods(scene: Any) -> None:
    job = scene.launch("moved", *ENDLESS, more=RESTARTS + "checkpoint: {grace_period_s: 3}\n")
    scene.await_line(job, "ready", count=4)
    before = [pod["metadata"]["name"] for pod in scene.pods()]
    scene.kubernetes.kubectl("delete", "pod", before[0], "--force", "--grace-period=0")
    scene.await_line(job, "ready", count=8)
    after = {pod["metadata"]["name"] for pod in scene.pods() if "deletionTimestamp" not in pod["metadata"]}
    assert len(after) == 2 and not after & {*before}
    assert {"allocation-gone", "kubernetes-deleted"} <= set(scene.codes(job))
    scene.ascendrun("stop", job, "--now")
    scene.await_no_pod()


def test_an_api_server_that_restarts_ends_no_job(scene: Any) -> None:
    job = scene.launch("silent", *ENDLESS)
    scene.await_line(job, "ready", count=4)
    ranks = set(scene.everywhere(job))
    scene.kubernetes.stop("kube-apiserver")
    await_that(lambda: "engine-silent" in scene.codes(job), "the job tells of the silence")
    assert scene.state(job) == "RUNNING"
    scene.kubernetes.start("kube-apiserver")
    await_that(lambda: "engine-answers" in scene.codes(job), "the job tells of the answer")
    await_that(lambda: bool(scene.links()), "the links are back")
    assert ranks <= set(scene.everywhere(job)) and scene.state(job) == "RUNNING"
    scene.ascendrun("stop", job, "--now")
    scene.await_no_pod()


def test_a_pending_pod_tells_why_and_devices_are_a_resource(scene: Any) -> None:
    kubectl = scene.kubernetes.kubectl
    node = json.loads(kubectl("get", "node", "node1", "-o=json").stdout)
    for key in ("capacity", "allocatable"):
        node["status"][key]["huawei.com/Ascend910"] = "4"
    done = kubectl("replace", "--raw=/api/v1/nodes/node1/status", "-f", "-", stdin=json.dumps(node))
    assert done.returncode == 0, done.stderr
    file = scene.job("npus", *ENDLESS, per_node=4)
    file.write_text(file.read_text().replace("type: cpu", "type: npu"))
    job = scene.start(file, *scene.options())
    await_that(lambda: "kubernetes-unschedulable" in scene.codes(job), "the reason of the scheduler is there")
    whys = [str(event["values"].get("reason")) for event in scene.show(job)["events"] if event["code"] == "waiting"]
    assert any("Insufficient huawei.com/Ascend910" in why for why in whys)
    assert scene.ascendrun("stop", job).returncode == 0
    scene.await_no_pod()
    scene.settings(image="localhost/absent:1")
    job = scene.launch("absent", *ENDLESS, nodes=1)
    await_that(lambda: {"allocation-never", "kubernetes-image"} <= set(scene.codes(job)), "the image is missing")
    assert scene.ascendrun("stop", job).returncode == 0
    scene.await_no_pod()


def test_a_quota_makes_the_job_wait_and_it_starts_when_there_is_room(scene: Any) -> None:
    kubectl = scene.kubernetes.kubectl
    assert kubectl("create", "quota", "tight", "--hard=pods=1").returncode == 0
    await_that(lambda: '"used"' in kubectl("get", "quota", "tight", "-o=json").stdout, "the quota is counted")
    job = scene.launch("waits", "print", "x")
    await_that(lambda: "kubernetes-quota" in scene.codes(job), "the job tells of the quota")
    assert not await_true(lambda: len(scene.pods()) > 1, deadline_s=3.0) and scene.state(job) == "QUEUED"
    kubectl("delete", "quota", "tight")
    scene.await_state(job, "SUCCEEDED")
    scene.await_no_pod()


@pytest.mark.parametrize("right", [None, "pods/exec", "create", "list", "delete"])
def test_the_rights_of_the_page_are_enough_and_each_is_needed(scene: Any, right: str | None) -> None:
    page = (CODE / "docs/kubernetes.md").read_text(encoding="utf-8")
    (manifest,) = re.findall(r"((?:^    .*\n)+)", page[page.index("    apiVersion: rbac") :], re.MULTILINE)
    manifest = dedent(manifest).replace("namespace: train", "namespace: default").replace("alice", "trainer")
    if right == "pods/exec":
        manifest = manifest.replace("pods/exec", "pods/log")
    elif right is not None:
        manifest = re.sub(rf"\b{right}\b(?=[,\]])", "watch", manifest, count=1)
    kubectl = scene.kubernetes.kubectl
    applied = kubectl("apply", "-f", "-", stdin=manifest)
    assert applied.returncode == 0, applied.stderr
    scene.settings(user="trainer")
    file = scene.job("trained", "print", "x")
    if right is None:
        report = json.loads(scene.ascendrun("doctor", "--engine", "cloud", "-o", "json").stdout)
        assert len(report["hosts"]) == 1 and not report["unreached"], report
        for options in (["--dry-run"], []):
            done = scene.ascendrun("submit", file, *scene.options(1), *options)
            assert done.returncode == 0, run_text(done)
    else:
        done = scene.ascendrun("doctor", "--engine", "cloud", "-o", "json")
        assert done.returncode == 3 and right in done.stdout + done.stderr, run_text(done)
    scene.await_no_pod()
    kubectl("delete", "-f", "-", stdin=manifest)


def volcano() -> str:
    """The fields of its jobs that ascendrun sets; the test plays the controller."""
    text, number, free = {"type": "string"}, {"type": "integer"}, {"type": "object"}
    free = {**free, "x-kubernetes-preserve-unknown-fields": True}
    task = {"type": "object", "properties": {"name": text, "replicas": number, "template": free}}
    fields = {"schedulerName": text, "minAvailable": number, "maxRetry": number, "queue": text}
    fields.update(policies={"type": "array", "items": free}, tasks={"type": "array", "items": task})
    spec = {"type": "object", "properties": fields}
    schema = {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec, "status": free}}}
    names = {"kind": "Job", "plural": "jobs", "singular": "job"}
    versions = [{"name": "v1alpha1", "served": True, "storage": True, "schema": schema}]
    made = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition"}
    made["metadata"] = {"name": "jobs.batch.volcano.sh"}
    made["spec"] = {"group": "batch.volcano.sh", "scope": "Namespaced", "names": names, "versions": versions}
    return json.dumps(made)


def test_a_typo_in_a_vcjob_is_refused_and_a_right_one_runs_in_the_pods_of_its_controller(scene: Any) -> None:
    kubectl = scene.kubernetes.kubectl
    assert kubectl("apply", "-f", "-", stdin=volcano()).returncode == 0
    await_that(lambda: "minAvailable" in kubectl("get", "--raw=/openapi/v2").stdout, "its schema is published")
    vcjobs = lambda: json.loads(kubectl("get", "jobs.batch.volcano.sh", "-o=json").stdout)["items"]  # noqa: E731
    (scene.folder / "vcjob.yaml").write_text("spec: {minAvailble: 1}\n")
    scene.settings(kind="vcjob", template=str(scene.folder / "vcjob.yaml"))
    job = scene.launch("typo", "print", "x", nodes=1)
    scene.await_state(job, "FAILED")
    assert "minAvailble" in json.dumps(scene.reason(job)) and vcjobs() == []
    (scene.folder / "vcjob.yaml").write_text("spec: {maxRetry: 1}\n")
    job = scene.launch("right", "meet", "print", "x")
    await_that(lambda: "kubernetes-job" in scene.codes(job), "it waits for its controller")
    (made,) = vcjobs()
    (task,) = made["spec"]["tasks"]
    owner = {name: made[name] for name in ("apiVersion", "kind")}
    owner.update(name=made["metadata"]["name"], uid=made["metadata"]["uid"])
    for number in range(task["replicas"]):
        pod = {"apiVersion": "v1", "kind": "Pod", **task["template"]}
        pod["metadata"] = {**pod["metadata"], "name": f"{owner['name']}-node-{number}", "ownerReferences": [owner]}
        assert kubectl("create", "-f", "-", stdin=json.dumps(pod)).returncode == 0
    scene.await_state(job, "SUCCEEDED")
    await_that(lambda: vcjobs() == [], "the vcjob is gone")
    scene.await_no_pod()


def test_prune_removes_the_pods_that_another_head_has_left(scene: Any) -> None:
    job = scene.launch("left", *ENDLESS, nodes=1)
    scene.await_line(job, "ready", count=2)
    labels = {"app.kubernetes.io/managed-by": "ascendrun", "ascendrun/key": "other-j-1.1", "ascendrun/nodes": "1"}
    spec = {"restartPolicy": "Never", "automountServiceAccountToken": False}
    spec["containers"] = [{"name": "a", "image": "localhost/site/pause:1", "command": ["/busybox", "true"]}]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "other", "labels": labels}, "spec": spec}
    assert scene.kubernetes.kubectl("create", "-f", "-", stdin=json.dumps(pod)).returncode == 0
    phases = lambda: {one["metadata"]["name"]: one["status"]["phase"] for one in scene.pods()}  # noqa: E731
    await_that(lambda: phases().get("other") == "Succeeded", "it has ended")
    rows = scene.ascendrun.ask("prune", "--engine", "cloud", "--dry-run")["hosts"]
    assert [row["host"] for row in rows] == ["other"] and "other" in phases()
    scene.ascendrun.ask("prune", "--engine", "cloud")
    await_that(lambda: "other" not in phases(), "it is gone")
    assert scene.state(job) == "RUNNING"
    scene.ascendrun("stop", job, "--now")
    scene.await_no_pod()
