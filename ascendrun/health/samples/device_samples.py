"""Sampling of devices: the commands to run on a node with their intervals, and conversion of their output.

    sampling_items(device_type, every_s=5) -> items for the node, which runs them without interpreting them
    DeviceReader(host).take(ToolOutput(...)) -> (samples, unparsed texts)

One table has most values of every NPU in one call (`npu-smi info`). Other values (clock, ECC, link) are queried from
single cards and ports at longer intervals, since each costs a call. Their last values are in
every sample until they are too old. The library below npu-smi (DCMI) would be cheaper than the tool, but it has to
be called from a process on the node through its C interface, whose structures differ between driver versions; it
is not used here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, Callable

from ascendrun.ascend import npu_smi, npu_smi_views, nvidia_smi
from ascendrun.ascend.hccn import LinkHistory, parse_link, parse_link_history, parse_stat
from ascendrun.ascend.npu_smi import NpuChip, NpuSmiInfo
from ascendrun.ascend.npu_smi_views import ChipCommon, ChipEcc
from ascendrun.core.dataclass import dataclass
from ascendrun.core.samples import PORT_COUNTERS, DeviceDetail, DeviceSample, RawText
from ascendrun.health.survey import scripts
from ascendrun.health.survey.scripts import Section, read_sections

EVERY_S = 5.0
HOSTS_A_SECOND = 64.0
"""Samples of hosts that a head processes in a second: 960 hosts have one every 15 s, which screens show as present."""
MB = 2**20
FORGOTTEN_AFTER = 3.5
"""Multiple of an item's interval after which its last values are dropped."""
DETAIL_S = 30.0
"""Interval at which values beyond the metrics are stored even if unchanged."""
REPEATED_S = 3600.0
"""Minimum interval at which the same error of a tool is stored."""
TABLE, CARDS, ECC, PORTS, HISTORY, GPUS = "npu-smi", "npu-cards", "npu-ecc", "npu-ports", "npu-history", "nvidia-smi"
_NVIDIA = r"""
command -v nvidia-smi >/dev/null || exit 127
section() {{ echo "@@ $1"; shift; nvidia-smi "$@" --format=csv 2>&1; printf '\n@@= %s\n' $?; }}
section gpus --query-gpu={}
section apps --query-compute-apps={}
exit 0
""".format(",".join(nvidia_smi.GPU_FIELDS), ",".join(nvidia_smi.APP_FIELDS))


def _argv(script: str, *arguments: str) -> list[str]:
    return ["sh", "-c", script, "ascendrun", *arguments]


_ITEMS: Mapping[str, tuple[str, float, list[str]]] = {
    TABLE: ("npu", 0.0, _argv(scripts.INFO)),
    PORTS: ("npu", 20.0, _argv(scripts.PORTS, "link", "stat")),
    CARDS: ("npu", 30.0, _argv(scripts.CARDS, "common")),
    HISTORY: ("npu", 60.0, _argv(scripts.PORTS, "link_stat")),
    ECC: ("npu", 300.0, _argv(scripts.CARDS, "ecc")),
    GPUS: ("cuda", 0.0, _argv(_NVIDIA)),
}
"""The devices of an item, seconds between two calls (0: the sampling interval), and the command."""


@dataclass(frozen=True)
class ToolOutput:
    """Output of one call of an item. `code` None: it did not end by itself; `at_s`: by the head node's clock."""

    item: str
    at_s: float
    text: str
    code: int | None = 0
    timed_out: bool = False


def sampling_request(device_type: str, *, every_s: float, hosts: int) -> Mapping[str, Any] | None:
    """Return the sampling request to each node of a job; None: nothing to sample. `hosts`: those of all jobs of the
    head; with very many the interval is longer, to limit its load."""
    if every_s == 0:
        return None
    every_s = max(every_s, hosts / HOSTS_A_SECOND)
    return {"every_s": every_s, "items": list(sampling_items(device_type, every_s=every_s))}


def sampling_items(device_type: str | None, *, every_s: float = EVERY_S) -> tuple[Mapping[str, Any], ...]:
    """Return the items of a node whose job uses these devices (npu, cuda, cpu); None: any type present."""
    return tuple(
        {"name": name, "argv": argv, "every_s": max(every_s, pace_s), "timeout_s": 60.0 if pace_s else 20.0}
        for name, (kind, pace_s, argv) in _ITEMS.items()
        if device_type in (None, kind)
    )


@dataclass(frozen=True)
class _Reading:
    """Metrics of one device from one item, with their time."""

    at_s: float
    item: str
    figures: Mapping[str, Any]
    more: Mapping[str, int] = field(default_factory=dict)


