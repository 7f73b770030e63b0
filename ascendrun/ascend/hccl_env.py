"""Parser of HCCL's settings as logged when a process first uses it: effective values and their sources.

The lines are in the process's run plog, once per process (INFO, which the run log always keeps). Forms known from
CANN 8 to 9: `NAME set by default to [120]s`, `NAME set by environment [variable] to [..]`, `NAME is set to default
value [..]`, `NAME is not set[ and is used by default [..]]`, `environmental variable NAME is [..]` or `is empty`, and
on newer chips `Env config "NAME" is not set. Default value is used.`
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ascendrun.core.dataclass import dataclass

_NAME = r"(?P<name>(?:HCCL|ASCEND|RANK_TABLE|PROFILING|GE|OPT|TASK)_[A-Z0-9_]{2,60})"
_VALUE = r"(?P<value>\[[^\]\n]{0,400}\]|[A-Za-z0-9_:-]{1,60}(?:\.[0-9]+)*)(?P<unit>ms|s|M|KB|MB|GB|K|B)?(?![A-Za-z0-9])"
_FORMS = (
    (re.compile(_NAME + r" (?:is )?set by (?P<who>default|environment)(?: variable)? to " + _VALUE), None),
    (re.compile(_NAME + r" is set to default value " + _VALUE), "default"),
    (re.compile(_NAME + r" is not set(?: and is used by|,) default(?: value is)? " + _VALUE), "default"),
    (re.compile(_NAME + r" is not set, default value (?P<value>MaxCnt[^\n]{1,200})"), "default"),
    (re.compile(_NAME + r" is not set, \w+ set by default to " + _VALUE), "default"),
    (re.compile(r'Env config "' + _NAME + r'" is not set'), "unset"),
    (re.compile(r'Env config "' + _NAME + r'" is (?:set to )?' + _VALUE), "environment"),
    (re.compile(r"environmental variable " + _NAME + r" is (?P<value>empty)"), "unset"),
    (re.compile(r"environmental variable " + _NAME + r" is " + _VALUE), "unknown"),
    (re.compile(_NAME + r" is not set"), "unset"),
)
_HINT = re.compile(r"\bset\b|environmental variable|Env config")


@dataclass(frozen=True)
class HcclSetting:
    """One setting as HCCL read it. `value` None: no value. `unit` as HCCL writes it ("s", "M"), "" for none.

    `origin`: environment, default, unset, or unknown: the line does not name the source.
    """

    name: str
    value: str | None
    unit: str
    origin: str


def parse_hccl_env(lines: Iterable[str]) -> dict[str, HcclSetting]:
    """Return every setting in the lines of a plog, by name; the first line of each counts. Never raises."""
    found: dict[str, HcclSetting] = {}
    for line in lines:
        if ("HCCL" in line or "Env config" in line) and _HINT.search(line):
            for setting in _settings_of(line):
                found.setdefault(setting.name, setting)
    return found


def _settings_of(line: str) -> list[HcclSetting]:
    """Return the settings on a line (up to two). If several forms match a name, the first counts."""
    taken: dict[str, HcclSetting] = {}
    for form, origin in _FORMS:
        for match in form.finditer(line):
            parts = match.groupdict()
            value = None if origin == "unset" else (parts.get("value") or "").strip()
            if value is not None and value.startswith("[") and value.endswith("]"):
                value = value[1:-1]
            source = origin or parts["who"]
            taken.setdefault(
                parts["name"],
                HcclSetting(
                    parts["name"],
                    None if value in (None, "EmptyString", "") else value,
                    parts.get("unit") or "",
                    "unset" if value == "EmptyString" and source == "default" else source,
                ),
            )
    return list(taken.values())
