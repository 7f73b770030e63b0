"""Validation of the environment variables of HCCL, the Ascend runtime and torch_npu before a job starts.

check_variable(name, value, chip), check_environment(environment, chip) -> (VariableFinding, ...)
known_variables() -> {name: Variable}
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import field
from functools import lru_cache
from typing import Any, Callable

from ascendrun.ascend import variable_forms as forms
from ascendrun.ascend.tables import load_table
from ascendrun.core.dataclass import dataclass, load_dataclass
from ascendrun.facts.chips import Chip
from ascendrun.text import Text

ERROR, WARNING, NOTE = "error", "warning", "note"


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
    for name, message, hint in forms.conflicts(environment, chip.family if chip else None):
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
        fault = forms.fault_of(variable.kind, value)
        if fault:
            report("form", WARNING if variable.kind == "path" else ERROR, *fault)


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
