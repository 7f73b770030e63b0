"""Validation of the environment variables of HCCL, the Ascend runtime and torch_npu before a job starts.

check_variable(name, value, chip), check_environment(environment, chip) -> (VariableFinding, ...)
known_variables() -> {name: Variable}
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import field
from functools import lru_cache
from itertools import takewhile
from typing import Any, Callable

from ascendrun.ascend.reading import read_float, read_ip
from ascendrun.ascend.tables import load_table
from ascendrun.core.dataclass import dataclass, load_dataclass
from ascendrun.facts.chips import Chip
from ascendrun.text import Text, fault

ERROR, WARNING, NOTE = "error", "warning", "note"
Fault = tuple[Text, "Text | str"]
"""The fault, and the hint."""
_REMOVE_ONE = Text("variable.remove-one", "remove one of them")
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


@dataclass(frozen=True)
class Variable:
    """One row of tables/variables.json; None where no source states it. `families` None: every chip reads it.

    `kind`: int, choice, ip, ifname, ports, path, text, algo, alloc, ids or visible.
    """

    name: str
    kind: str
    default: str | None
    source: str
    verified: bool
    doubt: str | None = None
    unit: str | None = None
    min: int | None = None
    max: int | None = None
    step: int | None = None
    choices: tuple[str, ...] = ()
    families: tuple[str, ...] | None = None
    by_family: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    harmful: tuple[Mapping[str, str], ...] = ()


@dataclass(frozen=True)
class VariableFinding:
    """An invalid or harmful setting. `code`: form, range, step, harmful, no-effect, unknown or conflict.

    `severity`: error (the job fails or the setting is ineffective), warning (harmful), note.
    """

    name: str
    value: str
    code: str
    severity: str
    message: Text
    hint: Text | str
    source: str | None


def check_variable(name: str, value: str, chip: Chip | None = None) -> tuple[VariableFinding, ...]:
    """Return the faults of one setting on a chip (None: those common to all chips); () for unrelated variables.

    A name of HCCL or torch_npu that the table lacks is reported as unknown: it is newer or misspelt.
    """
    variable = known_variables().get(name)
    if variable is None:
        return _not_in_table(name, value)
    found: list[VariableFinding] = []

    def report(code: str, severity: str, message: Text, hint: Text | str) -> None:
        found.append(VariableFinding(name, value, code, severity, message, hint, variable.source))

    if chip is not None and variable.families is not None and chip.family not in variable.families:
        message = Text(
            "variable.not-read", "not read by {chip}, only by {families}", chip=chip.name, families=variable.families
        )
        report("no-effect", NOTE, message, _hint("remove"))
        return tuple(found)
    if value == "":
        message = Text("variable.empty", "empty value")
        report("form", NOTE, message, Text("variable.empty.hint", "unset it, or set a value"))
        return tuple(found)
    _check_form(variable, value, chip, report)
    for rule in variable.harmful:
        if _applies(rule["when"], value):
            message = Text(f"variable.{name}.{_name_of(rule['when'])}.message", rule["message"])
            report("harmful", rule["severity"], message, _hint(rule["hint"]))
    return tuple(found)


def check_environment(environment: Mapping[str, str], chip: Chip | None = None) -> tuple[VariableFinding, ...]:
    """Check each variable, then settings that cannot be combined."""
    ours = sorted(filter(_may_be_ours, environment))
    found = [one for name in ours for one in check_variable(name, environment[name], chip)]
    for name, message, hint in _conflicts(environment, chip.family if chip else None):
        source = known_variables()[name].source if name in known_variables() else None
        found.append(VariableFinding(name, environment[name], "conflict", WARNING, message, hint, source))
    return tuple(found)


Report = Callable[[str, str, Text, "Text | str"], None]


def _hint(code: str) -> Text:
    """Return a hint that several rows of the table share."""
    return Text(f"variable.hint.{code}", load_table("variables")["hints"][code])


def _name_of(when: str) -> str:
    """Return the condition of a row as a part of its message's key."""
    return when if when == "any" else f"is-{when[1:]}" if when.startswith("=") else f"has-{when[1:].replace(':', '-')}"