class DeviceReader:
    """Parser of the output of a host's tools in order of time. It keeps only the values of slow items."""

    def __init__(self, host: str, *, every_s: float = EVERY_S) -> None:
        self._host, self._every_s = host, every_s
        self._readings: dict[int, dict[str, _Reading]] = {}
        self._octets: dict[int, tuple[float, int | None, int | None]] = {}
        self._devices: dict[tuple[int, int | None], int] = {}
        self._reported_s: dict[tuple[str, str], float] = {}
        self._details: dict[int, DeviceDetail] = {}
        self._new_details: list[DeviceDetail] = []

    def take(self, output: ToolOutput) -> tuple[tuple[DeviceSample, ...], tuple[RawText, ...]]:
        """Return samples, made from items with most values of a device, and errors; never raises for a text."""
        readers: Mapping[str, Callable[[ToolOutput], tuple[tuple[DeviceSample, ...], str | None]]] = {
            TABLE: self._read_table,
            GPUS: self._read_gpus,
            **dict.fromkeys((CARDS, ECC, PORTS, HISTORY), self._read_sections),
        }
        if output.item not in readers or output.code == 127:  # the tool is not installed
            return (), ()
        if output.timed_out:
            return (), self._complain(output, "it did not answer in time")
        samples, why = readers[output.item](output)
        return samples, self._complain(output, why) if why else ()

    def new_details(self) -> tuple[DeviceDetail, ...]:
        """Return other values of devices that changed since the last call or were stored long ago."""
        new, self._new_details = tuple(self._new_details), []
        return new

    def _complain(self, output: ToolOutput, why: str) -> tuple[RawText, ...]:
        reported_s = self._reported_s.get((output.item, why))
        if reported_s is not None and output.at_s - reported_s < REPEATED_S:
            return ()
        self._reported_s[(output.item, why)] = output.at_s
        return (RawText(output.at_s, self._host, output.item, output.text, why),)

    # NPUs

    def _read_table(self, output: ToolOutput) -> tuple[tuple[DeviceSample, ...], str | None]:
        info = npu_smi.parse_info(output.text)
        self._devices.clear()
        samples = []
        for place, chip in enumerate(info.chips):
            device = place if chip.logic_id is None else chip.logic_id
            self._devices[(chip.npu_id, chip.chip_id)] = device
            at_s, host = output.at_s, self._host
            readings = list(self._lately(device, at_s))
            slow = {name: value for reading in readings for name, value in reading.figures.items()}
            figures = {**_table_figures(info, chip), **slow}
            samples.append(DeviceSample(at_s, host, device, "npu", source="npu-smi", **figures))
            ddr = {"ddr_used_mb": chip.ddr_used_mb, "ddr_total_mb": chip.ddr_total_mb} if chip.ddr_total_mb else {}
            values = {**_known(ddr), **{name: count for one in readings for name, count in one.more.items()}}
            processes = _processes(info, chip)
            detail, kept = (
                DeviceDetail(at_s, host, device, "npu", chip.bus_id, values, processes),
                self._details.get(device),
            )
            if kept is None or at_s - kept.at_s >= DETAIL_S or replace(kept, at_s=at_s) != detail:
                self._details[device] = detail
                self._new_details.append(detail)
        return tuple(samples), _complaint(info.errors, info.unparsed, is_empty=not info.chips)

    def _read_sections(self, output: ToolOutput) -> tuple[tuple[DeviceSample, ...], str | None]:
        """Keep the values of single cards or ports for the samples of the table."""
        complaints: list[str | None] = []
        for section in read_sections(output.text):
            number, item = _number(section), section.labels[0]
            if number is None or section.hung:
                complaints.append("a call did not come back")
                continue
            parsed: Any
            found: list[tuple[int | None, dict[str, Any], Mapping[str, int]]]
            if output.item in (CARDS, ECC):
                parse, figures_of = _VIEWS.get(item, _VIEWS["ecc"])
                parsed = parse(section.text)
                found = [(self._devices.get((number, chip.chip_id)), *figures_of(chip)) for chip in parsed.chips]
            elif item == "link":
                parsed = parse_link(section.text)
                found = [(number, {"link_up": parsed.is_up}, {})]
            elif item == "link_stat":
                parsed = parse_link_history(section.text)
                found = [(number, {"link_downs": _downs(parsed)}, _known({"link_ups": parsed.up_count}))]
            else:
                parsed = parse_stat(section.text)
                counters = {name: parsed.values[name] for name in PORT_COUNTERS if name in parsed.values}
                found = [(number, self._rates(number, output.at_s, parsed.values), counters)]
            for device, figures, more in found:
                if device is not None:
                    self._readings.setdefault(device, {})[item] = _Reading(output.at_s, output.item, figures, more)
            complaints.append(_complaint(parsed.errors, parsed.unparsed, is_empty=not found))
        return (), next((one for one in complaints if one), None)

    def _rates(self, device: int, at_s: float, counters: Mapping[str, int]) -> dict[str, Any]:
        """Return bytes/s since the previous sample; None for the first, or if the counter decreased."""
        now = at_s, counters.get("mac_tx_total_oct_num"), counters.get("mac_rx_total_oct_num")
        before = self._octets.get(device)
        self._octets[device] = now
        if before is None or at_s <= before[0]:
            return {}
        rates = [
            None if new is None or old is None or new < old else round((new - old) / (at_s - before[0]), 1)
            for new, old in zip(now[1:], before[1:])
        ]
        return {"link_tx_bytes_s": rates[0], "link_rx_bytes_s": rates[1]}

    def _lately(self, device: int, at_s: float) -> Iterator[_Reading]:
        for reading in self._readings.get(device, {}).values():
            if at_s - reading.at_s <= FORGOTTEN_AFTER * max(self._every_s, _ITEMS[reading.item][1]):
                yield reading

    # GPUs

    def _read_gpus(self, output: ToolOutput) -> tuple[tuple[DeviceSample, ...], str | None]:
        texts = {section.labels[0]: section.text for section in read_sections(output.text)}
        gpus, apps = nvidia_smi.parse_gpus(texts.get("gpus", "")), nvidia_smi.parse_apps(texts.get("apps", ""))
        samples = []
        for gpu in gpus.gpus or ():
            pids = None if apps.apps is None else tuple(app.pid for app in apps.apps if app.bus_id == gpu.bus_id)
            figures = {
                "utilisation": _float(gpu.utilisation_percent),
                "memory_used_bytes": _bytes(gpu.memory_used_mb),
                "memory_total_bytes": _bytes(gpu.memory_total_mb),
                "temperature_c": _float(gpu.temperature_c),
                "frequency_mhz": _float(gpu.sm_mhz),
                **{name: getattr(gpu, name) for name in ("name", "power_w", "ecc_errors")},
            }
            place = (output.at_s, self._host, gpu.index, "cuda")
            samples.append(DeviceSample(*place, source="nvidia-smi", pids=pids, **figures))
        why = _complaint((), (*gpus.unparsed, *apps.unparsed), is_empty=not gpus.gpus)
        return tuple(samples), why


