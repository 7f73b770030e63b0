"""Rules for the form of Ascend variables' values, and settings that cannot be combined."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ascendrun.ascend.reading import read_float, read_ip
from ascendrun.text import Text

Fault = tuple[Text, "Text | str"]
"""The fault, and the hint."""
ConflictError = tuple[str, Text, "Text | str"]
"""The name of the variable to report, the fault, and the hint."""

_ALGORITHMS = ("NA", "ring", "H-D_R", "NHR", "NB", "AHC", "pipeline", "pairwise")
_LEVEL = re.compile(r"level([0-2]):([A-Za-z_-]{1,20})")
# Options of PYTORCH_NPU_ALLOC_CONF: (low, high) of a number, None for other values.
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
    """Return the fault in the form of a value of that kind; None if valid or the kind has no fixed form."""
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
    """Return the ids that the runtime reads from ASCEND_RT_VISIBLE_DEVICES: all before the first non-number."""
    ids: list[int] = []
    for item in value.split(","):
        if not re.fullmatch(r"[0-9]{1,9}", item):
            break
        ids.append(int(item))
    return tuple(ids)


def _ids(value: str) -> Fault | None:
    ids = effective_ids(value)
    hint = Text("variable.ids.hint", "list ids in ascending order, separated by commas: 0,1,2,3")
    if len(ids) < len(value.split(",")):
        if not ids:
            return Text(
                "variable.ids-none", "the runtime stops at the first item that is not a number and uses no device"
            ), hint
        seen = ",".join(map(str, ids))
        return Text(
            "variable.ids-truncated",
            "the runtime stops at the first item that is not a number and uses {ids}",
            ids=seen,
        ), hint
    if len(set(ids)) < len(ids):
        return Text("variable.ids-twice", "duplicate id: the runtime rejects it (EE2002)"), hint
    if list(ids) != sorted(ids):
        return Text("variable.ids-unsorted", "ids are not ascending: the runtime rejects them (EE2002)"), hint
    return None


def _visible(value: str) -> Fault | None:
    item = r"(?:[0-9]{1,5}(?:-[0-9]{1,5})?|Ascend[A-Za-z0-9]+-[0-9]{1,5})"
    if value == "void" or re.fullmatch(rf"{item}(?:,{item})*", value):
        return None
    return (
        Text("variable.visible", "expected a list of ids or ranges"),
        Text("variable.visible.hint", "write 0-3,6 or 0,1 or void"),
    )


def _ip(value: str) -> Fault | None:
    if read_ip(value.partition("%")[0]):
        return None
    return (
        Text("variable.ip", "expected one IPv4 or IPv6 address"),
        Text("variable.ip.hint", "set an address of the node itself: ip -brief address"),
    )


def _ifname(value: str) -> Fault | None:
    names = value.lstrip("^").lstrip("=").split(",")
    if all(re.fullmatch(r"[A-Za-z0-9_.:@-]{1,15}", name) for name in names):
        return None
    return (
        Text("variable.ifname", "expected a list of interface names"),
        Text("variable.ifname.hint", "write eth,enp (prefixes), =eth0 (exact), ^docker (all except) or ^=eth0"),
    )


def _ports(value: str) -> Fault | None:
    if value == "auto":
        return None
    for item in value.split(","):
        found = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", item)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= first <= last <= 65535:
            return (
                Text("variable.ports", "{item:quote} is not a port or a range of ports", item=item),
                Text("variable.ports.hint", "write 50000-50031,50100 (ports from 1 to 65535) or auto"),
            )
    return None


def _path(value: str) -> Fault | None:
    if value.startswith("/"):
        return None
    return Text("variable.path", "not an absolute path: it depends on the working directory of the rank"), Text(
        "variable.path.hint", "set an absolute path"
    )


def _algorithm(value: str) -> Fault | None:
    for part in re.split(r"[;/]", value.partition("=")[2] if "=level" in value else value):
        for level in filter(None, part.split("=")[-1].split(";")):
            found = _LEVEL.fullmatch(level.strip())
            if found is None or found[2] not in _ALGORITHMS or (found[1] == "0" and found[2] != "NA"):
                return (
                    Text("variable.algorithm", "{level:quote} is not LEVEL:ALGORITHM", level=level),
                    Text("variable.algorithm.hint", "write level0:NA;level1:ring (level0 accepts only NA)"),
                )
    return None


def _alloc(value: str) -> Fault | None:
    given: dict[str, str] = {}
    for pair in value.split(","):
        key, found, setting = pair.strip().partition(":")
        if not found:
            message = Text("variable.not-a-pair", "{pair:quote} is not KEY:VALUE", pair=pair)
            return message, "expandable_segments:True"
        given[key] = setting
    for key, setting in given.items():
        limits = _ALLOC_RANGES.get(key)
        if limits and read_float(setting, *limits) is None:
            return (
                Text("variable.alloc-range", "{key}:{value} is out of range", key=key, value=setting),
                Text("variable.alloc-range.hint", "see {key} in the documentation of PYTORCH_NPU_ALLOC_CONF", key=key),
            )
    clash = [key for key in ("max_split_size_mb", "garbage_collection_threshold") if key in given]
    if given.get("expandable_segments") == "True" and clash:
        return (
            Text("variable.alloc-exclusive", "expandable_segments:True cannot be combined with {keys}", keys=clash),
            Text("variable.remove-one", "remove one of them"),
        )
    return None


def conflicts(environment: Mapping[str, str], family: str | None) -> list[ConflictError]:
    """Return settings that cannot be combined. Defaults count as set."""
    return _timeouts(environment) + _switches(environment, family)


def _timeouts(environment: Mapping[str, str]) -> list[ConflictError]:
    found: list[ConflictError] = []
    connect = _number(environment, "HCCL_CONNECT_TIMEOUT", 120)
    execute = _number(environment, "HCCL_EXEC_TIMEOUT", 1836)
    if connect and execute and connect >= execute:
        at = "HCCL_EXEC_TIMEOUT" if "HCCL_EXEC_TIMEOUT" in environment else "HCCL_CONNECT_TIMEOUT"
        message = Text(
            "variable.connect-timeout",
            "HCCL_CONNECT_TIMEOUT ({connect} s) must be less than HCCL_EXEC_TIMEOUT ({execute} s)",
            connect=connect,
            execute=execute,
        )
        found.append((at, message, f"HCCL_EXEC_TIMEOUT={connect + 600}"))
    event = _number(environment, "HCCL_EVENT_TIMEOUT", 1868)
    if execute and event and event <= execute and {"HCCL_EXEC_TIMEOUT", "HCCL_EVENT_TIMEOUT"} & set(environment):
        at = "HCCL_EVENT_TIMEOUT" if "HCCL_EVENT_TIMEOUT" in environment else "HCCL_EXEC_TIMEOUT"
        message = Text(
            "variable.event-timeout",
            "HCCL_EVENT_TIMEOUT ({event} s) must be more than HCCL_EXEC_TIMEOUT ({execute} s)",
            event=event,
            execute=execute,
        )
        found.append((at, message, f"HCCL_EVENT_TIMEOUT={execute + 60}"))
    is_aiv = environment.get("HCCL_OP_EXPANSION_MODE") == "AIV"
    if is_aiv and "HCCL_EXEC_TIMEOUT" in environment and (execute or 0) > 1091:
        message = Text("variable.aiv-timeout", "HCCL waits 1091 s at most in AIV mode")
        found.append(
            ("HCCL_EXEC_TIMEOUT", message, Text("variable.unset-expansion-mode", "unset HCCL_OP_EXPANSION_MODE"))
        )
    return found


def _switches(environment: Mapping[str, str], family: str | None) -> list[ConflictError]:
    found: list[ConflictError] = []
    if "PYTORCH_NPU_ALLOC_CONF" in environment and "PYTORCH_ALLOC_CONF" in environment:
        message = Text(
            "variable.two-allocators", "torch_npu rejects PYTORCH_ALLOC_CONF together with PYTORCH_NPU_ALLOC_CONF"
        )
        found.append(("PYTORCH_ALLOC_CONF", message, Text("variable.remove-one", "remove one of them")))
    if environment.get("ASCEND_LAUNCH_BLOCKING") == "1" and environment.get("TASK_QUEUE_ENABLE", "0") != "0":
        message = Text("variable.queue-ignored", "TASK_QUEUE_ENABLE is ignored with ASCEND_LAUNCH_BLOCKING=1")
        hint = Text("variable.unset-blocking", "unset ASCEND_LAUNCH_BLOCKING")
        found.append(("TASK_QUEUE_ENABLE", message, hint))
    roce, pcie = environment.get("HCCL_INTRA_ROCE_ENABLE"), environment.get("HCCL_INTRA_PCIE_ENABLE")
    if (roce, pcie) in (("1", "1"), ("0", None), (None, "0")):
        at = "HCCL_INTRA_ROCE_ENABLE" if roce is not None else "HCCL_INTRA_PCIE_ENABLE"
        message = Text(
            "variable.roce-pcie",
            "HCCL_INTRA_ROCE_ENABLE={roce} cannot be combined with HCCL_INTRA_PCIE_ENABLE={pcie}",
            roce=roce or "-",
            pcie=pcie or "-",
        )
        hint = Text("variable.roce-pcie.hint", "unset both, or set one to 1 and the other to 0")
        found.append((at, message, hint))
    alloc = environment.get("PYTORCH_NPU_ALLOC_CONF", "")
    if environment.get("TORCH_HCCL_ZERO_COPY") == "1" and "expandable_segments:True" not in alloc and family == "A3":
        message = Text("variable.zero-copy", "TORCH_HCCL_ZERO_COPY requires expandable segments")
        found.append(("TORCH_HCCL_ZERO_COPY", message, "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True"))
    if "HCCL_WHITELIST_FILE" in environment and environment.get("HCCL_WHITELIST_DISABLE", "1") == "1":
        message = Text("variable.whitelist-off", "the file is not read because the whitelist is off")
        found.append(("HCCL_WHITELIST_FILE", message, "HCCL_WHITELIST_DISABLE=0"))
    return found


def _number(environment: Mapping[str, str], name: str, default: int) -> int | None:
    value = environment.get(name, str(default))
    return int(value) if re.fullmatch(r"[0-9]{1,12}", value) else None
