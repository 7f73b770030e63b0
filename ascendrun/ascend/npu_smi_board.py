"""Parser of `npu-smi info -t board`: the model of a card or chip, and its software versions.

parse_board(text) -> Board
"""

from __future__ import annotations

from dataclasses import replace

from ascendrun.ascend.reading import Reader, fields_of, lines_of, once_each, read_bus_id, unparsed_of
from ascendrun.ascend.tool_errors import ToolError, split_errors
from ascendrun.core.dataclass import dataclass

COMPATIBILITY_STATES = ("OK", "NOK", "UNKNOWN", "NOT SUPPORT")


@dataclass(frozen=True)
class Board:
    """Output of `-t board`; with `-c` the chip's board. `compatibility` (driver with firmware) needs root."""

    npu_id: int | None
    chip_id: int | None
    chip_count: int | None
    chip_type: str | None
    chip_name: str | None
    chip_version: str | None
    product_name: str | None
    serial_number: str | None
    software_version: str | None
    firmware_version: str | None
    compatibility: str | None
    board_id: int | None
    bus_id: str | None
    pci_vendor_id: int | None
    pci_device_id: int | None
    vdie_id: str | None
    errors: tuple[ToolError, ...]
    unparsed: tuple[str, ...]


def parse_board(text: str) -> Board:
    errors, rest = split_errors(lines_of(text))
    fields, unread = fields_of(rest)
    by_name = once_each(fields)
    block = Reader(by_name or {})
    bus = block.value("PCIe Bus Info")
    board = Board(
        npu_id=block.integer("NPU ID", high=65535),
        chip_id=block.integer("Chip ID", high=64),
        chip_count=block.integer("Chip Count", high=64),
        chip_type=block.text("Chip Type"),
        chip_name=block.text("Chip Name"),
        chip_version=block.text("Chip Version"),
        product_name=block.text("Product Name"),
        serial_number=block.text("Serial Number"),
        software_version=block.text("Software Version"),
        firmware_version=block.text("Firmware Version"),
        compatibility=block.choice(COMPATIBILITY_STATES, "Compatibility"),
        board_id=block.hexadecimal("Board ID"),
        bus_id=read_bus_id(bus or ""),
        pci_vendor_id=block.hexadecimal("PCI Vendor ID"),
        pci_device_id=block.hexadecimal("PCI Device ID"),
        vdie_id=block.text("VDie ID", "Die ID"),
        errors=errors,
        unparsed=(),
    )
    for name in _BOARD_NAMES_UNUSED:
        block.value(name)
    if by_name and bus and bus != "NA" and board.bus_id is None:
        unread.append(by_name["PCIe Bus Info"].line)
    return replace(
        board, unparsed=unparsed_of(unread + ([f.line for f in fields] if by_name is None else block.unread()))
    )


_BOARD_NAMES_UNUSED = (
    "Model", "Manufacturer", "PCB ID", "BOM ID", "Slot ID", "Class ID", "Subsystem Vendor ID", "Subsystem Device ID",
    "NDie ID", "Chip Position ID", "Module Board ID", "NPU Name",
)  # fmt: skip
