"""The objects of an allocation: pods that wait, alone or in a job of Volcano or of the Ascend operator. Pure."""

from __future__ import annotations

import base64
import hashlib
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ascendrun.ascend import containers as vendor
from ascendrun.core.allocations import AllocationRequest
from ascendrun.node import layout

KEY, NODES, NUMBER = "ascendrun/key", "ascendrun/nodes", "ascendrun/number"
MANAGED = {"app.kubernetes.io/managed-by": "ascendrun"}
HOLDER = "pod"
CONTAINER = vendor.OPERATOR_CONTAINER
RESOURCES: Mapping[str, str] = {"vcjob": "jobs.batch.volcano.sh", "ascendjob": vendor.OPERATOR_JOBS}
"""Resources of the kinds whose pods a controller of the cluster makes."""
END_S = 10
"""Seconds beyond the grace period for which a pod that is deleted may end."""
PULL = {"never": "Never", "missing": "IfNotPresent", "always": "Always"}
_LABELS = {"ascendjob": vendor.OPERATOR_LABELS}
_MERGED = ("containers", "tasks")
"""Lists of which the first object is ours."""
_START = (
    "import base64, sys, zlib; sys.argv[1] = zlib.decompress(base64.b64decode(sys.argv[1])).decode(); exec(sys.argv[1])"
)


