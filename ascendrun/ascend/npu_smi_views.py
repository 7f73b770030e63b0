"""Parsers of `npu-smi info -t <type> -i N`: one block of `name : value` lines for each chip of a card.

    parse_common, parse_ecc, parse_memory -> CardView[...]      parse_health -> CardView[ChipHealth]

A block is between blank lines; its `Chip ID` is first or last. A block with a duplicate name contains
lines of two chips: it is reported, not parsed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Callable, Generic, TypeVar

from ascendrun.ascend.npu_smi_rows import HEALTH_STATES
from ascendrun.ascend.reading import Field, Reader, field_of, fields_of, lines_of, once_each, shown, unparsed_of
from ascendrun.ascend.tool_errors import ToolError, split_errors
from ascendrun.core.dataclass import dataclass

T = TypeVar("T")

_MAX_MB = 4 * 2**20
_CODE = re.compile(r"[0-9A-F]{8}")


@dataclass(frozen=True)
class CardView(Generic[T]):
    """One view of one NPU: its chips in the order printed. None: not printed or unreadable."""

    npu_id: int | None
    chip_count: int | None
    chips: tuple[T, ...]
    errors: tuple[ToolError, ...]
    unparsed: tuple[str, ...]


@dataclass(frozen=True)
class ChipCommon:
    """Output of `-t common`. `aicore_mhz`: rated clock; `aicore_now_mhz`: current clock (lower while idle)."""

    chip_id: int | None
    memory_percent: int | None
    hbm_percent: int | None
    aicore_percent: int | None
    aicore_mhz: int | None
    aicore_now_mhz: int | None
    aicore_count: int | None
    temperature_c: int | None
    power_w: float | None


@dataclass(frozen=True)
class EccCounts:
    """Errors of one memory: since the driver started, in total, and retired pages."""

    single_bit: int | None
    double_bit: int | None
    single_bit_total: int | None
    double_bit_total: int | None
    single_bit_pages: int | None
    double_bit_pages: int | None


@dataclass(frozen=True)
class ChipEcc:
    chip_id: int | None
    ddr: EccCounts
    hbm: EccCounts


@dataclass(frozen=True)
class ChipMemory:
    chip_id: int | None
    ddr_mb: int | None
    ddr_mhz: int | None
    hbm_mb: int | None
    hbm_mhz: int | None
    hbm_temperature_c: int | None


@dataclass(frozen=True)
class ChipHealth:
    """Health; `error_codes`: eight hex digits each, as printed; () if the tool prints NA, None if nothing."""

    chip_id: int | None
    health: str | None
    error_codes: tuple[str, ...] | None
    error_texts: tuple[str, ...] | None


def parse_common(text: str) -> CardView[ChipCommon]:
    return _card_view(text, _common)


def parse_ecc(text: str) -> CardView[ChipEcc]:
    return _card_view(text, lambda chip, block: ChipEcc(chip, _ecc(block, "DDR"), _ecc(block, "HBM")))


def parse_memory(text: str) -> CardView[ChipMemory]:
    return _card_view(text, _memory)


def parse_health(text: str) -> CardView[ChipHealth]:
    """Parse `-t health` of a card or a chip. Error texts continue on lines without a name and after blank lines."""
    errors, rest = split_errors(lines_of(text))
    head: dict[str, Field] = {}
    chips: list[ChipHealth] = []
    unread: list[str] = []
    block: list[Field] = []
    last = ""

    def close() -> None:
        """Close a block: a chip, or the board's controller (MCU), which has a name instead of an id."""
        nonlocal block, last
        if block and not (_has(block, "Chip Name") and not _has(block, "Chip ID")):
            chips.append(_health(block, unread))
        block, last = [], ""

    for line in rest:
        field = field_of(line)
        if field is None and line.strip(" \t").startswith(":") and last in ("Error Code", "Error Information"):
            block.append(Field(line, last, line.strip(" \t")[1:].strip()))
        elif field is None:
            unread.append(line)
        elif field.name in ("NPU ID", "Chip Count"):
            head[field.name] = field
        else:
            names_controller = field.name == "Chip Name"
            if _has(block, field.name) or (names_controller and _has(block, "Chip ID")):  # two chips in one block
                close()
            is_last = field.name == "Chip ID" or names_controller
            block.append(field)
            last = field.name
            if is_last and len(block) > 1:
                close()
    close()
    card = Reader(head)
    npu_id, count = card.integer("NPU ID", high=65535), card.integer("Chip Count", high=64)
    return CardView(npu_id, count, tuple(chips), errors, unparsed_of(unread + card.unread()))


def _has(block: Sequence[Field], name: str) -> bool:
    return any(field.name == name for field in block)


