"""Parsers of `npu-smi info -t <type> -i N`: `name : value` lines of a card, in one block for each of its chips.

    parse_common, parse_ecc -> CardView[...]      parse_health -> CardView[ChipHealth]      parse_board -> Board

A block is between blank lines; its `Chip ID` is first or last. A block with a duplicate name contains
lines of two chips: it is reported, not parsed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Callable, Generic, TypeVar

from ascendrun.ascend import reading
from ascendrun.ascend.npu_smi import HEALTH_STATES
from ascendrun.core.dataclass import dataclass

T = TypeVar("T")

COMPATIBILITY_STATES = ("OK", "NOK", "UNKNOWN", "NOT SUPPORT")
_CODE = re.compile(r"[0-9A-F]{8}")
_ID, _MHZ, _COUNT = reading.whole(64), reading.whole(10_000), reading.whole(2**32)
_COMMON_NOT_KEPT = ("Memory Usage Rate(%)", "Aicore Usage Rate(%)")
_BOARD_NOT_KEPT = (
    "NPU ID", "Chip Count", "Chip Type", "Chip Version", "Product Name", "Serial Number", "Board ID", "PCIe Bus Info",
    "PCI Vendor ID", "PCI Device ID", "VDie ID", "Die ID", "Model", "Manufacturer", "PCB ID", "BOM ID", "Slot ID",
    "Class ID", "Subsystem Vendor ID", "Subsystem Device ID", "NDie ID", "Chip Position ID", "Module Board ID",
    "NPU Name",
)  # fmt: skip


class Board(reading.Answer):
    """Output of `-t board`; with `-c` the chip's board. `compatibility` (driver with firmware) needs root."""

    chip_id: int | None = reading.printed("Chip ID", read=_ID)
    chip_name: str | None = reading.printed("Chip Name")
    software_version: str | None = reading.printed("Software Version")
    firmware_version: str | None = reading.printed("Firmware Version")
    compatibility: str | None = reading.printed("Compatibility", read=reading.choice(*COMPATIBILITY_STATES))


@dataclass(frozen=True)
class CardView(reading.Answer, Generic[T]):
    """One view of one NPU: its chips in the order printed. None: not printed or unreadable."""

    npu_id: int | None = reading.printed("NPU ID", read=reading.whole(65535))
    chip_count: int | None = reading.printed("Chip Count", read=_ID)
    chips: tuple[T, ...] = ()


@dataclass(frozen=True)
class ChipCommon:
    """Output of `-t common`. `aicore_mhz`: rated clock; `aicore_now_mhz`: current clock (lower while idle)."""

    chip_id: int | None = reading.printed("Chip ID", read=_ID)
    hbm_percent: int | None = reading.printed("HBM Usage Rate(%)", read=reading.whole(100))
    aicore_mhz: int | None = reading.printed("Aicore Freq(MHZ)", read=_MHZ)
    aicore_now_mhz: int | None = reading.printed("Aicore curFreq(MHZ)", read=_MHZ)
    aicore_count: int | None = reading.printed("Aicore Count", read=reading.whole(1024))
    temperature_c: int | None = reading.printed("Temperature(C)", read=reading.whole(200, -60))
    power_w: float | None = reading.printed("NPU Real-time Power(W)", read=reading.decimal(5000))


@dataclass(frozen=True)
class EccCounts:
    """Errors of one memory: since the driver started, in total, and retired pages."""

    single_bit: int | None = reading.printed("{memory} Single Bit Error Count", read=_COUNT)
    double_bit: int | None = reading.printed("{memory} Double Bit Error Count", read=_COUNT)
    single_bit_total: int | None = reading.printed("{memory} Single Bit Aggregate Total Err Cnt", read=_COUNT)
    double_bit_total: int | None = reading.printed("{memory} Double Bit Aggregate Total Err Cnt", read=_COUNT)
    single_bit_pages: int | None = reading.printed("{memory} Single Bit Isolated Pages Count", read=_COUNT)
    double_bit_pages: int | None = reading.printed("{memory} Double Bit Isolated Pages Count", read=_COUNT)


@dataclass(frozen=True)
class ChipEcc:
    chip_id: int | None
    ddr: EccCounts
    hbm: EccCounts


