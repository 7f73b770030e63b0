"""Files on a node's disk: versions of driver, firmware and CANN and their order, and the addresses of the NPUs' ports.

parse_driver, parse_firmware (version.info), parse_cann (ascend_*_install.info),
parse_install (/etc/ascend_install.info), parse_components (version.cfg), parse_hccn_conf (/etc/hccn.conf)
parse_version("8.0.RC3") < parse_version("8.0.0");  "2.1.0.post8+git1f2e" -> release 2.1.0, post 8
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from functools import lru_cache, partial

from ascendrun.ascend import reading
from ascendrun.core.dataclass import dataclass

_INTERVAL = re.compile(r"\[([^\[\],]{1,60}),([^\[\],]{1,60})\]")
_COMPONENT = re.compile(r"\[([^\[\]:]{1,60}):([^\[\]:]{1,60})\]")
_PORT_KEY = re.compile(r"(address|netmask|netdetect|gateway|send_arp_status|prefix_length)_([0-9]{1,4})(_inet6)?")
_PART = re.compile(r"([0-9]{1,9})|rc([0-9]{1,9})|alpha([0-9]{1,9})|beta([0-9]{1,9})|post([0-9]{1,9})", re.IGNORECASE)
_ORDER = (3, 2, 0, 1, 4)
"""Of a plain number, rc, alpha, beta and post."""
_GLUED = re.compile(r"([0-9]{1,9})(rc[0-9]{1,9}|a[0-9]{1,9}|b[0-9]{1,9})")
_FINAL = (3, 0)  # the value of a missing place: 8.0.0 is 8.0
_PLACES = 8
Version = tuple[tuple[int, int], ...]
"""Orders versions: alpha < beta < rc < plain < post at each place; a missing place is a final 0."""


@dataclass(frozen=True)
class Interval:
    """Versions from `low` to `high`, both included."""

    low: str
    high: str


def _intervals(text: str) -> tuple[Interval, ...] | None:
    if _INTERVAL.sub("", text).strip(", "):
        return None
    return tuple(Interval(found[1].strip(), found[2].strip()) for found in _INTERVAL.finditer(text))


class DriverVersion(reading.Answer):
    """driver/version.info. `firmware_intervals`: firmware supported by this driver; () if the file lists none."""

    version: str | None = reading.printed("Version")
    firmware_intervals: tuple[Interval, ...] = reading.printed("compatible_version_fw", read=_intervals, default=())


class FirmwareVersion(reading.Answer):
    """firmware/version.info. `driver_intervals`: drivers supported by this firmware."""

    version: str | None = reading.printed("Version")
    driver_intervals: tuple[Interval, ...] = reading.printed("compatible_version_drv", read=_intervals, default=())


class CannVersion(reading.Answer):
    """ascend_toolkit_install.info, ascend_nnae_install.info. `kind`: toolkit, nnae, or the package's own name."""

    kind: str | None = reading.printed(
        "package_name", read=lambda text: reading.read_text(text.replace("Ascend-cann-", "", 1))
    )
    version: str | None = reading.printed("version")
    arch: str | None = reading.printed("arch")
    path: str | None = reading.printed("path")


class DriverInstall(reading.Answer):
    """/etc/ascend_install.info. `is_complete` None: not in the file; npu-smi warns unless it is complete."""

    user: str | None = reading.printed("UserName")
    driver_path: str | None = reading.printed("Driver_Install_Path_Param")
    for_all_users: bool | None = reading.printed(
        "Driver_Install_For_All", read=lambda text: {"yes": True, "no": False}.get(text.lower())
    )
    is_complete: bool | None = reading.printed("Driver_Install_Status", read=lambda text: text == "complete")


@dataclass(frozen=True)
class Component:
    """`build`: the component's own version; ranks compare that of HCCL."""

    name: str
    build: str
    cann_version: str


class Components(reading.Answer):
    """version.cfg: the CANN that each part comes from; more than one version is a mixed install."""

    components: tuple[Component, ...] = ()

    @property
    def cann_versions(self) -> tuple[str, ...]:
        return tuple(sorted({one.cann_version for one in self.components}))


@dataclass(frozen=True)
class HccnPort:
    """Configuration of one NPU's port; None where the file's value is missing or unreadable.

    `address_inet6` is under a key that no primary source confirms (address_N_inet6).
    """

    address: str | None = None
    gateway: str | None = None
    address_inet6: str | None = None


