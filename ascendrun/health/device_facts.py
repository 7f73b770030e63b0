"""Facts about unhealthy devices from the output of the device tools after a failure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ascendrun.ascend.npu_smi import parse_info
from ascendrun.ascend.vocabularies import wording
from ascendrun.health.diagnosis.evidence import DeviceFact
from ascendrun.health.survey.parsers import read_cards, read_ports
from ascendrun.health.survey.scripts import read_sections
from ascendrun.text import Text, listed

BAD_HEALTH = frozenset({"Alarm", "Critical"})


def device_facts(texts: Iterable[tuple[str, str, str]]) -> tuple[DeviceFact, ...]:
    """Return the unhealthy devices by the tools' output: of each text the kind of its file, itself, and its path. The
    problems of a device by several tools are one fact."""
    merged: dict[int, DeviceFact] = {}
    for kind, text, file in texts:
        for device, problem in _READERS[kind](text) if kind in _READERS else ():
            known = merged.setdefault(device, DeviceFact(device, problem, file))
            if known.problem != problem:
                both = listed("device.several", first=known.problem, second=problem)
                merged[device] = DeviceFact(device, both, known.file)
    return tuple(merged[device] for device in sorted(merged))


def _of_table(text: str) -> Iterator[tuple[int, Text]]:
    """Yield unhealthy chips from `npu-smi info`."""
    section = next((one.text for one in read_sections(text) if one.labels[0] == "info"), text)
    for place, chip in enumerate(parse_info(section).chips):
        if chip.health in BAD_HEALTH:
            device = place if chip.logic_id is None else chip.logic_id
            yield device, listed("device.health", health=chip.health)


def _of_cards(text: str) -> Iterator[tuple[int, Text]]:
    """Yield error codes and uncorrectable memory errors from the views of single cards. Cards with two chips are
    counted like devices in npu-smi: two per NPU."""
    cards = read_cards({"out": text})
    chips_each = max((len(chips) for chips in (*cards.ecc.values(), *cards.health.values())), default=1)
    for npu_id, chip in [(npu_id, chip) for npu_id, chips in cards.health.items() for chip in chips]:
        if chip.health in BAD_HEALTH:
            words = {"codes": chip.error_codes or (), "details": "; ".join(chip.error_texts or ())}
            device = npu_id * chips_each + (chip.chip_id or 0)
            yield device, listed("device.alarm", health=chip.health, **words)
    for npu_id, ecc in [(npu_id, ecc) for npu_id, eccs in cards.ecc.items() for ecc in eccs]:
        count = sum(counts.double_bit or 0 for counts in (ecc.hbm, ecc.ddr))
        if count:
            yield npu_id * chips_each + (ecc.chip_id or 0), listed("device.ecc", count=count)


def _of_ports(text: str) -> Iterator[tuple[int, Text]]:
    """Yield network ports from hccn_tool that are down while others of the node are up: else the node uses no device
    network, or unknown."""
    ports = read_ports({"out": text})
    known = {} if ports is None else ports.ports
    links = {device: port.link.is_up for device, port in known.items() if port.link is not None}
    if any(links.values()):
        yield from ((device, listed("device.link-down")) for device, is_up in links.items() if is_up is False)


_READERS = {"table.txt": _of_table, "cards.txt": _of_cards, "ports.txt": _of_ports}


def device_addresses(plog: Sequence[str]) -> Mapping[str, int]:
    """Return the addresses of the devices' network ports, from HCCL's log at the start."""
    found = {}
    for text in plog:
        match = wording("device-address").search(text) if "deviceIp[" in text else None
        if match is not None:
            found[match["ip"] or match["ip2"]] = int(match["logic"] or match["phy"] or 0)
    return {address: device for address, device in found.items() if address not in ("0.0.0.0", "::")}