@dataclass(frozen=True)
class ChipHealth:
    """Health; `error_codes`: eight hex digits each, as printed; () if the tool prints NA, None if nothing."""

    chip_id: int | None = reading.printed("Chip ID", read=_ID)
    health: str | None = reading.printed("Health", "Health Status", read=reading.choice(*HEALTH_STATES))
    error_codes: tuple[str, ...] | None = None
    error_texts: tuple[str, ...] | None = None


def parse_board(text: str) -> Board:
    return reading.read_answer(Board, text, skip=_BOARD_NOT_KEPT)


def parse_common(text: str) -> CardView[ChipCommon]:
    def read(block: reading.Block) -> ChipCommon:
        block.skip(_COMMON_NOT_KEPT)
        return ChipCommon(**block.fill(ChipCommon))

    return _card_view(text, read)


@reading.once
def parse_ecc(text: str) -> CardView[ChipEcc]:
    def read(block: reading.Block) -> ChipEcc:
        ddr, hbm = (EccCounts(**block.fill(EccCounts, memory=memory)) for memory in ("DDR", "HBM"))
        return ChipEcc(block.take(("Chip ID",), _ID), ddr, hbm)

    return _card_view(text, read)


def _card_view(text: str, read: Callable[[reading.Block], T]) -> CardView[T]:
    errors, rest = reading.split_errors(reading.lines_of(text))
    card: dict[str, Any] = {}
    unread: list[str] = []
    chips: list[T] = []
    for lines in _blocks(rest):
        block = reading.Block(lines)
        names = set(block.fields) - {"NPU ID", "Chip Count"}
        card.update(block.fill(CardView))
        if "Chip Name" in names and "Chip ID" not in names:  # the board's MCU, a chip only by name
            unread += block.unread
            continue
        if names:
            chips.append(read(block))
        unread += block.rest()
    return CardView(errors=errors, unparsed=reading.unparsed_of(unread), chips=tuple(chips), **card)


def _blocks(lines: Sequence[str]) -> list[list[str]]:
    blocks: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            blocks[-1].append(line)
        elif blocks[-1]:
            blocks.append([])
    return [block for block in blocks if block]


def parse_health(text: str) -> CardView[ChipHealth]:
    """Parse `-t health` of a card or a chip. Error texts continue on lines without a name and after blank lines."""
    errors, rest = reading.split_errors(reading.lines_of(text))
    head: dict[str, reading.Field] = {}
    chips: list[ChipHealth] = []
    unread: list[str] = []
    block: list[reading.Field] = []

    def has(name: str) -> bool:
        return any(field.name == name for field in block)

    def close() -> None:
        """Close a block: a chip, or the board's controller (MCU), which has a name instead of an id."""
        if block and not (has("Chip Name") and not has("Chip ID")):
            chips.append(_health(block, unread))
        block.clear()

    for line in rest:
        field, last = reading.field_of(line), block[-1].name if block else ""
        if field is None and line.strip(" \t").startswith(":") and last in ("Error Code", "Error Information"):
            block.append(reading.Field(line, last, line.strip(" \t")[1:].strip()))
        elif field is None:
            unread.append(line)
        elif field.name in ("NPU ID", "Chip Count"):
            head[field.name] = field
        else:
            names_controller = field.name == "Chip Name"
            if (has(field.name)) or (names_controller and has("Chip ID")):  # two chips in one block
                close()
            block.append(field)
            if (field.name == "Chip ID" or names_controller) and len(block) > 1:
                close()
    close()
    card = reading.Block(head.values())
    values = card.fill(CardView)
    return CardView(errors=errors, unparsed=reading.unparsed_of(unread + card.unread), chips=tuple(chips), **values)


def _health(block: Sequence[reading.Field], unread: list[str]) -> ChipHealth:
    faults = {"Error Code": [one for one in block if one.name == "Error Code"]}
    faults["Error Information"] = [one for one in block if one.name == "Error Information"]
    rest = reading.Block(one for one in block if one.name not in faults)
    values = rest.fill(ChipHealth)
    unread += rest.rest()
    codes = [(one, code) for one in faults["Error Code"] for code in one.value.split() if code != "NA"]
    unread += [one.line for one, code in codes if not _CODE.fullmatch(code)]
    texts = tuple(reading.shown(one.value) for one in faults["Error Information"] if one.value not in ("", "NA"))
    return ChipHealth(
        error_codes=tuple(code for _, code in codes if _CODE.fullmatch(code)) if faults["Error Code"] else None,
        error_texts=texts if faults["Error Information"] else None,
        **values,
    )