def _check_form(variable: Variable, value: str, chip: Chip | None, report: Report) -> None:
    own = variable.by_family.get(chip.family, {}) if chip else {}
    if variable.kind == "int":
        _check_int(variable, own, value, report)
    elif variable.kind == "choice":
        choices = tuple(own.get("choices", variable.choices))
        if value not in choices:
            message = Text("variable.not-a-choice", "expected one of {choices}", choices=choices)
            hint = Text("variable.not-a-choice.hint", "set one of {choices}, or unset it", choices=choices)
            report("range", ERROR, message, hint)
    else:
        found = _form_fault(variable.kind, value)
        if found:
            report("form", WARNING if variable.kind == "path" else ERROR, *found)


def _check_int(variable: Variable, own: Mapping[str, Any], value: str, report: Report) -> None:
    low, high = own.get("min", variable.min), own.get("max", variable.max)
    step, unit = own.get("step", variable.step), f" {variable.unit}" if variable.unit else ""
    limits = (
        Text("variable.at-least", "{low}{unit} or more", low=low, unit=unit)
        if high is None
        else Text("variable.range", "{low} to {high}{unit}", low=low, high=high, unit=unit)
    )
    hint = Text("variable.limits.hint", "set {limits}, or unset it", limits=limits)
    if not re.fullmatch(r"[0-9]{1,18}", value):
        report("form", ERROR, Text("variable.not-an-integer", "expected an integer"), hint)
        return
    number = int(value)
    if number < low or (high is not None and number > high):
        report("range", ERROR, Text("variable.out-of-range", "expected {limits}", limits=limits), hint)
    elif step and number % step:
        below, above = number - number % step, number - number % step + step
        if own.get("rounds", False):
            message = Text(
                "variable.rounded",
                "this chip rounds down to a multiple of {step}{unit}; the effective value is {effective}{unit}",
                step=step,
                unit=unit,
                effective=max(below, step),
            )
            report("step", NOTE, message, _set_one_of(*((above,) if below < step else (below, above))))
        else:
            message = Text("variable.not-a-multiple", "expected a multiple of {step}", step=step)
            report("step", ERROR, message, _set_one_of(below, above))


def _set_one_of(*values: int) -> Text:
    if len(values) == 1:
        return Text("variable.set", "set {value}", value=values[0])
    return Text("variable.set-either", "set {low} or {high}", low=values[0], high=values[1])


def _applies(when: str, value: str) -> bool:
    if when == "any":
        return True
    return value == when[1:] if when.startswith("=") else when[1:] in value.replace(" ", "")


@lru_cache(maxsize=4096)
def _may_be_ours(name: str) -> bool:
    """Return whether the table has the name or HCCL's or torch_npu's prefix; few variables do."""
    prefixes = [rule["prefix"] for rule in load_table("variables")["prefixes"]]
    return name in known_variables() or name.startswith(("HCCL_", "P2P_HCCL_", *prefixes))


def _not_in_table(name: str, value: str) -> tuple[VariableFinding, ...]:
    for rule in load_table("variables")["prefixes"]:
        if name.startswith(rule["prefix"]):
            message = Text(f"variable.{rule['prefix'].rstrip('_')}.message", rule["message"])
            return (VariableFinding(name, value, "no-effect", rule["severity"], message, _hint(rule["hint"]), None),)
    if not name.startswith(("HCCL_", "P2P_HCCL_")):
        return ()
    near = difflib.get_close_matches(name, known_variables(), n=1, cutoff=0.85)
    message = Text("variable.unknown", "unknown variable: misspelled, or newer than this version of ascendrun")
    hint = (
        Text("variable.did-you-mean", "did you mean {name}?", name=near[0])
        if near
        else Text("variable.unknown.hint", "check the name in the HCCL documentation of your CANN version")
    )
    return (VariableFinding(name, value, "unknown", NOTE, message, hint, None),)


@lru_cache(maxsize=1)
def known_variables() -> Mapping[str, Variable]:
    rows = load_table("variables")["rows"]
    return {row["name"]: load_dataclass(Variable, row) for row in rows}


# ---------------------------------------------------------------- forms of values


