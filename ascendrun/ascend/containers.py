"""What containers, pods and Ray need for NPUs: names of the vendor, handed to an engine and to the agent by the head.

Not verified on hardware. `with_npus`: as in the start commands of the vendor's images, and Ascend Docker Runtime. The
others: MindCluster, `api/ascend_job.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RESOURCE = "huawei.com/Ascend910"
"""Resource of Kubernetes that is one NPU."""
OPERATOR_CONTAINER = "ascend"
"""Name that the Ascend operator looks for."""
OPERATOR_JOBS = "ascendjobs.mindxdl.gitee.com"
OPERATOR_OBJECT: Mapping[str, str] = {"apiVersion": "mindxdl.gitee.com/v1", "kind": "AscendJob"}
OPERATOR_LABELS: Mapping[str, str] = {"framework": "pytorch"}

RAY_NAMES: Mapping[str, str] = {"npu": "NPU"}
"""What Ray calls a type of devices whose number it must be given (Ray 2.60, accelerators/npu.py)."""

_NPUS: Mapping[str, Any] = {
    "device": "/dev/davinci%d",
    "devices": ["/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"],
    "files": [
        "/usr/local/dcmi",
        "/usr/local/bin/npu-smi",
        "/usr/local/sbin/npu-smi",
        "/usr/local/Ascend/driver",
        "/etc/ascend_install.info",
        "/etc/hccn.conf",
    ],
    "runtime": {
        "path": "/usr/local/Ascend/Ascend-Docker-Runtime",
        "name": "ascend",
        "variable": "ASCEND_VISIBLE_DEVICES",
    },
}
"""`device`: file of one NPU by its number, `devices`: files that all need; `files`: the driver of the node, and its
tools; `runtime`: a runtime of docker that gives both, by a variable, where `path` is."""


def with_npus(box: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the request of a container (core/jobs/plan.container_request) with what its NPUs need: `vendor`."""
    if box is None:
        return None
    has_npus = box["devices"] is not None and box["devices"]["type"] == "npu"
    return {**box, **({"vendor": _NPUS} if has_npus else {})}
