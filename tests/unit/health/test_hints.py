"""Which steps of a hint fit a job, and what is filled in."""

from __future__ import annotations

import pytest

from ascendrun.health.hints import fitting, named_in
from ascendrun.health.output_facts import facts_in

BOTH = "`SMI` shows it; set HCCL_CONNECT_TIMEOUT=1200; or NCCL_TIMEOUT=1200"


@pytest.mark.parametrize(
    ("printed", "known", "shown"),
    [
        ("HCCL error", {}, "`npu-smi info` shows it; set HCCL_CONNECT_TIMEOUT=1200"),
        ("NCCL error", {}, "`nvidia-smi` shows it; or NCCL_TIMEOUT=1200"),
        ("HCCL error, no NCCL", {}, BOTH.replace("SMI", "npu-smi info / nvidia-smi")),
        ("NCCL error", {"accelerator": "npu"}, "`npu-smi info` shows it; set HCCL_CONNECT_TIMEOUT=1200"),
        ("nothing", {"accelerator": "cpu"}, BOTH.replace("SMI", "npu-smi info / nvidia-smi")),
    ],
)
def test_a_step_is_for_the_accelerator_of_the_job(printed: str, known: dict[str, str], shown: str) -> None:
    assert fitting([BOTH], named_in([printed], known), "en") == shown


def test_what_is_so_already_is_not_proposed() -> None:
    given = {"$ASCEND_LAUNCH_BLOCKING": "1"}
    assert fitting(["run with ASCEND_LAUNCH_BLOCKING=1; see plog"], given, "en") == "see plog"
    assert fitting(["run with ASCEND_LAUNCH_BLOCKING=1"], given, "en") == ""
    assert (
        fitting(["设置 ASCEND_LAUNCH_BLOCKING=0；查看 plog"], given, "zh") == "设置 ASCEND_LAUNCH_BLOCKING=0；查看 plog"
    )


def test_a_step_of_two_hints_is_shown_once() -> None:
    assert fitting(["a; b", "b; c"], {}, "en") == "a; b; c"


def test_code_that_ends_with_a_bracket_stays_and_an_unknown_name_in_brackets_does_not() -> None:
    step = "convert the tensor (`.to(dtype)`, `.contiguous()`) of the operator (`NAME`)"
    without = "convert the tensor (`.to(dtype)`, `.contiguous()`) of the operator"
    assert fitting([step], {}, "en") == without
    assert fitting([step], {"NAME": "aclnnAdd"}, "en") == f"{without} (`aclnnAdd`)"


@pytest.mark.parametrize(
    ("place", "printed", "value"),
    [
        ("PORT", "OSError: [Errno 98] Address already in use: ('0.0.0.0', 29500)", "29500"),
        ("PORT", "server socket has failed to bind to [::]:29501 (errno: 98)", "29501"),
        ("PORT", "The port 50001 has already been bound", "50001"),
        ("PORT", "train.py:1234 failed at 2026-11-20 10:00:00", None),
        ("ADDRESS", "connect to 10.1.2.3:29500 failed", "10.1.2.3"),
        ("ADDRESS", "bind 0.0.0.0:29500, version 2.5.1", None),
        ("NAME", "HTTPSConnectionPool(host='hub.example.com', port=443)", "hub.example.com"),
        ("NAME", "client socket has failed to connect to [train-head]:29500", "train-head"),
        ("PATH", "No such file or directory: '/data/a b/x.bin'", None),
        ("PATH", "No space left on device: '/ckpt/step-10'", "/ckpt/step-10"),
        ("PATH", "cannot open /data/x/y.bin", "/data/x/y.bin"),
        ("FILE", "libascendcl.so.1: cannot open shared object file", "libascendcl.so.1"),
        ("MODULE", "No module named 'acl'", "acl"),
        ("MODULE", "cannot import name 'Cache' from 'transformers' (/opt/x.py)", "transformers"),
        ("VARIABLE", "environment variable MASTER_ADDR expected, but not set", "MASTER_ADDR"),
        ("OPTION", "unrecognized arguments: --use-x", "--use-x"),
    ],
)
def test_the_message_names_what_a_command_is_about(place: str, printed: str, value: str | None) -> None:
    found = named_in([printed], {}).get(place)
    assert found == value
    shown = fitting([f"run `check {place}` and {place}"], named_in([printed], {}), "en")
    assert shown == f"run `check {value or place}` and {place}"


@pytest.mark.parametrize(
    ("printed", "work", "shown"),
    [
        ("(VllmWorker rank=0 pid=7) out of memory", "inference", "smaller batch; of an engine a smaller share"),
        ("out of memory in train_step", "train", "smaller batch; recomputation, ZeRO or LoRA"),
        (
            "(VllmWorker rank=0 pid=7) train_step",
            "",
            "smaller batch; recomputation, ZeRO or LoRA; of an engine a smaller share",
        ),
        ("out of memory", "", "smaller batch; recomputation, ZeRO or LoRA; of an engine a smaller share"),
    ],
)
def test_a_step_is_for_what_runs(printed: str, work: str, shown: str) -> None:
    found = facts_in([printed], [], 1)
    assert found["work"] == work
    hint = "smaller batch; recomputation, ZeRO or LoRA; of an engine a smaller share"
    assert fitting([hint], found, "en") == shown


def test_a_place_that_quotes_another_accelerator_does_not_hide_its_step() -> None:
    given = {"accelerator": "npu", "LINE": "index is on cpu, other tensors on cuda"}
    assert fitting(["search for `LINE`"], given, "en") == "search for `index is on cpu, other tensors on cuda`"
