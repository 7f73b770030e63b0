"""Facts about unhealthy devices from the output of the device tools after a failure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ascendrun.ascend.npu_smi import parse_info
from ascendrun.health.diagnosis.evidence import DeviceFact
from ascendrun.health.survey.parsers import read_cards, read_ports
from ascendrun.health.survey.scripts import read_sections
from ascendrun.text import Text, listed

BAD_HEALTH = frozenset({"Alarm", "Critical"})
_DEVICE_ADDRESS = re.compile(
    r"(?:logicDevId|deviceLogicId)\[(?P<logic>\d+)\].*?deviceIp\[(?P<ip>[0-9a-fA-F.:]+)\]|"
    r"devicePhyId\[(?P<phy>\d+)\].*?deviceIp\[(?P<ip2>[0-9a-fA-F.:]+)\]"
)


def facts_from_table(text: str, file: str | None = None) -> tuple[DeviceFact, ...]:
    """Return unhealthy chips from `npu-smi info`."""
    section = next((one.text for one in read_sections(text) if one.labels[0] == "info"), text)
    bad = {
        place if chip.logic_id is None else chip.logic_id: chip.health
        for place, chip in enumerate(parse_info(section).chips)
        if chip.health in BAD_HEALTH
    }
    return tuple(DeviceFact(device, listed("device.health", health=health), file) for device, health in bad.items())


def facts_from_cards(text: str, file: str | None = None) -> tuple[DeviceFact, ...]:
    """Return error codes and uncorrectable memory errors from the views of single cards. Cards with two chips
    are counted like devices in npu-smi: two per NPU."""
    cards = read_cards({"out": text})
    chips_each = max((len(chips) for chips in (*cards.ecc.values(), *cards.health.values())), default=1)
    found: list[tuple[int, int | None, Text]] = []
    for npu_id, chip in [(npu_id, chip) for npu_id, chips in cards.health.items() for chip in chips]:
        if chip.health in BAD_HEALTH:
            words = {"codes": ", ".join(chip.error_codes or ()), "details": "; ".join(chip.error_texts or ())}
            problem = listed("device.alarm", health=chip.health, **words)
            found.append((npu_id, chip.chip_id, problem))
    for npu_id, ecc in [(npu_id, ecc) for npu_id, eccs in cards.ecc.items() for ecc in eccs]:
        count = sum(counts.double_bit or 0 for counts in (ecc.hbm, ecc.ddr))
        if count:
            problem = listed("device.ecc", count=count)
            found.append((npu_id, ecc.chip_id, problem))
    return tuple(DeviceFact(npu_id * chips_each + (chip_id or 0), problem, file) for npu_id, chip_id, problem in found)


def facts_from_ports(text: str, file: str | None = None) -> tuple[DeviceFact, ...]:
    """Return network ports from hccn_tool that are down while others of the node are up."""
    ports = read_ports({"out": text})
    if ports is None:
        return ()
    links = {device: port.link.is_up for device, port in ports.ports.items() if port.link is not None}
    if not any(links.values()):
        return ()  # no port is up: the node uses no device network, or unknown
    return tuple(
        DeviceFact(device, listed("device.link-down"), file) for device, is_up in links.items() if is_up is False
    )


def one_per_device(facts: Sequence[DeviceFact]) -> tuple[DeviceFact, ...]:
    """Merge facts of several tools: the first fact of a device, with the problems of the others."""
    merged: dict[int, DeviceFact] = {}
    for fact in facts:
        known = merged.get(fact.device)
        if known is None:
            merged[fact.device] = fact
        elif fact.problem != known.problem:
            both = listed("device.several", first=known.problem, second=fact.problem)
            merged[fact.device] = DeviceFact(fact.device, both, known.file)
    return tuple(merged[device] for device in sorted(merged))


def device_addresses(plog: Sequence[str]) -> Mapping[str, int]:
    """Return the addresses of the devices' network ports, from HCCL's log at the start."""
    found = {}
    for text in plog:
        match = _DEVICE_ADDRESS.search(text) if "deviceIp[" in text else None
        if match is not None:
            address = match.group("ip") or match.group("ip2")
            if address not in ("0.0.0.0", "::"):
                found[address] = int(match.group("logic") or match.group("phy") or 0)
    return found
