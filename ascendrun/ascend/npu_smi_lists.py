"""What `npu-smi` lists of a whole node: `info -l`, `info -m`, `info -t topo`, `info watch`, and `-v`.

parse_cards -> CardList       parse_mapping -> ChipMapping      parse_topology -> Topology
parse_watch -> WatchSamples   parse_tool_version -> str | None
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ascendrun.ascend.reading import (
    Reader,
    field_of,
    lines_of,
    once_each,
    read_float,
    read_int,
    read_percent,
    read_word,
    unparsed_of,
)
from ascendrun.ascend.tool_errors import ToolError, split_errors

LINK_KINDS = ("X", "SYS", "PHB", "PIX", "PXB", "HCCS", "SIO", "HCCS_SW", "UB", "NA")

_COLUMNS = ("NPU ID", "Slot ID", "Chip ID", "Chip Logic ID", "Chip Phy-ID", "Chip Name")
_RANGE = re.compile(r"[0-9]{1,5}(?:-[0-9]{1,5})?(?:,[0-9]{1,5}(?:-[0-9]{1,5})?)*")


@dataclass(frozen=True)
class Card:
    """One card of `-l`; product and serial number are printed for cards, not for the modules of 910 servers."""

    npu_id: int
    chip_count: int | None
    product_name: str | None
    serial_number: str | None


@dataclass(frozen=True)
class CardList:
    """`total` is what the tool counted; it may differ from what it lists when a card drops while it runs."""

    total: int | None
    cards: tuple[Card, ...]
    errors: tuple[ToolError, ...]
    unparsed: tuple[str, ...]


@dataclass(frozen=True)
class MappedChip:
    npu_id: int
    chip_id: int
    logic_id: int | None
    phy_id: int | None
    name: str | None


@dataclass(frozen=True)
class ChipMapping:
    """`-m` without the boards' controllers (rows named Mcu), which have no logic id."""

    chips: tuple[MappedChip, ...]
    errors: tuple[ToolError, ...]
    unparsed: tuple[str, ...]


@dataclass(frozen=True)
class Topology:
    """`-t topo`: `links[a][b]` is one of LINK_KINDS, None where unreadable or where both directions contradict.

    `devices` are the tool's own names (NPU0, Phy-ID0) without the NICs; `cpus` their CPU ranges, e.g. 144-167.
    """

    devices: tuple[str, ...]
    links: tuple[tuple[str | None, ...], ...]
    cpus: tuple[str | None, ...]
    errors: tuple[ToolError, ...]
    unparsed: tuple[str, ...]


@dataclass(frozen=True)
class WatchSample:
    npu_id: int
    chip_id: int
    power_w: float | None
    temperature_c: int | None
    aicore_percent: int | None
    memory_percent: int | None
    npu_percent: int | None


@dataclass(frozen=True)
class WatchSamples:
    samples: tuple[WatchSample, ...]
    errors: tuple[ToolError, ...]
    unparsed: tuple[str, ...]


def parse_cards(text: str) -> CardList:
    errors, rest = split_errors(lines_of(text))
    total: int | None = None
    cards: list[Card] = []
    odd: list[str] = []
    block: list[str] = []
    for line in [*rest, ""]:
        if line.strip():
            block.append(line)
            continue
        fields = [field for field in map(field_of, block) if field]
        odd.extend(line for line in block if field_of(line) is None)
        by_name = once_each(fields)
        reader = Reader(by_name or {})
        npu_id = reader.integer("NPU ID", high=65535)
        if npu_id is not None:
            chips, product = reader.integer("Chip Count", high=64), reader.word("Product Name")
            cards.append(Card(npu_id, chips, product, reader.word("Serial Number")))
        counted = reader.integer("Total Count", "Card Count", high=65535)
        total = total if counted is None else counted
        odd.extend([field.line for field in fields] if by_name is None else reader.unread())
        block = []
    return CardList(total, tuple(cards), errors, unparsed_of(odd))


