"""Chips by the name that npu-smi, torch or the user gives: family, memory, the peak of the matrix units, bfloat16."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple


class Chip(NamedTuple):
    """One die, which torch lists as one device. `family`: A1, A2, A3, 310P, 310, 950, or cuda of NVIDIA.

    `memory_gb`: GB of 2**30 bytes. `peak_tflops`: dense float16/bfloat16, None: unknown. `doubt` None: from a primary
    source.
    """

    name: str
    family: str
    memory_gb: float | None
    peak_tflops: float | None
    has_bf16: bool
    source: str
    doubt: str | None = None

    @property
    def device_type(self) -> str:
        return "cuda" if self.family == "cuda" else "npu"

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory_gb is None else int(self.memory_gb * 2**30)

    @property
    def peak_flops(self) -> float | None:
        """Dense, in float16 or bfloat16, per second."""
        return None if self.peak_tflops is None else self.peak_tflops * 1e12


CUBE = "cores x clock x 8192, one 16x16x16 multiply-add a cycle"
BOARD = "npu-smi -t common of a real board"
DIAGNOSIS = "mind-cluster fault diagnosis"
NVIDIA = "NVIDIA's data sheet, dense"

CHIPS = (
    (r"910B4-1", Chip("910B4-1", "A2", 64, None, True, "seen in pastes", "20 cores, from pastes; clock not known")),
    (r"910B4", Chip("910B4", "A2", 32, 270, True, f"{DIAGNOSIS}; {CUBE}", "20 cores at about 1650 MHz, from pastes")),
    (r"910B1", Chip("910B1", "A2", 64, 353.9, True, f"{BOARD}, 24 x 1800 MHz; {CUBE}")),
    (r"910B2C", Chip("910B2C", "A2", 64, 353.9, True, f"npu-smi; {CUBE}", "24 x 1800 MHz taken from the 910B2")),
    (r"910B2", Chip("910B2", "A2", 64, 353.9, True, f"{DIAGNOSIS}; {CUBE}", "24 x 1800 MHz taken from the 910B1")),
    (r"910B3", Chip("910B3", "A2", 64, 294.9, True, f"{DIAGNOSIS}; {CUBE}", "20 x 1800 MHz, not verified")),
    (
        r"910(ProA|ProB|A)",
        Chip("910A", "A1", 32, 262.1, False, f"{DIAGNOSIS}; {CUBE}; 32 x 1000 MHz", "one sample has 30 x 900 MHz"),
    ),
    (r"910B", Chip("910B (first generation)", "A1", 32, None, False, DIAGNOSIS, "also written for 910B1 to 910B4")),
    (
        r"910_93\d\d|Ascend910",
        Chip("Ascend910 (A3)", "A3", 64, 354, True, f"{DIAGNOSIS}; npu-smi", "the peak is a third-party estimate"),
    ),
    (r"310P\d?", Chip("310P", "310P", 21, None, False, "pastes", "21 or 43 GB of LPDDR; an inference card")),
    (r"310B?\d?", Chip("310", "310", None, None, False, "npu-smi", "an inference card")),
    (r"950(PR|DT)?", Chip("950", "950", 128, 432, True, "npu-smi and hccn_tool", "one source only for both figures")),
    (r".*H200.*", Chip("H200", "cuda", 141, 989, True, NVIDIA)),
    (r".*H100.*", Chip("H100", "cuda", 80, 989, True, f"{NVIDIA}, SXM")),
    (r".*H800.*", Chip("H800", "cuda", 80, 989, True, NVIDIA)),
    (r".*H20.*", Chip("H20", "cuda", 96, 148, True, NVIDIA)),
    (r".*A100.*80GB.*", Chip("A100 80 GB", "cuda", 80, 312, True, NVIDIA)),
    (r".*A100.*", Chip("A100", "cuda", 40, 312, True, NVIDIA)),
    (r".*L40S.*", Chip("L40S", "cuda", 48, 362, True, NVIDIA)),
    (r".*RTX 4090.*", Chip("RTX 4090", "cuda", 24, 165.2, True, f"{NVIDIA}, float32 accumulation")),
    (r".*V100.*", Chip("V100", "cuda", 32, 125, False, NVIDIA)),
)
"""Most specific first. bfloat16 of NPUs: torch_npu's IsBF16Supported."""


@lru_cache(maxsize=256)
def chip_of(name: str) -> Chip | None:
    """Return the chip of a name with or without "Ascend"; None: not in the table."""
    plain = " ".join(name.split())
    spellings = (plain, re.sub(r"^Ascend ?(?=.)", "", plain))
    for pattern, chip in CHIPS:
        if any(re.fullmatch(pattern, spelling) for spelling in spellings):
            return chip
    return None
