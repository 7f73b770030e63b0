"""Programs may import nothing of ascendrun, so they carry a table of chips: it says what ascendrun's own table says."""

from __future__ import annotations

import pytest

from ascendrun.ascend import chips
from ascendrun.ascend.tables import load_table
from ascendrun.planner.chips import CHIPS, chip_of

NPUS = [
    "910B1",
    "910B2",
    "910B2C",
    "910B3",
    "910B4",
    "910B4-1",
    "910A",
    "910ProA",
    "910ProB",
    "910B",
    "910_9392",
    "310P3",
]


@pytest.mark.parametrize("name", NPUS)
def test_both_tables_agree_on_memory_number_format_and_peak(name: str) -> None:
    ours, theirs = chips.chip_of(name), chip_of(f"Ascend{name}")
    assert ours is not None and theirs is not None
    assert ours.has_bf16 == theirs.has_bf16
    if ours.hbm_mb is not None and theirs.memory_gb is not None:
        assert ours.hbm_mb / 1024 == pytest.approx(theirs.memory_gb, rel=0.05)
    if ours.aicore_count and ours.aicore_mhz and theirs.peak_tflops is not None:
        peak_tflops = ours.aicore_count * ours.aicore_mhz * load_table("chips")["flop_per_core_cycle"] / 1e6
        assert peak_tflops == pytest.approx(theirs.peak_tflops, rel=0.02)


def test_every_npu_of_the_programs_table_is_looked_at() -> None:
    looked_at = {chip_of(f"Ascend{name}") for name in NPUS}
    assert {chip for _, chip in CHIPS[:9]} <= looked_at | {chip_of("Ascend950")}
