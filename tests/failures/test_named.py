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


# ---------------------------------------------------------------- what a message only suspects

LISTED = (
    "(raylet) A worker died or was killed while executing a task by an unexpected system error. Task ID: c3f474b"
    f" Worker ID: {'7e75be22' * 9} Node ID: {'b5b5cba2' * 9} Worker IP address: 0.0.0.0 Worker port: 10176"
    " Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2. End"
    " of file. There are some potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high"
    " memory usage. (2) ray stop --force is called. (3) The worker is crashed unexpectedly due to SIGSEGV."
)


@pytest.mark.parametrize("lead", ["", "x" * 250 + " "])
def test_a_list_of_possible_reasons_is_one_of_hints_and_no_fact(lead: str) -> None:
    found = explain(lead + LISTED, launcher="ray")
    assert (found.domain, found.reason_grade.value, found.confidence.value) == ("outside", "likely", "likely")
    assert found.hint.startswith(
        "only a list of what may have ended that process was printed: `(1) The process is killed"
    )
    assert "(3) The worker is crashed" in found.hint and "dmesg -T" in found.hint


def test_a_lost_connection_without_such_a_list_is_of_the_network() -> None:
    assert explain("worker: connection error code 2").domain == "network"


@pytest.mark.parametrize(
    ("err", "is_told"),
    [
        ("RuntimeError: mixed plain and sharded tensors", True),
        (
            f'{HEAD}  File "/job/fit.py", line 8, in fit\n    fit()\nRuntimeError: mixed plain and sharded tensors',
            False,
        ),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/data/a.bin'", False),
    ],
)
def test_an_exception_without_frames_may_be_a_defect_of_any_package(err: str, is_told: bool) -> None:
    assert ("a package may have a defect" in explain(err).hint) is is_told


def test_a_report_of_cann_with_its_code_in_brackets_is_the_detail() -> None:
    report = (
        "RuntimeError: attend:build/compiler_depend.ts:8 NPU function error: call aclnnAttendV3 failed, error code is "
        "561002\n[ERROR] 2026-04-23-21:39:27 (PID:24, Device:4, RankID:4) ERR00100 PTA call acl api failed.\n"
        "EZ9999: Inner Error!\nEZ9999[PID: 24] 2026-04-23-21:39:27.694.424 (EZ9999):  [CheckKShape] key has shape "
        "[1, 5, 64], it should be equal to [1, 20, 64].[FUNC:CompareShape][FILE:tiling.cpp][LINE:351]\n"
        "        TraceBack (most recent call last):\n       Attend do tiling failed, ret is -1.\n"
    )
    assert "key has shape [1, 5, 64]" in str(explain(report).values)


def test_the_source_line_of_a_warning_is_no_last_output() -> None:
    warned = "/env/lib/a.py:3: UserWarning: slow path\n  return slow()\n"
    assert explain(warned).values["last"] == "-"
    assert explain(f"{warned}giving up\n").values["last"] == "giving up"
