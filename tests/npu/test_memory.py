"""Memory that is estimated before a device is in use, next to the peak of torch_npu's allocator."""

import json

import pytest

WITHIN = 0.1
RANKS = {
    "alone, float32": 1,
    "alone, bfloat16 by autocast, checkpointed": 1,
    "ddp, float32, two pieces": 2,
    "fsdp2, float32": 2,
}
"""Of the small cases of benchmarks/memory/cases.py, which this process cannot import: it has torch."""


@pytest.mark.parametrize("name", RANKS)
def test_the_estimate_is_near_the_peak_of_the_allocator(launch, npu_server, tmp_path, name):
    npu_server.ask({"import": "peft"})
    out = tmp_path / "out.json"
    launch("memory", [name, "npu", str(out)], ranks=RANKS[name]).succeed()
    found = json.loads(out.read_text())
    assert found["estimated"] == pytest.approx(found["measured"], rel=WITHIN), found
