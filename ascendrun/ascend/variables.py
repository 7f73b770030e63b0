"""Environment variables of HCCL, the Ascend runtime and torch_npu: what a value means before a job finds out.

judge_variable(name, value, chip), judge_environment(environment, chip) -> (VariableFinding, ...)
known_variables() -> {name: Variable}
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Callable

from ascendrun.ascend import variable_forms as forms
from ascendrun.ascend.chips import Chip
from ascendrun.ascend.tables import load_table

ERROR, WARNING, NOTE = "error", "warning", "note"


@dataclass(frozen=True)
class Variable:
    """One row of tables/variables.json; None where no source says. `families` None: every chip reads it.

    `kind`: int, choice, ip, ifname, ports, path, text, algo, alloc, ids or visible.
    """

    name: str
    kind: str
    default: str | None
    unit: str | None
    low: int | None
    high: int | None
    step: int | None
    choices: tuple[str, ...]
    families: tuple[str, ...] | None
    by_family: Mapping[str, Mapping[str, Any]]
    harmful: tuple[Mapping[str, str], ...]
    note: str | None
    source: str
    verified: bool
    doubt: str | None


@dataclass(frozen=True)
class VariableFinding:
    """`code`: form, range, step, harmful, no-effect, unknown or conflict. `hint`: the way out.

    `severity`: error (the job will fail or not get what it asked for), warning (it will hurt), note.
    """

    name: str
    value: str
    code: str
    severity: str
    says: str
    hint: str
    source: str | None


def known_variables() -> Mapping[str, Variable]:
    return _variables()


def judge_variable(name: str, value: str, chip: Chip | None = None) -> tuple[VariableFinding, ...]:
    """What is wrong with one setting on one chip; without a chip only what holds for all; () for what is none of ours.

    A name of HCCL's or torch_npu's that the table lacks is reported as unknown: newer, or misspelt.
    """
    variable = _variables().get(name)
    if variable is None:
        return _not_in_table(name, value)
    found: list[VariableFinding] = []

    def say(code: str, severity: str, says: str, hint: str) -> None:
        found.append(VariableFinding(name, value, code, severity, says, hint, variable.source))

    if chip is not None and variable.families is not None and chip.family not in variable.families:
        only = ", ".join(variable.families)
        say("no-effect", NOTE, f"{chip.name} does not read it, only {only}", "drop it")
        return tuple(found)
    if value == "":
        say("form", NOTE, "set to nothing", "unset it, or give a value")
        return tuple(found)
    _judge_form(variable, value, chip, say)
    for rule in variable.harmful:
        if _applies(rule["when"], value):
            say("harmful", rule["severity"], rule["says"], rule["hint"])
    return tuple(found)


def judge_environment(environment: Mapping[str, str], chip: Chip | None = None) -> tuple[VariableFinding, ...]:
    """Each variable by itself, then those that do not go together."""
    ours = sorted(filter(_may_be_ours, environment))
    found = [one for name in ours for one in judge_variable(name, environment[name], chip)]
    for name, says, hint in forms.conflicts(environment, chip.family if chip else None):
        source = _variables()[name].source if name in _variables() else None
        found.append(VariableFinding(name, environment[name], "conflict", WARNING, says, hint, source))
    return tuple(found)


Say = Callable[[str, str, str, str], None]


def _judge_form(variable: Variable, value: str, chip: Chip | None, say: Say) -> None:
    own = variable.by_family.get(chip.family, {}) if chip else {}
    if variable.kind == "int":
        _judge_int(variable, own, value, say)
    elif variable.kind == "choice":
        choices = tuple(own.get("choices", variable.choices))
        if value not in choices:
            say("range", ERROR, f"not one of {', '.join(choices)}", f"set one of {', '.join(choices)}, or unset it")
    else:
        fault = forms.fault_of(variable.kind, value)
        if fault:
            say("form", WARNING if variable.kind == "path" else ERROR, *fault)


def _judge_int(variable: Variable, own: Mapping[str, Any], value: str, say: Say) -> None:
    low, high = own.get("min", variable.low), own.get("max", variable.high)
    step, unit = own.get("step", variable.step), f" {variable.unit}" if variable.unit else ""
    shown = f"{low} to {high}{unit}" if high is not None else f"{low}{unit} or more"
    if not re.fullmatch(r"[0-9]{1,18}", value):
        say("form", ERROR, "not a whole number", f"set {shown}, or unset it")
        return
    number = int(value)
    if number < low or (high is not None and number > high):
        say("range", ERROR, f"outside {shown}", f"set {shown}, or unset it")
    elif step and number % step:
        below, above = number - number % step, number - number % step + step
        if own.get("rounds", False):
            says = f"this chip rounds down to a multiple of {step}{unit}: {max(below, step)}{unit} will hold"
            say("step", NOTE, says, f"set {above}" if below < step else f"set {below} or {above}")
        else:
            say("step", ERROR, f"not a multiple of {step}", f"set {below} or {above}")


def _applies(when: str, value: str) -> bool:
    if when == "any":
        return True
    return value == when[1:] if when.startswith("=") else when[1:] in value.replace(" ", "")


@lru_cache(maxsize=4096)
def _may_be_ours(name: str) -> bool:
    """Whether the table says something of the name; most of what an environment holds is none of ours."""
    prefixes = [rule["prefix"] for rule in load_table("variables")["prefixes"]]
    return name in _variables() or name.startswith(("HCCL_", "P2P_HCCL_", *prefixes))


def _not_in_table(name: str, value: str) -> tuple[VariableFinding, ...]:
    for rule in load_table("variables")["prefixes"]:
        if name.startswith(rule["prefix"]):
            finding = VariableFinding(name, value, "no-effect", rule["severity"], rule["says"], rule["hint"], None)
            return (finding,)
    if not name.startswith(("HCCL_", "P2P_HCCL_")):
        return ()
    near = difflib.get_close_matches(name, _variables(), n=1, cutoff=0.85)
    hint = f"did you mean {near[0]}?" if near else "check its name in the HCCL docs of your CANN"
    return (VariableFinding(name, value, "unknown", NOTE, "not in our table: newer than it, or misspelt", hint, None),)


@lru_cache(maxsize=1)
def _variables() -> Mapping[str, Variable]:
    variables: dict[str, Variable] = {}
    for row in load_table("variables")["rows"]:
        variables[row["name"]] = Variable(
            name=row["name"],
            kind=row["kind"],
            default=row["default"],
            unit=row.get("unit"),
            low=row.get("min"),
            high=row.get("max"),
            step=row.get("step"),
            choices=tuple(row.get("choices", ())),
            families=tuple(row["families"]) if "families" in row else None,
            by_family=row.get("by_family", {}),
            harmful=tuple(row.get("harmful", ())),
            note=row.get("note"),
            source=row["source"],
            verified=row["verified"],
            doubt=row.get("doubt"),
        )
    return variables