class _Card:
    """The header of a view, and the unparsed lines, collected while its blocks are parsed."""

    def __init__(self) -> None:
        self.npu_id: int | None = None
        self.chip_count: int | None = None
        self.unread: list[str] = []

    def reader_of(self, block: Sequence[str]) -> Reader | None:
        """Return the block's fields except the card's; None if a name is duplicated."""
        fields, unread = fields_of(block)
        self.unread.extend(unread)
        by_name = once_each(fields)
        if by_name is None:
            self.unread.extend(field.line for field in fields)
            return None
        reader = Reader(by_name)
        if "NPU ID" in by_name:
            self.npu_id = reader.integer("NPU ID", high=65535)
        if "Chip Count" in by_name:
            self.chip_count = reader.integer("Chip Count", high=64)
        return reader


def _card_view(text: str, read: Callable[[int | None, Reader], T]) -> CardView[T]:
    errors, rest = split_errors(lines_of(text))
    card = _Card()
    chips = []
    for lines in _blocks(rest):
        block = card.reader_of(lines)
        if block is None:
            continue
        names = {field.name for field in fields_of(lines)[0]} - {"NPU ID", "Chip Count"}
        is_controller = "Chip Name" in names and "Chip ID" not in names  # the board's MCU, a chip only by name
        if names and not is_controller:
            chips.append(read(block.integer("Chip ID", high=64), block))
        if not is_controller:
            card.unread.extend(block.unread())
    return CardView(card.npu_id, card.chip_count, tuple(chips), errors, unparsed_of(card.unread))


def _blocks(lines: Sequence[str]) -> list[list[str]]:
    blocks: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            blocks[-1].append(line)
        elif blocks[-1]:
            blocks.append([])
    return [block for block in blocks if block]


def _common(chip_id: int | None, block: Reader) -> ChipCommon:
    return ChipCommon(
        chip_id,
        memory_percent=block.percent("Memory Usage Rate(%)"),
        hbm_percent=block.percent("HBM Usage Rate(%)"),
        aicore_percent=block.percent("Aicore Usage Rate(%)"),
        aicore_mhz=block.integer("Aicore Freq(MHZ)", high=10000),
        aicore_now_mhz=block.integer("Aicore curFreq(MHZ)", high=10000),
        aicore_count=block.integer("Aicore Count", high=1024),
        temperature_c=block.integer("Temperature(C)", low=-60, high=200),
        power_w=block.decimal("NPU Real-time Power(W)", high=5000),
    )


def _ecc(block: Reader, memory: str) -> EccCounts:
    return EccCounts(
        single_bit=block.integer(f"{memory} Single Bit Error Count", high=2**32),
        double_bit=block.integer(f"{memory} Double Bit Error Count", high=2**32),
        single_bit_total=block.integer(f"{memory} Single Bit Aggregate Total Err Cnt", high=2**32),
        double_bit_total=block.integer(f"{memory} Double Bit Aggregate Total Err Cnt", high=2**32),
        single_bit_pages=block.integer(f"{memory} Single Bit Isolated Pages Count", high=2**32),
        double_bit_pages=block.integer(f"{memory} Double Bit Isolated Pages Count", high=2**32),
    )


def _memory(chip_id: int | None, block: Reader) -> ChipMemory:
    block.value("HBM Manufacturer ID")
    return ChipMemory(
        chip_id,
        ddr_mb=block.integer("DDR Capacity(MB)", "Capacity(MB)", "Memory Capacity(MB)", high=_MAX_MB),
        ddr_mhz=block.integer("DDR Clock Speed(MHz)", "Clock Speed(MHz)", high=100000),
        hbm_mb=block.integer("HBM Capacity(MB)", high=_MAX_MB),
        hbm_mhz=block.integer("HBM Clock Speed(MHz)", high=100000),
        hbm_temperature_c=block.integer("HBM Temperature(C)", low=-60, high=200),
    )


def _health(block: Sequence[Field], unread: list[str]) -> ChipHealth:
    known = ("Health", "Health Status", "Error Code", "Error Information", "Chip ID")
    unread.extend(field.line for field in block if field.name not in known)
    head = {f.name: f for f in block if f.name in known and not f.name.startswith("Error ")}
    reader = Reader(head)
    codes_read = [(f, code) for f in block if f.name == "Error Code" for code in f.value.split() if code != "NA"]
    unread.extend(field.line for field, code in codes_read if not _CODE.fullmatch(code))
    texts = [f for f in block if f.name == "Error Information" and f.value not in ("", "NA")]
    named = {field.name for field in block}
    codes = tuple(code for _, code in codes_read if _CODE.fullmatch(code))
    chip = ChipHealth(
        reader.integer("Chip ID", high=64),
        reader.choice(HEALTH_STATES, "Health", "Health Status"),
        codes if "Error Code" in named else None,
        tuple(shown(f.value) for f in texts) if "Error Information" in named else None,
    )
    unread.extend(reader.unread())
    return chip
