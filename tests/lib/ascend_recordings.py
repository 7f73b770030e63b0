"""The recordings of tests/recordings/ascend, and which parser reads which folder."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from ascendrun.ascend import hccn, install, npu_smi, npu_smi_views, nvidia_smi
from ascendrun.text import Text

FOLDER = Path(__file__).resolve().parents[1] / "recordings" / "ascend"

TOOLS = {
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
FILES = {
    "driver": install.parse_driver,
    "firmware": install.parse_firmware,
    "cann": install.parse_cann,
    "install": install.parse_install,
    "components": install.parse_components,
    "hccn-conf": install.parse_hccn_conf,
}
PARSERS = {**TOOLS, **FILES}
RECORDINGS = sorted(FOLDER.glob("*/*.txt"))
NAMES = [f"{path.parent.name}/{path.stem}" for path in RECORDINGS]


def read(path):
    return path.read_text(encoding="utf-8")


def parse(path):
    return PARSERS[path.parent.name](read(path))


def npu_ids(info):
    """The NPUs of the table, each once, in its order."""
    return tuple(dict.fromkeys(chip.npu_id for chip in info.chips))


def plain(value):
    """A reading as JSON can hold it."""
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Text):
        return value.key
    if isinstance(value, (tuple, list)):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def as_json(value):
    return json.dumps(plain(value), indent=1, ensure_ascii=False, sort_keys=True) + "\n"
