"""/etc/hccn.conf: the addresses that each NPU's network port should have after a boot.

parse_hccn_conf(text) -> HccnConf(ports: {npu: HccnPort}, unparsed)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from ascendrun.ascend.reading import read_ip, unparsed_of
from ascendrun.core.dataclass import dataclass

_KEY = re.compile(r"(address|netmask|netdetect|gateway|send_arp_status|prefix_length)_([0-9]{1,4})(_inet6)?")


@dataclass(frozen=True)
class HccnPort:
    """Configuration of one NPU's port; None where the file's value is missing or unreadable.

    `address_inet6` is under a key that no primary source confirms (address_N_inet6).
    """

    address: str | None = None
    netmask: str | None = None
    netdetect: str | None = None
    gateway: str | None = None
    sends_arp: bool | None = None
    address_inet6: str | None = None


@dataclass(frozen=True)
class HccnConf:
    """The ports by the number in their keys. `unparsed`: unknown keys, invalid values, duplicate lines."""

    ports: Mapping[int, HccnPort]
    unparsed: tuple[str, ...]


def parse_hccn_conf(text: str) -> HccnConf:
    values: dict[tuple[int, str], str] = {}
    unread: list[str] = []
    doubled = set()
    for line in (line.rstrip("\r") for line in text.split("\n")):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        written, _, value = line.partition("=")
        key, value = _key(written.strip(" \t")), value.strip(" \t")
        if key is None or "=" not in line:
            unread.append(line)
        elif values.setdefault(key, value) != value:
            doubled.add(key)
            unread.append(line)
    settings: dict[int, dict[str, str]] = {}
    for (number, name), value in values.items():
        settings.setdefault(number, {})
        if (number, name) not in doubled:
            settings[number][name] = value
    ports = {number: _port(settings[number], number, unread) for number in sorted(settings)}
    return HccnConf(ports, unparsed_of(unread))


@lru_cache(maxsize=1024)
def _key(written: str) -> tuple[int, str] | None:
    """Return the number and the name of a key such as address_0; None if it is unknown."""
    found = _KEY.fullmatch(written)
    return (int(found[2]), found[1] + (found[3] or "")) if found else None


def _port(settings: Mapping[str, str], number: int, unread: list[str]) -> HccnPort:
    def address(name: str) -> str | None:
        value = settings.get(name, "")
        read = read_ip(value)
        if value and read is None:
            unread.append(f"{name}_{number}={value}")
        return read

    arp = settings.get("send_arp_status")
    if arp not in (None, "0", "1"):
        unread.append(f"send_arp_status_{number}={arp}")
    return HccnPort(
        address("address"),
        address("netmask"),
        address("netdetect"),
        address("gateway"),
        {"0": False, "1": True}.get(arp or ""),
        address("address_inet6"),
    )
