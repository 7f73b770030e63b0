"""Which two packages do not fit and in which direction, and which limit ended a wait."""

from __future__ import annotations

import pytest

from ascendrun.health.package_pairs import direction
from ascendrun.health.wait_limits import limit_in
from tests.lib.explained import FRAMES, PACKAGES, explain, frame

INSTALLED = {"peft": "0.11.1", "trl": "0.9.4", "torch": "2.5.1+cpu", "transformers": "4.40.1"}


@pytest.mark.parametrize(
    ("output", "named"),
    [
        (  # pip
            "ImportError: tensorpack 1.4.2 requires shardio<3,>=2.6, but you have shardio 2.1.0 which is incompatible.",
            ["`shardio 2.1.0` is older than `tensorpack 1.4.2` requires", '`python -m pip install "shardio<3,>=2.6"`'],
        ),
        (  # transformers
            "ImportError: shardio>=0.2,<0.5 is required for a normal functioning of this module, "
            "but found shardio==0.5.",
            ["`shardio 0.5`", '`python -m pip install "shardio>=0.2,<0.5"`'],
        ),
        (  # pkg_resources
            "pkg_resources.ContextualVersionConflict: (shardio 8.1 (/opt/py/lib/python3.11/site-packages), "
            "Requirement.parse('shardio<8'), {'tensorpack'})",
            ["`shardio 8.1` is newer than `tensorpack` accepts", '"shardio<8"', "upgrade `tensorpack`"],
        ),
        (
            "RuntimeError: CANN 8.0.RC3 requires driver >= 24.1, but the driver version is 23.0.6",
            ["`CANN 8.0.RC3` requires `driver>=24.1`, and `driver 23.0.6` is there", "install `driver` in that range"],
        ),
        (
            "RuntimeError: torch_npu 2.6.0 does not match torch 2.5.1",
            ["`torch_npu 2.6.0` and `torch 2.5.1` do not belong together", "the `torch` of `torch_npu 2.6.0`"],
        ),
        (
            "RuntimeError: CANN version 8.0.RC2 and driver version 23.0.3 do not match.",
            ["`CANN 8.0.RC2` and `driver 23.0.3` do not belong together", "the `driver` of `CANN 8.0.RC2`"],
        ),
        (
            "RuntimeError: \nThe detected CUDA version (12.2) mismatches the version that was used to compile\n"
            "PyTorch (11.8). Please make sure to use the same CUDA versions.",
            ["`PyTorch` and `CUDA 12.2` do not belong together"],
        ),
        (
            "ImportError: fastops was built with torch 2.3.0, but torch 2.5.1 is installed",
            ["`fastops` was built for another version than `torch 2.5.1`", '`python -m pip install "torch==2.3.0"`'],
        ),
        (
            "ImportError: /lib64/libstdc++.so.6: version `GLIBCXX_3.4.29' not found (required by "
            f"{PACKAGES}/fastops/_core.cpython-311-aarch64-linux-gnu.so)",
            ["`fastops` requires `GLIBCXX_3.4.29`, and `/lib64/libstdc++.so.6` is older"],
        ),
        (
            f"ImportError: {PACKAGES}/trl/_ops.cpython-311.so: undefined symbol: _ZN2at4_ops5zerosE",
            ["`trl 0.9.4` was built for another version than `torch 2.5.1+cpu`", "`_ZN2at4_ops5zerosE`"],
        ),
    ],
)
def test_a_message_about_two_packages_names_both_with_their_versions_and_the_direction(
    output: str, named: list[str]
) -> None:
    found = explain(FRAMES + output, "", packages=INSTALLED)
    assert found.domain == "environment"
    assert not [part for part in named if part not in found.hint], found.hint


@pytest.mark.parametrize(
    ("frames", "error", "named"),
    [
        (
            frame("trl"),
            "ImportError: cannot import name 'ShardPlan' from 'peft.plans' (/x/peft/plans.py)",
            ["`trl 0.9.4` uses `ShardPlan`, which `peft 0.11.1`", '"peft>0.11.1"', '"peft<0.11.1"', "upgrade `trl`"],
        ),
        (
            frame("trl") + frame("peft", "__getattr__"),
            "AttributeError: module 'peft' has no attribute 'ShardPlan'",
            ["`trl 0.9.4` uses `ShardPlan`, which `peft 0.11.1`", "upgrade `trl`"],
        ),
        (
            "",
            "ImportError: cannot import name 'ShardPlan' from 'peft.plans' (/x/peft/plans.py)",
            ["`train.py:12` uses `ShardPlan`, which `peft 0.11.1`", '"peft<0.11.1"', "correct that line"],
        ),
        (
            frame("trl"),
            "ImportError: cannot import name 'Rope' from 'fastops.rope' (/x/fastops/rope.py)",
            ["`trl 0.9.4` uses `Rope`, which the installed `fastops` does not have", "upgrade `fastops`"],
        ),
        (  # the deepest frame calls
            frame("trl") + frame("transformers"),
            "TypeError: PlanTrainer.shard() got an unexpected keyword argument 'plan_size'",
            ["`transformers 4.40.1` uses `plan_size`, which `trl 0.9.4` does not have", '"trl>0.9.4"'],
        ),
        (  # it only passes on what the frame above gave it
            frame("trl") + frame("peft").replace("given.part", "inner(*args, **kwargs)"),
            "TypeError: shard() got an unexpected keyword argument 'plan_size'",
            ["`trl 0.9.4` uses `plan_size`, which `peft 0.11.1` does not have", '"peft>0.11.1"'],
        ),
        (
            frame("transformers"),
            "TypeError: MyModel.forward() got an unexpected keyword argument 'plan_size'",
            ["`transformers 4.40.1` passes `plan_size` to `MyModel.forward()`", "older `transformers`"],
        ),
    ],
)
def test_the_caller_and_the_callee_are_of_the_frames(frames: str, error: str, named: list[str]) -> None:
    found = explain(FRAMES + frames + error, packages=INSTALLED)
    assert not [part for part in named if part not in found.hint], found.hint