def _table_figures(info: NpuSmiInfo, chip: NpuChip) -> dict[str, Any]:
    has_hbm = bool(chip.hbm_total_mb)
    pids = None if info.processes is None else tuple(pid for pid, _ in _processes(info, chip))
    return {
        "name": chip.name,
        "health": chip.health,
        "utilisation": _float(chip.load_percent),
        "memory_used_bytes": _bytes(chip.hbm_used_mb if has_hbm else chip.ddr_used_mb),
        "memory_total_bytes": _bytes(chip.hbm_total_mb if has_hbm else chip.ddr_total_mb),
        "power_w": chip.power_w,
        "temperature_c": _float(chip.temperature_c),
        "pids": pids,
    }


def _common_figures(chip: ChipCommon) -> tuple[dict[str, Any], Mapping[str, int]]:
    return {"frequency_mhz": chip.aicore_now_mhz}, _known({"hbm_percent": chip.hbm_percent})


def _ecc_figures(chip: ChipEcc) -> tuple[dict[str, Any], Mapping[str, int]]:
    more = _known({f"hbm_{name}": count for name, count in vars(chip.hbm).items()})
    known = [count for count in (chip.hbm.double_bit, chip.ddr.double_bit) if count is not None]
    return {"ecc_errors": sum(known) if known else None}, more


_VIEWS: Mapping[str, tuple[Callable[[str], Any], Callable[[Any], tuple[dict[str, Any], Mapping[str, int]]]]] = {
    "common": (npu_smi_views.parse_common, _common_figures),
    "ecc": (npu_smi_views.parse_ecc, _ecc_figures),
}


def _processes(info: NpuSmiInfo, chip: NpuChip) -> tuple[tuple[int, int | None], ...]:
    return tuple(
        (one.pid, one.memory_mb)
        for one in info.processes or ()
        if one.npu_id == chip.npu_id and one.chip_id in (None, chip.chip_id)
    )


def _known(values: Mapping[str, int | None]) -> dict[str, int]:
    return {name: value for name, value in values.items() if value is not None}


def _complaint(errors: Sequence[Any], unparsed: Sequence[str], *, is_empty: bool) -> str | None:
    """Return why to store the text; None: it was understood completely."""
    if errors:
        return f"tool error: {errors[0].text}"
    if unparsed:
        return f"{len(unparsed)} lines not parsed, first: {unparsed[0].strip()[:80]}"
    return "no device listed" if is_empty else None


def _downs(history: LinkHistory) -> int | None:
    """Return how often the link went down. Older drivers count ups only; one down is between two ups."""
    if history.down_count is not None or not history.up_count or not history.changes:
        return history.down_count
    return history.up_count - (1 if history.changes[0].is_up else 0)


def _number(section: Section) -> int | None:
    word = section.labels[-1]
    return int(word) if len(section.labels) == 2 and word.isascii() and word.isdigit() else None


def _bytes(mb: int | None) -> int | None:
    return None if mb is None else mb * MB


def _float(value: int | None) -> float | None:
    return None if value is None else float(value)
