"""The kinds of output of Huawei's and NVIDIA's tools and files, each with its parser."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Callable

from ascendrun.ascend import hccn, install, npu_smi, npu_smi_views, nvidia_smi
from ascendrun.ascend.reading import Answer

TOOLS: Mapping[str, Callable[[str], Answer]] = {
    "npu_smi_info": npu_smi.parse_info,
    "common": npu_smi_views.parse_common,
    "ecc": npu_smi_views.parse_ecc,
    "health": npu_smi_views.parse_health,
    "board": npu_smi_views.parse_board,
    "link": hccn.parse_link,
    "link-history": hccn.parse_link_history,
    "ip": hccn.parse_ip,
    "net-health": hccn.parse_net_health,
    "tls": hccn.parse_tls,
    "ping": hccn.parse_ping,
    "fec": hccn.parse_fec,
    "stat": hccn.parse_stat,
    "optical": hccn.parse_optical,
    "mtu": hccn.parse_mtu,
    "nvidia-gpus": nvidia_smi.parse_gpus,
    "nvidia-apps": nvidia_smi.parse_apps,
}
FILES: Mapping[str, Callable[[str], Answer]] = {
    "driver": install.parse_driver,
    "firmware": install.parse_firmware,
    "cann": install.parse_cann,
    "install": install.parse_install,
    "components": install.parse_components,
    "hccn-conf": install.parse_hccn_conf,
}
PARSERS: Mapping[str, Callable[[str], Answer]] = {**TOOLS, **FILES}
"""By kind, which is also the folder of its recordings in tests/recordings/ascend."""
_LABELS = {
    "info": "npu_smi_info", "ip6": "ip", "net_health": "net-health", "link_stat": "link-history", "hccn": "hccn-conf",
    "gpus": "nvidia-gpus", "apps": "nvidia-apps",
}  # fmt: skip


def kind_of(label: str) -> str | None:
    """Return the kind of the output under a label of a device script (health/survey/scripts.py); None: not parsed."""
    kind = _LABELS.get(label, label)
    return kind if kind in PARSERS else None
