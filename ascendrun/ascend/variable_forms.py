"""The forms that values of Ascend variables have, and settings that do not go together."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ascendrun.ascend.reading import read_float, read_ip

Fault = tuple[str, str]  # what is wrong, the way out

_ALGORITHMS = ("NA", "ring", "H-D_R", "NHR", "NB", "AHC", "pipeline", "pairwise")
_LEVEL = re.compile(r"level([0-2]):([A-Za-z_-]{1,20})")
# Of PYTORCH_NPU_ALLOC_CONF: low and high of the number, or None for other values.
_ALLOC_RANGES: Mapping[str, tuple[float, float] | None] = {
    "expandable_segments": None,
    "max_split_size_mb": (21, 2**31),
    "garbage_collection_threshold": (1e-9, 1 - 1e-9),
    "base_addr_aligned_kb": (0, 16),
    "segment_size_mb": (20, 512),
    "page_size": None,
    "large_segment_size_mb": None,
    "roundup_power2_divisions": None,
    "multi_stream_lazy_reclaim": None,
}


def fault_of(kind: str, value: str) -> Fault | None:
    """What is wrong with the form of a value of that kind; None when it is well or the kind has no form."""
    check = {
        "ip": _ip,
        "ifname": _ifname,
        "ports": _ports,
        "path": _path,
        "algo": _algorithm,
        "alloc": _alloc,
        "ids": _ids,
        "visible": _visible,
    }.get(kind)
    return check(value) if check else None


def effective_ids(value: str) -> tuple[int, ...]:
    """What the runtime takes from ASCEND_RT_VISIBLE_DEVICES: it stops at the first word that is no number."""
    ids: list[int] = []
    for word in value.split(","):
        if not re.fullmatch(r"[0-9]{1,9}", word):
            break
        ids.append(int(word))
    return tuple(ids)


def _ids(value: str) -> Fault | None:
    ids = effective_ids(value)
    hint = "ascending ids, commas only: 0,1,2,3"
    if len(ids) < len(value.split(",")):
        seen = ",".join(str(number) for number in ids) or "no device at all"
        return f"the runtime stops reading at the first word that is no number and takes {seen}", hint
    if len(set(ids)) < len(ids):
        return "an id stands twice: the runtime refuses it (EE2002)", hint
    if list(ids) != sorted(ids):
        return "not ascending: the runtime refuses it (EE2002)", hint
    return None


def _visible(value: str) -> Fault | None:
    word = r"(?:[0-9]{1,5}(?:-[0-9]{1,5})?|Ascend[A-Za-z0-9]+-[0-9]{1,5})"
    if value == "void" or re.fullmatch(rf"{word}(?:,{word})*", value):
        return None
    return "not a list of ids or ranges", "0-3,6 or 0,1 or void"


def _ip(value: str) -> Fault | None:
    if read_ip(value.partition("%")[0]):
        return None
    return "not one IPv4 or IPv6 address", "an address of this very node: ip -brief address"


def _ifname(value: str) -> Fault | None:
    names = value.lstrip("^").lstrip("=").split(",")
    if all(re.fullmatch(r"[A-Za-z0-9_.:@-]{1,15}", name) for name in names):
        return None
    return "not a list of interface names", "eth,enp (prefixes), =eth0 (exact), ^docker (all but), ^=eth0"


def _ports(value: str) -> Fault | None:
    if value == "auto":
        return None
    for word in value.split(","):
        found = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", word)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= first <= last <= 65535:
            return f"{word!r} is no port or range", "50000-50031,50100 or auto, ports from 1 to 65535"
    return None


def _path(value: str) -> Fault | None:
    return None if value.startswith("/") else ("not an absolute path: where the rank starts decides", "/...")


def _algorithm(value: str) -> Fault | None:
    for part in re.split(r"[;/]", value.partition("=")[2] if "=level" in value else value):
        for level in filter(None, part.split("=")[-1].split(";")):
            found = _LEVEL.fullmatch(level.strip())
            if found is None or found[2] not in _ALGORITHMS or (found[1] == "0" and found[2] != "NA"):
                return f"{level!r} is no level with an algorithm", "level0:NA;level1:ring (level0 takes NA only)"
    return None


def _alloc(value: str) -> Fault | None:
    said: dict[str, str] = {}
    for pair in value.split(","):
        key, found, setting = pair.strip().partition(":")
        if not found:
            return f"{pair!r} is not key:value", "expandable_segments:True"
        said[key] = setting
    for key, setting in said.items():
        limits = _ALLOC_RANGES.get(key)
        if limits and read_float(setting, *limits) is None:
            return f"{key}:{setting} is out of its range", f"see {key} in the docs of PYTORCH_NPU_ALLOC_CONF"
    clash = [key for key in ("max_split_size_mb", "garbage_collection_threshold") if key in said]
    if said.get("expandable_segments") == "True" and clash:
        return f"expandable_segments:True excludes {' and '.join(clash)}", "drop one of them"
    return None


def conflicts(environment: Mapping[str, str], family: str | None) -> list[tuple[str, str, str]]:
    """Settings that do not go together: (name to report at, what is wrong, the way out). Defaults count as set."""
    return _timeouts(environment) + _switches(environment, family)


def _timeouts(environment: Mapping[str, str]) -> list[tuple[str, str, str]]:
    found = []
    connect = _number(environment, "HCCL_CONNECT_TIMEOUT", 120)
    execute = _number(environment, "HCCL_EXEC_TIMEOUT", 1836)
    if connect and execute and connect >= execute:
        at = "HCCL_EXEC_TIMEOUT" if "HCCL_EXEC_TIMEOUT" in environment else "HCCL_CONNECT_TIMEOUT"
        says = f"HCCL_CONNECT_TIMEOUT {connect} s should be less than HCCL_EXEC_TIMEOUT {execute} s"
        found.append((at, says, f"HCCL_EXEC_TIMEOUT={connect + 600}"))
    event = _number(environment, "HCCL_EVENT_TIMEOUT", 1868)
    if execute and event and event <= execute and {"HCCL_EXEC_TIMEOUT", "HCCL_EVENT_TIMEOUT"} & set(environment):
        at = "HCCL_EVENT_TIMEOUT" if "HCCL_EVENT_TIMEOUT" in environment else "HCCL_EXEC_TIMEOUT"
        says = f"HCCL_EVENT_TIMEOUT {event} s must be more than HCCL_EXEC_TIMEOUT {execute} s"
        found.append((at, says, f"HCCL_EVENT_TIMEOUT={execute + 60}"))
    is_aiv = environment.get("HCCL_OP_EXPANSION_MODE") == "AIV"
    if is_aiv and "HCCL_EXEC_TIMEOUT" in environment and (execute or 0) > 1091:
        found.append(("HCCL_EXEC_TIMEOUT", "in AIV mode HCCL waits 1091 s at most", "unset HCCL_OP_EXPANSION_MODE"))
    return found


def _switches(environment: Mapping[str, str], family: str | None) -> list[tuple[str, str, str]]:
    found = []
    if "PYTORCH_NPU_ALLOC_CONF" in environment and "PYTORCH_ALLOC_CONF" in environment:
        found.append(("PYTORCH_ALLOC_CONF", "torch_npu refuses both allocator settings at once", "keep one of them"))
    if environment.get("ASCEND_LAUNCH_BLOCKING") == "1" and environment.get("TASK_QUEUE_ENABLE", "0") != "0":
        says = "TASK_QUEUE_ENABLE is ignored while ASCEND_LAUNCH_BLOCKING=1"
        found.append(("TASK_QUEUE_ENABLE", says, "unset ASCEND_LAUNCH_BLOCKING"))
    roce, pcie = environment.get("HCCL_INTRA_ROCE_ENABLE"), environment.get("HCCL_INTRA_PCIE_ENABLE")
    if (roce, pcie) in (("1", "1"), ("0", None), (None, "0")):
        at = "HCCL_INTRA_ROCE_ENABLE" if roce is not None else "HCCL_INTRA_PCIE_ENABLE"
        says = f"HCCL_INTRA_ROCE_ENABLE={roce} with HCCL_INTRA_PCIE_ENABLE={pcie} is no valid pair"
        found.append((at, says, "unset both, or one 1 and the other 0"))
    alloc = environment.get("PYTORCH_NPU_ALLOC_CONF", "")
    if environment.get("TORCH_HCCL_ZERO_COPY") == "1" and "expandable_segments:True" not in alloc and family == "A3":
        says = "TORCH_HCCL_ZERO_COPY needs expandable segments"
        found.append(("TORCH_HCCL_ZERO_COPY", says, "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True"))
    if "HCCL_WHITELIST_FILE" in environment and environment.get("HCCL_WHITELIST_DISABLE", "1") == "1":
        found.append(("HCCL_WHITELIST_FILE", "the whitelist is off, the file is not read", "HCCL_WHITELIST_DISABLE=0"))
    return found


def _number(environment: Mapping[str, str], name: str, default: int) -> int | None:
    value = environment.get(name, str(default))
    return int(value) if re.fullmatch(r"[0-9]{1,12}", value) else None