class HccnConf(reading.Answer):
    """The ports by the number in their keys. `unparsed`: unknown keys, invalid values, duplicate lines."""

    ports: Mapping[int, HccnPort] = field(default_factory=dict)


def parse_components(text: str) -> Components:
    errors, settings, unread = _settings(text)
    components = []
    for name, suffix, one in ((*one.name.partition("_running_version")[:2], one) for one in settings):
        found = _COMPONENT.fullmatch(one.value)
        if found and suffix:
            components.append(Component(name, found[1], found[2]))
        elif suffix:
            unread.append(one.line)
    return Components(errors, reading.unparsed_of(unread), tuple(components))


def parse_hccn_conf(text: str) -> HccnConf:
    errors, settings, unread = _settings(text)
    ports: dict[int, dict[str, str | None]] = {}
    for one in settings:
        key = _PORT_KEY.fullmatch(one.name)
        if key is None:
            unread.append(one.line)
            continue
        port, name, address = ports.setdefault(int(key[2]), {}), key[1] + (key[3] or ""), reading.read_ip(one.value)
        if name in HccnPort.__dataclass_fields__:
            port[name] = address
        if one.value and address is None and key[1] not in ("send_arp_status", "prefix_length"):
            unread.append(one.line)
    return HccnConf(
        errors, reading.unparsed_of(unread), {number: HccnPort(**ports[number]) for number in sorted(ports)}
    )


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


def _read_file(kind: type[reading.A], text: str) -> reading.A:
    errors, settings, unread = _settings(text)
    block = reading.Block(settings)
    values = block.fill(kind)
    return kind(errors=errors, unparsed=reading.unparsed_of(unread + block.unread), **values)


parse_driver = partial(_read_file, DriverVersion)
parse_firmware = partial(_read_file, FirmwareVersion)
parse_cann = partial(_read_file, CannVersion)
parse_install = partial(_read_file, DriverInstall)


def _settings(text: str) -> tuple[tuple[reading.ToolError, ...], list[reading.Field], list[str]]:
    """Return the errors, the `key=value` lines without keys that have two values, and other lines that are no comments.
    The end of a file is not truncated."""
    errors, rest = reading.split_errors(line.rstrip("\r") for line in text.split("\n"))
    found: dict[str, reading.Field] = {}
    twice, unread = set(), []
    for line in rest:
        if line.lstrip().startswith("#"):
            continue
        one = reading.field_of(line, "=")
        if one is None:
            unread.append(line)
        elif found.setdefault(one.name, one).value != one.value:
            twice.add(one.name)
            unread.append(line)
    return errors, [one for name, one in found.items() if name not in twice], unread


@lru_cache(maxsize=1024)
def parse_version(text: str) -> Version | None:
    """Parse a version without its local part (`+cpu`, `+git...`); None if its order is unknown (7.0.T10)."""
    plain = text.strip().partition("+")[0].rstrip(".")
    plain = _GLUED.sub(r"\1.\2", plain)
    key = []
    for part in plain.split("."):
        found = _PART.fullmatch(part)
        if not found:
            return None
        rank, number = next((n, int(value)) for n, value in enumerate(found.groups()) if value is not None)
        key.append((_ORDER[rank], number))
    return (*key, *[_FINAL] * (_PLACES - len(key))) if len(key) <= _PLACES else None


def release_of(text: str) -> str | None:
    """Return the three numbers that torch and torch_npu share: 2.1.0 of 2.1.0.post8.dev20241009; None if missing."""
    found = re.match(r"\s*([0-9]{1,4}\.[0-9]{1,4}\.[0-9]{1,4})(?![0-9])", text)
    return found[1] if found else None


def is_within(version: str, low: str, high: str) -> bool | None:
    """Return whether low <= version <= high; None if one of them cannot be ordered.

    A high end with a trailing dot (23.0.0. in firmware/version.info) is not documented, and a driver of the same
    package is above it as a number: such an interval can confirm, but never exclude.
    """
    one, start, end = parse_version(version), parse_version(low), parse_version(high)
    if one is None or start is None or end is None:
        return None
    if start <= one <= end:
        return True
    return None if high.endswith(".") else False
