"""/etc/hccn.conf: the addresses that each NPU's network port should have after a boot.

    parse_hccn_conf(text) -> HccnConf(ports: {npu: HccnPort}, unparsed)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Dict, List, Mapping, Optional, Tuple

from ascendrun.ascend.reading import field_of, read_ip, unparsed_of

_KEY = re.compile(r"(address|netmask|netdetect|gateway|send_arp_status|prefix_length)_([0-9]{1,4})(_inet6)?")


@dataclass(frozen=True)
class HccnPort:
    """What is configured for one NPU's port; None where the file does not say or says what nobody can read.

    `address_inet6` stands under a key that no primary source confirms (address_N_inet6).
    """

    address: Optional[str] = None
    netmask: Optional[str] = None
    netdetect: Optional[str] = None
    gateway: Optional[str] = None
    sends_arp: Optional[bool] = None
    address_inet6: Optional[str] = None


@dataclass(frozen=True)
class HccnConf:
    """The ports by the number in their keys. `unparsed` holds unknown keys, bad values and doubled lines."""

    ports: Mapping[int, HccnPort]
    unparsed: Tuple[str, ...]


def parse_hccn_conf(text: str) -> HccnConf:
    values: Dict[Tuple[int, str], str] = {}
    odd: List[str] = []
    doubled = set()
    for line in (line.rstrip("\r") for line in text.split("\n")):
        field = field_of(line, "=")
        found = _KEY.fullmatch(field.name) if field else None
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if field is None or found is None:
            odd.append(line)
            continue
        key = int(found[2]), found[1] + (found[3] or "")
        if values.setdefault(key, field.value) != field.value:
            doubled.add(key)
            odd.append(line)
    ports: Dict[int, HccnPort] = {}
    for number in sorted({number for number, _ in values}):
        said = {name: value for (n, name), value in values.items() if n == number and (n, name) not in doubled}
        ports[number] = _port(said, number, odd)
    return HccnConf(ports, unparsed_of(odd))


def _port(said: Mapping[str, str], number: int, odd: List[str]) -> HccnPort:
    def address(name: str) -> Optional[str]:
        value = said.get(name, "")
        read = read_ip(value)
        if value and read is None:
            odd.append(f"{name}_{number}={value}")
        return read

    arp = said.get("send_arp_status")
    if arp not in (None, "0", "1"):
        odd.append(f"send_arp_status_{number}={arp}")
    return HccnPort(
        address("address"),
        address("netmask"),
        address("netdetect"),
        address("gateway"),
        {"0": False, "1": True}.get(arp or ""),
        address("address_inet6"),
    )
