"""A card that is planned for and is not here: its family, its memory, the number format a training would take there."""

from __future__ import annotations

from types import SimpleNamespace

from ascendrun.programs.trainer.devices.accelerator import Accelerator, Precision, choose_precision
from ascendrun.programs.trainer.devices.chips import chip_of
from ascendrun.programs.trainer.errors import InvalidDataError
from ascendrun.programs.trainer.strategies import memory

NPU_NAMES = ("310", "910", "950")


def planned(card: str, dtype: str, here: Accelerator) -> tuple[str, Precision, int | None]:
    """(family, precision, bytes of memory) of `card`; without one, of the device that is here; bytes None: not known.

    Raises ValueError for a card that no table knows, and as choose_precision does.
    """
    if not card:
        return here.family, choose_precision(dtype, here), here.memory_total_bytes()
    chip = chip_of(card)
    if chip is None:
        raise InvalidDataError(
            "program.unknown-chip", "--chip={chip}: unknown chip; examples: 910B3, 910A, H100", chip=card
        )
    family = "npu" if chip.name.startswith(NPU_NAMES) else "cuda"
    its_torch = SimpleNamespace(is_bf16_supported=lambda: chip.has_bf16)
    precision = choose_precision(dtype, Accelerator(family, here.device, card, its_torch))
    return family, precision, None if chip.memory_gb is None else int(chip.memory_gb * memory.GB)
