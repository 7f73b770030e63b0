"""Properties of a device by its name: memory, the peak of its matrix units, bfloat16 support."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """One die, which torch lists as one device. `memory_gb`: GB of 2**30 bytes. `peak_tflops`: dense float16/bfloat16,
    None: unknown. `doubt` None: from a primary source."""

    name: str
    memory_gb: float | None
    peak_tflops: float | None
    has_bf16: bool
    source: str
    doubt: str | None = None

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory_gb is None else int(self.memory_gb * 2**30)

    @property
    def peak_flops(self) -> float | None:
        """Dense, in float16 or bfloat16, per second."""
        return None if self.peak_tflops is None else self.peak_tflops * 1e12

    @property
    def family(self) -> str:
        return "npu" if self.name.startswith(("310", "910", "950")) else "cuda"


CUBE = "cores x clock x 8192, one 16x16x16 multiply-add a cycle"

CHIPS: tuple[tuple[str, Chip], ...] = (
    (r"910B4-1", Chip("910B4-1", 64, None, True, "seen in pastes", "the clock is not known")),
    (r"910B4", Chip("910B4", 32, 270, True, CUBE, "20 cores at about 1650 MHz, from pastes")),
    (r"910B1", Chip("910B1", 64, 353.9, True, CUBE + "; npu-smi of a real board: 24 x 1800 MHz")),
    (r"910B2C?", Chip("910B2", 64, 353.9, True, CUBE, "24 x 1800 MHz taken from the 910B1")),
    (r"910B3", Chip("910B3", 64, 294.9, True, CUBE, "20 x 1800 MHz, not verified")),
    (r"910(ProA|ProB|A)", Chip("910A", 32, 262.1, False, CUBE + "; 32 x 1000 MHz", "one sample has 30 x 900 MHz")),
    (r"910B", Chip("910B, first generation", 32, None, False, "counted with the 910A")),
    (r"910_93\d\d|Ascend910", Chip("910C, one die", 64, 354, True, "third-party estimate", "cores not known")),
    (r"310P\d?", Chip("310P", 21, None, False, "pastes", "21 or 43 GB of LPDDR; an inference card")),
    (r"(Ascend)?950(PR|DT)?", Chip("950", 128, 432, True, "third-party estimate", "one source only")),
    (r".*H200.*", Chip("H200", 141, 989, True, "NVIDIA's data sheet, dense")),
    (r".*H100.*", Chip("H100", 80, 989, True, "NVIDIA's data sheet, SXM, dense")),
    (r".*H800.*", Chip("H800", 80, 989, True, "NVIDIA's data sheet, dense")),
    (r".*H20.*", Chip("H20", 96, 148, True, "NVIDIA's data sheet, dense")),
    (r".*A100.*80GB.*", Chip("A100 80 GB", 80, 312, True, "NVIDIA's data sheet, dense")),
    (r".*A100.*", Chip("A100", 40, 312, True, "NVIDIA's data sheet, dense")),
    (r".*L40S.*", Chip("L40S", 48, 362, True, "NVIDIA's data sheet, dense")),
    (r".*RTX 4090.*", Chip("RTX 4090", 24, 165.2, True, "NVIDIA's data sheet, dense, float32 accumulation")),
    (r".*V100.*", Chip("V100", 32, 125, False, "NVIDIA's data sheet")),
)


def chip_of(name: str) -> Chip | None:
    """Return the chip with this name (from torch, npu-smi or the user); None: not in the table."""
    plain = " ".join(name.split())
    for pattern, chip in CHIPS:
        if re.fullmatch(pattern, plain) or re.fullmatch(pattern, re.sub(r"^Ascend ?(?=.)", "", plain)):
            return chip
    return None
