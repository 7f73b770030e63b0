"""Parsers of the version files of driver, firmware and CANN on a node's disk.

parse_driver, parse_firmware (version.info), parse_cann (ascend_*_install.info),
parse_install (/etc/ascend_install.info), parse_components (version.cfg)
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ascendrun.ascend.reading import field_of, read_text, unparsed_of
from ascendrun.ascend.tool_errors import ToolError, split_errors
from ascendrun.ascend.versions import is_within
from ascendrun.core.dataclass import dataclass

# Files to read under the install root, newest layout first; {arch} is aarch64 or x86_64 (of uname -m).

_PAIR = re.compile(r"\[([^\[\],]{1,60}),([^\[\],]{1,60})\]")


@dataclass(frozen=True)
class Interval:
    """Versions from `low` to `high`, both included."""

    low: str
    high: str


@dataclass(frozen=True)
class DriverVersion:
    """driver/version.info. `firmware_intervals`: firmware supported by this driver; () if the file lists none."""

    version: str | None
    inner_version: str | None
    package_version: str | None
    firmware_intervals: tuple[Interval, ...]
    errors: tuple[ToolError, ...]
    unparsed: tuple[str, ...]


@dataclass(frozen=True)
class FirmwareVersion:
    """firmware/version.info. `driver_intervals`: drivers supported by this firmware."""

    version: str | None
    package_version: str | None
    driver_intervals: tuple[Interval, ...]
    errors: tuple[ToolError, ...]
    unparsed: tuple[str, ...]


@dataclass(frozen=True)
class CannVersion:
    """ascend_toolkit_install.info, ascend_nnae_install.info. `kind`: toolkit, nnae, or the package's own name."""

    kind: str | None
    version: str | None
    inner_version: str | None
    arch: str | None
    path: str | None
    errors: tuple[ToolError, ...]
    unparsed: tuple[str, ...]


@dataclass(frozen=True)
class DriverInstall:
    """/etc/ascend_install.info. `is_complete` None: not in the file; npu-smi warns unless it is complete."""

    user: str | None
    group: str | None
    install_type: str | None
    driver_path: str | None
    firmware_path: str | None
    for_all_users: bool | None
    is_complete: bool | None
    errors: tuple[ToolError, ...]
    unparsed: tuple[str, ...]


@dataclass(frozen=True)
class Component:
    name: str
    inner_version: str
    cann_version: str


@dataclass(frozen=True)
class Components:
    """version.cfg: the CANN that each part comes from; more than one version is a mixed install."""

    components: tuple[Component, ...]
    errors: tuple[ToolError, ...]
    unparsed: tuple[str, ...]

    @property
    def cann_versions(self) -> tuple[str, ...]:
        return tuple(sorted({one.cann_version for one in self.components}))


def parse_driver(text: str) -> DriverVersion:
    values, errors, unread = _values(text)
    firmware = _intervals(values, "compatible_version_fw", unread)
    version, inner = _word(values, "Version"), _word(values, "Innerversion")
    package = _word(values, "package_version")
    return DriverVersion(version, inner, package, firmware, errors, unparsed_of(unread))


def parse_firmware(text: str) -> FirmwareVersion:
    values, errors, unread = _values(text)
    drivers = _intervals(values, "compatible_version_drv", unread)
    version, package = _word(values, "Version"), _word(values, "package_version")
    return FirmwareVersion(version, package, drivers, errors, unparsed_of(unread))


def parse_cann(text: str) -> CannVersion:
    values, errors, unread = _values(text)
    package = _word(values, "package_name")
    kind = package.replace("Ascend-cann-", "", 1) if package else None
    inner = _word(values, "innerversion")
    return CannVersion(
        kind, _word(values, "version"), inner, _word(values, "arch"), _word(values, "path"), errors, unparsed_of(unread)
    )


def parse_install(text: str) -> DriverInstall:
    values, errors, unread = _values(text)
    status = _word(values, "Driver_Install_Status")
    for_all = {"yes": True, "no": False}.get((_word(values, "Driver_Install_For_All") or "").lower())
    return DriverInstall(
        user=_word(values, "UserName"),
        group=_word(values, "UserGroup"),
        install_type=_word(values, "Driver_Install_Type"),
        driver_path=_word(values, "Driver_Install_Path_Param"),
        firmware_path=_word(values, "Firmware_Install_Path_Param"),
        for_all_users=for_all,
        is_complete=None if status is None else status == "complete",
        errors=errors,
        unparsed=unparsed_of(unread),
    )


def parse_components(text: str) -> Components:
    values, errors, unread = _values(text)
    components = []
    for name, value in values.items():
        found = re.fullmatch(r"\[([^\[\]:]{1,60}):([^\[\]:]{1,60})\]", value)
        if found and name.endswith("_running_version"):
            components.append(Component(name[: -len("_running_version")], found[1], found[2]))
        elif name.endswith("_running_version"):
            unread.append(f"{name}={value}")
    return Components(tuple(components), errors, unparsed_of(unread))


def driver_takes_firmware(driver: DriverVersion, firmware: FirmwareVersion) -> bool | None:
    """Return False if one is outside the other's intervals, None if neither file has comparable intervals."""
    ways = (
        _is_within(firmware.version, driver.firmware_intervals),
        _is_within(driver.version, firmware.driver_intervals),
    )
    if False in ways:
        return False
    return True if True in ways else None


def _is_within(version: str | None, intervals: tuple[Interval, ...]) -> bool | None:
    if version is None or not intervals:
        return None
    results = [is_within(version, one.low, one.high) for one in intervals]
    if True in results:
        return True
    return None if None in results else False


def _values(text: str) -> tuple[dict[str, str], tuple[ToolError, ...], list[str]]:
    """Return the file's `key=value` lines without keys that have two values. The end of a file is not truncated."""
    errors, rest = split_errors(line.rstrip("\r") for line in text.split("\n"))
    values: dict[str, str] = {}
    bad, unread = set(), []
    for line in rest:
        field = None if line.lstrip().startswith("#") else field_of(line, "=")
        if field is None:
            unread.extend([] if line.lstrip().startswith("#") else [line])
        elif values.setdefault(field.name, field.value) != field.value:
            bad.add(field.name)
            unread.append(line)
    return {name: value for name, value in values.items() if name not in bad}, errors, unread


def _word(values: Mapping[str, str], name: str) -> str | None:
    return read_text(values.get(name, ""))


def _intervals(values: Mapping[str, str], name: str, unread: list[str]) -> tuple[Interval, ...]:
    value = values.get(name, "")
    if _PAIR.sub("", value).strip(", "):
        unread.append(f"{name}={value}")
        return ()
    return tuple(Interval(found[1].strip(), found[2].strip()) for found in _PAIR.finditer(value))