def objects_of(
    wanted: AllocationRequest, *, holder: str, idle_s: float, template: Mapping[str, Any], avoided: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return the objects to create. `holder`: the text of node/hold.py. `template`: an object of the user's, to which
    ours are added; `avoided`: nodes of the cluster that must not be used."""
    kind, name = wanted.options["kind"], name_of(wanted)
    labels = {**MANAGED, KEY: wanted.key, NODES: str(wanted.nodes)}
    spec = _pod_spec(wanted, holder, idle_s, avoided)
    if kind == "pods":
        rows = [
            {"name": f"{name}-{number}", "labels": {**labels, NUMBER: str(number)}} for number in range(wanted.nodes)
        ]
        pods = [{"apiVersion": "v1", "kind": "Pod", "metadata": row, "spec": spec} for row in rows]
        return [merged(template, pod) for pod in pods]
    pod = {"metadata": {"labels": labels}, "spec": spec}
    head = {"metadata": {"name": name, "labels": {**labels, **_LABELS.get(kind, {})}}}
    return [merged(template, {**(_vcjob if kind == "vcjob" else _ascendjob)(wanted, pod), **head})]


def name_of(wanted: AllocationRequest) -> str:
    """Return the name of the allocation's objects, unique by its key."""
    slug = re.sub("[^a-z0-9]+", "-", wanted.name.lower()).strip("-")[:30] or "job"
    return f"{slug}-{hashlib.sha256(wanted.key.encode()).hexdigest()[:8]}"


def _pod_spec(wanted: AllocationRequest, holder: str, idle_s: float, avoided: Sequence[str]) -> dict[str, Any]:
    options, box = wanted.options, wanted.options.get("container") or {}
    volumes, mounts = _volumes(box.get("mounts") or options.get("mounts", ()), box.get("shm_size"))
    devices = {options.get("resource", vendor.RESOURCE): str(wanted.devices)} if wanted.devices else {}
    packed = base64.b64encode(zlib.compress(holder.encode(), 9)).decode()
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": box.get("image") or options.get("image"),
        "imagePullPolicy": PULL[box.get("pull", "missing")],
        "command": [options.get("python", "python3"), "-I", "-S", "-c", _START, packed, HOLDER, str(idle_s)],
        "env": [{"name": layout.HOLDER_VARIABLE, "value": HOLDER}],
        "volumeMounts": mounts,
        **({"resources": {"limits": devices, "requests": devices}} if devices else {}),
    }
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": math.ceil(wanted.grace_s) + END_S,
        "containers": [container],
        "volumes": volumes,
    }
    if "priority_class" in options:
        spec["priorityClassName"] = options["priority_class"]
    if wanted.length_s is not None:
        spec["activeDeadlineSeconds"] = math.ceil(wanted.length_s)
    if avoided:
        rule = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": list(avoided)}
        required = {"nodeSelectorTerms": [{"matchExpressions": [rule]}]}
        spec["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    return spec


def _volumes(given: Sequence[str], shm_size: str | None) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the volumes of a pod and where they are mounted: SOURCE:TARGET[:ro], with SOURCE an absolute path of the
    node, pvc:NAME or emptydir. /dev/shm is memory."""
    size = {} if shm_size is None else {"sizeLimit": shm_size.replace("iB", "i")}
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory", **size}}]
    mounts: list[dict[str, Any]] = [{"name": "shm", "mountPath": "/dev/shm"}]
    for number, mount in enumerate(given):
        source, _, rest = mount.partition(":/")
        target, _, mode = rest.partition(":")
        kind, _, claim = source.partition(":")
        name = f"mount-{number}"
        volume: dict[str, Any] = {"hostPath": {"path": source}}
        if kind == "pvc":
            volume = {"persistentVolumeClaim": {"claimName": claim}}
        elif kind == "emptydir":
            volume = {"emptyDir": {}}
        volumes.append({"name": name, **volume})
        mounts.append({"name": name, "mountPath": f"/{target}", **({"readOnly": True} if mode == "ro" else {})})
    return volumes, mounts


def _vcjob(wanted: AllocationRequest, pod: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job of Volcano, which starts all its pods or none. It ends when one of them does: a job goes on in the
    next allocation."""
    queue = {"queue": wanted.options["queue"]} if "queue" in wanted.options else {}
    ends = [{"event": event, "action": "TerminateJob"} for event in ("PodEvicted", "PodFailed")]
    task = {"name": "node", "replicas": wanted.nodes, "template": pod}
    spec = {"schedulerName": "volcano", "minAvailable": wanted.nodes, **queue, "policies": ends, "tasks": [task]}
    return {"apiVersion": "batch.volcano.sh/v1alpha1", "kind": "Job", "spec": spec}


def _ascendjob(wanted: AllocationRequest, pod: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job of the Ascend operator: one master, the others workers."""
    queue = {"queue": wanted.options["queue"]} if "queue" in wanted.options else {}
    replicas = {
        role: {"replicas": count, "restartPolicy": "Never", "template": pod}
        for role, count in (("Master", 1), ("Worker", wanted.nodes - 1))
        if count
    }
    policy = {"schedulingPolicy": {"minAvailable": wanted.nodes, **queue}}
    spec = {"schedulerName": "volcano", "runPolicy": policy, "replicaSpecs": replicas}
    return {**vendor.OPERATOR_OBJECT, "spec": spec}


def dropped(sent: object, kept: object, path: str = "") -> Iterator[str]:
    """Yield the fields of a manifest that the API server does not know: what it answers lacks them. It also leaves out
    values such as false and 0."""
    if isinstance(sent, dict) and isinstance(kept, dict):
        for key, value in sent.items():
            if key in kept:
                yield from dropped(value, kept[key], f"{path}.{key}" if path else key)
            elif value:
                yield f"{path}.{key}" if path else key
    elif isinstance(sent, list) and isinstance(kept, list):
        for index, (one, other) in enumerate(zip(sent, kept)):
            yield from dropped(one, other, f"{path}[{index}]")


def merged(template: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object of the user's with ours added: our values win, and lists follow each other."""
    found = dict(template)
    for name, value in ours.items():
        given = template.get(name)
        if isinstance(given, Mapping) and isinstance(value, Mapping):
            found[name] = merged(given, value)
        elif isinstance(given, list) and given and isinstance(value, list):
            found[name] = [merged(given[0], value[0]), *given[1:]] if name in _MERGED else [*given, *value]
        else:
            found[name] = value
    return found