@pytest.mark.parametrize(
    "error",
    [
        "ImportError: cannot import name 'Plan' from partially initialized module 'peft' (a circular import)",
        "AttributeError: 'Plan' object has no attribute 'size'",
        "ModuleNotFoundError: No module named 'megatron.core'",
    ],
)
def test_a_circle_an_object_and_a_source_tree_are_no_pair(error: str) -> None:
    assert "-m pip install" not in explain(FRAMES + frame("trl") + error, packages=INSTALLED).hint


@pytest.mark.parametrize(
    ("has", "needs", "shown"),
    [
        ("2.1.0", ">=2.6,<3", "older"),
        ("3.0", ">=2.6,<3", "newer"),
        ("3.0.0", "<=3", "requires"),
        ("1.9+cpu", "==2.0", "older"),
        ("2.1", "==2.0.0", "newer"),
        ("2.0.1", "~=2.0", "requires"),
        ("2.0", "!=2.0", "requires"),
    ],
)
def test_the_direction_follows_from_the_numbers(has: str, needs: str, shown: str) -> None:
    assert direction(has, needs) == shown


# ---------------------------------------------------------------- the limit that ended a wait


@pytest.mark.parametrize(
    ("output", "limit", "after"),
    [
        (
            "torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 1/2 clients joined.",
            "init_process_group(timeout=...)",
            "15 min 1 s",
        ),
        (
            "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to "
            "complete",
            "init_process_group(timeout=...)",
            "30 min",
        ),
        (
            "[rank0]:[E1122 03:00:01.551 ProcessGroupHCCL.cpp:616] [Rank 0] Watchdog caught collective operation "
            "timeout: WorkHCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=64, NumelOut=64, Timeout(ms)=1836000) ran for "
            "1836029 milliseconds before timing out.",
            "init_process_group(timeout=...)",
            "30 min 36 s",
        ),
        ("RuntimeError: Rank 1 failed to pass monitoredBarrier in 45000 ms", "monitored_barrier(timeout=...)", "45 s"),
        (
            "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError",
            "torchrun --rdzv-conf=join_timeout=SECONDS",
            "",
        ),
        ("ray.exceptions.GetTimeoutError: Get timed out: some object(s) not ready.", "ray.get(..., timeout=...)", ""),
    ],
)
def test_the_limit_that_ended_the_wait_is_named_with_its_value(output: str, limit: str, after: str) -> None:
    found = explain(FRAMES + output if "Error" in output.partition(":")[0] else output)
    shown = f"`{limit}` ended the wait (`{after}`)" if after else f"`{limit}` ended the wait:"
    assert shown in found.hint and "only if what they waited for" in found.hint


@pytest.mark.parametrize(
    ("texts", "frames", "limit", "after"),
    [
        (["ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress"], "", "TORCH_NCCL_", "8 min"),
        (
            ["[TaskExecStage][Timeout] hccl fftsplus task timeout occurred, timeout:30min(default)"],
            "",
            "HCCL_EXEC_TIMEOUT",
            "30 min",
        ),
        (["The client socket has timed out after 300000ms"], "", "init_process_group(timeout=...)", "5 min"),
        (["EI0002: Notify register times out"], "", "HCCL_EXEC_TIMEOUT", "20 min"),
        (["topo exchange server get socket timeout! timeout[120 s]"], "", "HCCL_CONNECT_TIMEOUT", "2 min"),
        (
            ["wait timeout after 60000ms"],
            'File "/x/accelerate/state.py"',
            "InitProcessGroupKwargs(timeout=...)",
            "1 min",
        ),
        (["wait timeout after 60000ms"], 'File "/x/deepspeed/comm/torch.py"', "deepspeed.init_distributed(", "1 min"),
        (
            ["Cannot provide a placement group of 4 devices within 1800 seconds"],
            "",
            "ray.get(placement_group",
            "30 min",
        ),
        (["fit() got an unexpected keyword argument 'timeout'"], "", "", ""),
    ],
)
def test_a_library_sets_the_limit_by_an_option_of_its_own(
    texts: list[str], frames: str, limit: str, after: str
) -> None:
    found = limit_in(texts, frames, {"HCCL_EXEC_TIMEOUT": "1200"})
    assert found.get("LIMITED", "").startswith(limit) and found.get("AFTER", "") == after
    assert bool(found) == bool(limit)
