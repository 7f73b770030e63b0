"""`submit --dry-run` asks the very program: what comes back is its arithmetic, and its verdict."""

from __future__ import annotations

import pytest

from ascendrun.query.memory_estimate import estimate

ARGS = {"synthetic_samples": 40, "batch_size": 4, "cutoff_len": 128}


@pytest.mark.thorough
def test_a_program_s_own_arithmetic_says_what_fits_on_the_chips_of_the_nodes():
    small = estimate("qwen_lora", ARGS, ranks=2, family="npu", chip=lambda: "910B4")
    assert small.fits is True and any("GiB of 32.0 GiB per device" in line for line in small.lines)
    large = estimate("qwen_lora", {**ARGS, "model_preset": "qwen2.5-72b"}, ranks=1, family="npu", chip=lambda: "910B4")
    assert large.fits is False and large.lines[-1].key == "estimate.too-large"
    assert "; change one of: " in large.lines[-1].values["reason"]
    absent = estimate("qwen_lora", {"data_path": "/no/such/rows.json"}, ranks=1, family="cpu", chip=lambda: None)
    assert absent.fits is None and "/no/such/rows.json" in absent.lines[-2].values["reason"]
    assert absent.lines[-1].key == "estimate.on-a-node"
