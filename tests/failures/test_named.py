"""What lines without an exception say: names of errors, devices, and what a launcher only suspects."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from test_what_helps import HEAD, SITE, explain

# ---------------------------------------------------------------- which device


@pytest.mark.parametrize(
    ("line", "domain", "fix"),
    [
        (
            "allocator.cc:414] CUDA_ERROR_CONTAINED: Invalid access of peer memory or a hardware error",
            "device",
            "the node out",
        ),
        ("stream.cc:9] could not query: CUDA_ERROR_NVLINK_UNCORRECTABLE", "device", "the node out"),
        ("runtime: cudaErrorMemoryAllocation at pool.cu:7", "device-memory", "shows what else holds"),
        ("gpu: CUDA_ERROR_SYSTEM_NOT_READY", "environment", "nvidia-fabricmanager"),
        ("gpu: cudaErrorInvalidDeviceFunction in scan.cu", "environment", "belong together"),
        ("gpu: cudaErrorInvalidDevice (7 of 4)", "program", "number of ranks with the devices"),
    ],
)
def test_the_name_of_an_error_of_cuda_in_any_line_gives_the_class(line: str, domain: str, fix: str) -> None:
    groups = [{"ranks": "all", "at": 60, "exit": -6, "err": line}]
    found = explain("", groups=groups, family="cuda")
    assert (found.code, found.domain, found.reason_grade.value) == ("crash", domain, "likely")
    assert fix in found.hint


def test_a_library_that_leaves_a_tensor_on_the_cpu_is_named() -> None:
    frames = f'{HEAD}  File "/job/train.py", line 5, in main\n  File "{SITE}/tunelib/step.py", line 9, in train_step\n'
    message = (
        "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, npu:0 and cpu!"
    )
    hint = explain(frames + message, failed="all").hint
    assert hint.startswith("a step left a tensor or module on the CPU (`tunelib`): search the code")


def test_two_devices_of_one_kind_are_not_left_on_the_cpu() -> None:
    message = (
        "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, npu:0 and npu:1!"
    )
    assert "left a tensor" not in explain(f'{HEAD}  File "/job/a.py", line 5, in main\n{message}').hint