def _form_fault(kind: str, value: str) -> Fault | None:
    """Return the fault in the form of a value of that kind; None if valid or the kind has no fixed form."""
    if kind in _SHAPES:
        is_valid, found = _SHAPES[kind]
        return None if is_valid(value) else found
    checks = {"ports": _ports, "algo": _algorithm, "alloc": _alloc, "ids": _ids}
    return checks[kind](value) if kind in checks else None


def effective_ids(value: str) -> tuple[int, ...]:
    """Return the ids that the runtime reads from ASCEND_RT_VISIBLE_DEVICES: all before the first non-number."""
    return tuple(map(int, takewhile(re.compile(r"[0-9]{1,9}").fullmatch, value.split(","))))


def _ids(value: str) -> Fault | None:
    ids = effective_ids(value)
    hint = Text("variable.ids.hint", "list ids in ascending order, separated by commas: 0,1,2,3")
    if not ids:
        return Text(
            "variable.ids-none", "the runtime stops at the first item that is not a number and uses no device"
        ), hint
    if len(ids) < len(value.split(",")):
        return Text(
            "variable.ids-truncated",
            "the runtime stops at the first item that is not a number and uses {ids}",
            ids=",".join(map(str, ids)),
        ), hint
    if len(set(ids)) < len(ids):
        return Text("variable.ids-twice", "duplicate id: the runtime rejects it (EE2002)"), hint
    if list(ids) != sorted(ids):
        return Text("variable.ids-unsorted", "ids are not ascending: the runtime rejects them (EE2002)"), hint
    return None


_VISIBLE = r"(?:[0-9]{1,5}(?:-[0-9]{1,5})?|Ascend[A-Za-z0-9]+-[0-9]{1,5})"
_INTERFACE = r"[A-Za-z0-9_.:@-]{1,15}"
_SHAPES: Mapping[str, tuple[Callable[[str], object], Fault]] = {
    "visible": (
        re.compile(rf"void|{_VISIBLE}(?:,{_VISIBLE})*").fullmatch,
        fault("variable.visible", "expected a list of ids or ranges", "write 0-3,6 or 0,1 or void"),
    ),
    "ip": (
        lambda value: read_ip(value.partition("%")[0]),
        fault(
            "variable.ip", "expected one IPv4 or IPv6 address", "set an address of the node itself: ip -brief address"
        ),
    ),
    "ifname": (
        re.compile(rf"\^*=*{_INTERFACE}(?:,{_INTERFACE})*").fullmatch,
        fault(
            "variable.ifname",
            "expected a list of interface names",
            "write eth,enp (prefixes), =eth0 (exact), ^docker (all except) or ^=eth0",
        ),
    ),
    "path": (
        lambda value: value.startswith("/"),
        fault(
            "variable.path",
            "not an absolute path: it depends on the working directory of the rank",
            "set an absolute path",
        ),
    ),
}
"""Whether a value has the form of its kind, and the fault of one that has not."""


def _ports(value: str) -> Fault | None:
    for item in () if value == "auto" else value.split(","):
        found = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", item)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= first <= last <= 65535:
            return fault(
                "variable.ports",
                "{item:quote} is not a port or a range of ports",
                "write 50000-50031,50100 (ports from 1 to 65535) or auto",
                item=item,
            )
    return None


def _algorithm(value: str) -> Fault | None:
    for part in re.split(r"[;/]", value.partition("=")[2] if "=level" in value else value):
        for level in filter(None, part.split("=")[-1].split(";")):
            found = _LEVEL.fullmatch(level.strip())
            if found is None or found[2] not in _ALGORITHMS or (found[1] == "0" and found[2] != "NA"):
                return fault(
                    "variable.algorithm",
                    "{level:quote} is not LEVEL:ALGORITHM",
                    "write level0:NA;level1:ring (level0 accepts only NA)",
                    level=level,
                )
    return None