def parse_mapping(text: str) -> ChipMapping:
    errors, rest = split_errors(lines_of(text))
    columns: list[str] = []
    chips, odd = [], []
    for line in rest:
        cells = re.split(r"[ \t]{2,}", line.strip())
        if cells[:1] == ["NPU ID"]:
            columns = cells if all(cell in _COLUMNS for cell in cells) and len(set(cells)) == len(cells) else []
            odd.extend([] if columns else [line])
            continue
        row = dict(zip(columns, cells)) if len(cells) == len(columns) else {}
        npu_id, chip_id = (read_int(row.get(name, ""), 0, 65535) for name in ("NPU ID", "Chip ID"))
        name = row.get("Chip Name", "").rstrip("\N{REPLACEMENT CHARACTER}")
        if npu_id is None or chip_id is None:
            odd.append(line)
        elif name.lower() not in ("mcu", "3559"):
            ids = [read_int(row[column], 0, 65535) if column in row else None for column in _COLUMNS[3:5]]
            chips.append(MappedChip(npu_id, chip_id, ids[0], ids[1], read_word(row.get("Chip Name", ""))))
            unreadable = any(one is None and column in row for one, column in zip(ids, _COLUMNS[3:5]))
            odd.extend([line] if unreadable or chips[-1].name is None else [])
    return ChipMapping(tuple(chips), errors, unparsed_of(odd))


def parse_topology(text: str) -> Topology:
    errors, rest = split_errors(lines_of(text))
    names: list[str] = []
    rows: dict[str, list[str | None]] = {}
    cpus: dict[str, str | None] = {}
    has_cpus = False
    odd = []
    legend = False
    for line in rest:
        words = line.split()
        legend = legend or words[:1] == ["Legend:"]
        if legend or not words:
            continue
        if not names and all(re.fullmatch(r"(?:NPU|Phy-ID|NIC)[0-9]{1,4}|CPU|Affinity", word) for word in words):
            has_cpus = words[-2:] == ["CPU", "Affinity"]
            names = words[:-2] if has_cpus else words
        elif words[0] in names and words[0] not in rows and len(words) == 1 + len(names) + has_cpus:
            rows[words[0]] = [word if word in LINK_KINDS else None for word in words[1 : 1 + len(names)]]
            cpus[words[0]] = words[-1] if has_cpus and _RANGE.fullmatch(words[-1]) else None
            odd.extend([line] if None in rows[words[0]] or (has_cpus and not cpus[words[0]]) else [])
        elif not re.match(r"\s*NIC[0-9]+", line):
            odd.append(line)
    devices = tuple(name for name in dict.fromkeys(names) if not name.startswith("NIC"))
    place = {name: names.index(name) for name in devices}

    def link(one: str, other: str) -> str | None:
        there = rows.get(one, [None] * len(names))[place[other]]
        back = rows.get(other, [None] * len(names))[place[one]]
        return there if there == back and (there == "X") == (one == other) else None

    links = tuple(tuple(link(one, other) for other in devices) for one in devices)
    return Topology(devices, links, tuple(cpus.get(name) for name in devices), errors, unparsed_of(odd))


WATCH_COLUMNS = frozenset(
    {
        "NpuID(Idx)",
        "ChipId(Idx)",
        "Pwr(W)",
        "Temp(C)",
        "AI Core(%)",
        "AI Cpu(%)",
        "Ctrl Cpu(%)",
        "Memory(%)",
        "Memory BW(%)",
        "NPU Util(%)",
        "AI Cube(%)",
    }
)


def parse_watch(text: str) -> WatchSamples:
    """`info watch`: its columns are 12 wide, one row a chip and tick."""
    errors, rest = split_errors(lines_of(text))
    columns: list[str] = []
    samples, odd = [], []
    for line in rest:
        cells = [line[start : start + 12].strip() for start in range(0, len(line.rstrip()), 12)]
        if cells[:1] == ["NpuID(Idx)"]:
            columns = cells if set(cells) <= WATCH_COLUMNS else []
            continue
        is_shifted = any(not line[start - 1].isspace() for start in range(12, len(line.rstrip()), 12))
        row = dict(zip(columns, cells)) if len(cells) == len(columns) and not is_shifted else {}
        npu_id, chip_id = (read_int(row.get(name, ""), 0, 65535) for name in ("NpuID(Idx)", "ChipId(Idx)"))
        if npu_id is None or chip_id is None:
            odd.append(line)
            continue
        percents = [read_percent(row.get(name, "")) for name in ("AI Core(%)", "Memory(%)", "NPU Util(%)")]
        power, heat = read_float(row.get("Pwr(W)", ""), 0, 5000), read_int(row.get("Temp(C)", ""), -60, 200)
        samples.append(WatchSample(npu_id, chip_id, power, heat, *percents))
    return WatchSamples(tuple(samples), errors, unparsed_of(odd))


def parse_tool_version(text: str) -> str | None:
    """The version in `npu-smi -v`; None when the line is not there or was cut."""
    for line in lines_of(text):
        field = field_of(line)
        if field and field.name == "npu-smi version":
            return read_word(field.value)
    return None