def _alloc(value: str) -> Fault | None:
    given: dict[str, str] = {}
    for pair in value.split(","):
        key, found, setting = pair.strip().partition(":")
        if not found:
            return Text("variable.not-a-pair", "{pair:quote} is not KEY:VALUE", pair=pair), "expandable_segments:True"
        given[key] = setting
    for key, setting in given.items():
        limits = _ALLOC_RANGES.get(key)
        if limits and read_float(setting, *limits) is None:
            return fault(
                "variable.alloc-range",
                "{key}:{value} is out of range",
                "see {key} in the documentation of PYTORCH_NPU_ALLOC_CONF",
                key=key,
                value=setting,
            )
    clash = [key for key in ("max_split_size_mb", "garbage_collection_threshold") if key in given]
    if given.get("expandable_segments") == "True" and clash:
        return (
            Text("variable.alloc-exclusive", "expandable_segments:True cannot be combined with {keys}", keys=clash),
            _REMOVE_ONE,
        )
    return None


# ---------------------------------------------------------------- settings that cannot be combined


def _conflicts(environment: Mapping[str, str], family: str | None) -> Iterator[tuple[str, Text, Text | str]]:
    """Yield the variable to report, the fault and the hint. Defaults count as set."""
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
        yield at, message, f"HCCL_EXEC_TIMEOUT={connect + 600}"
    event = _number(environment, "HCCL_EVENT_TIMEOUT", 1868)
    if execute and event and event <= execute and {"HCCL_EXEC_TIMEOUT", "HCCL_EVENT_TIMEOUT"} & set(environment):
        at = "HCCL_EVENT_TIMEOUT" if "HCCL_EVENT_TIMEOUT" in environment else "HCCL_EXEC_TIMEOUT"
        message = Text(
            "variable.event-timeout",
            "HCCL_EVENT_TIMEOUT ({event} s) must be more than HCCL_EXEC_TIMEOUT ({execute} s)",
            event=event,
            execute=execute,
        )
        yield at, message, f"HCCL_EVENT_TIMEOUT={execute + 60}"
    is_aiv = environment.get("HCCL_OP_EXPANSION_MODE") == "AIV"
    if is_aiv and "HCCL_EXEC_TIMEOUT" in environment and (execute or 0) > 1091:
        message = Text("variable.aiv-timeout", "HCCL waits 1091 s at most in AIV mode")
        yield "HCCL_EXEC_TIMEOUT", message, Text("variable.unset-expansion-mode", "unset HCCL_OP_EXPANSION_MODE")
    if "PYTORCH_NPU_ALLOC_CONF" in environment and "PYTORCH_ALLOC_CONF" in environment:
        message = Text(
            "variable.two-allocators", "torch_npu rejects PYTORCH_ALLOC_CONF together with PYTORCH_NPU_ALLOC_CONF"
        )
        yield "PYTORCH_ALLOC_CONF", message, _REMOVE_ONE
    if environment.get("ASCEND_LAUNCH_BLOCKING") == "1" and environment.get("TASK_QUEUE_ENABLE", "0") != "0":
        message = Text("variable.queue-ignored", "TASK_QUEUE_ENABLE is ignored with ASCEND_LAUNCH_BLOCKING=1")
        hint = Text("variable.unset-blocking", "unset ASCEND_LAUNCH_BLOCKING")
        yield "TASK_QUEUE_ENABLE", message, hint
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
        yield at, message, hint
    alloc = environment.get("PYTORCH_NPU_ALLOC_CONF", "")
    if environment.get("TORCH_HCCL_ZERO_COPY") == "1" and "expandable_segments:True" not in alloc and family == "A3":
        message = Text("variable.zero-copy", "TORCH_HCCL_ZERO_COPY requires expandable segments")
        yield "TORCH_HCCL_ZERO_COPY", message, "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True"
    if "HCCL_WHITELIST_FILE" in environment and environment.get("HCCL_WHITELIST_DISABLE", "1") == "1":
        message = Text("variable.whitelist-off", "the file is not read because the whitelist is off")
        yield "HCCL_WHITELIST_FILE", message, "HCCL_WHITELIST_DISABLE=0"


def _number(environment: Mapping[str, str], name: str, default: int) -> int | None:
    value = environment.get(name, str(default))
    return int(value) if re.fullmatch(r"[0-9]{1,12}", value) else None
