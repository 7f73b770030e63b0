"""What to do first about messages that nobody has entered: who did not respond, what is missing, who did not come."""

from __future__ import annotations

from typing import Any

import pytest

from ascendrun.health.diagnosis import Diagnosis, Evidence, HostEvidence, Line, RankEvidence, diagnose, render
from ascendrun.health.package_pairs import direction
from ascendrun.health.wait_limits import limit_in

FRAMES = 'Traceback (most recent call last):\n  File "/job/train.py", line 12, in <module>\n    run()\n'
PACKAGES = "/opt/py/lib/python3.11/site-packages"


def explain(output: str, accelerator: str = "npu", **facts: Any) -> Diagnosis:
    """The diagnosis of two ranks of one host that both print this and fail, in English."""
    lines = tuple(Line(text, "out", number) for number, text in enumerate(output.splitlines()))
    ranks = tuple(RankEvidence(rank, "a", device=rank, code=1, exited_at_s=60.0, lines=lines) for rank in (0, 1))
    hosts = (HostEvidence("a", facts=facts),)
    given = Evidence("j", "FAILED", cause="failure", world_size=2, ranks=ranks, hosts=hosts, device_type=accelerator)
    return render(diagnose(given), "en")


def frame(package: str, function: str = "call") -> str:
    return f'  File "{PACKAGES}/{package}/core.py", line 7, in {function}\n    value = given.part\n'


@pytest.mark.parametrize(
    ("output", "fix"),
    [
        ("curl: (56) Recv failure: SSL connection timeout", "download it once"),
        ("curl: (6) Could not resolve host: hf-mirror.com", "HF_HUB_OFFLINE=1"),
        ("wget: unable to resolve host address 'pypi.org'", "`curl -sSI https://pypi.org`"),
        ("fatal: unable to access 'https://gitee.com/a/b.git/': Failed to connect", "download it once"),
        ("ERROR: No matching distribution found for wheelhouse (from versions: none)", "PIP_INDEX_URL"),
        (f"{FRAMES}RuntimeError: Data processing error: CAS service error : the stream ended", "HF_HUB_OFFLINE=1"),
        (f"{FRAMES}ConnectionError: cannot reach api.wandb.ai", "WANDB_MODE=offline"),
        (f"{FRAMES}OSError: [Errno 101] Network is unreachable: modelscope.cn", "HF_HUB_OFFLINE=1"),
    ],
)
def test_what_cannot_be_fetched_is_put_on_shared_storage_before_the_job(output: str, fix: str) -> None:
    found = explain(output)
    assert found.domain in ("access", "network")
    assert fix in found.hint.split("; check train.py")[0]


def test_a_service_that_refuses_a_login_needs_a_token_and_no_mirror() -> None:
    found = explain(f"{FRAMES}RuntimeError: 403 Client Error: Forbidden for url: https://huggingface.co/api/x")
    assert found.domain == "access" and found.hint.startswith("give every rank the token")


def test_a_link_to_documentation_is_no_service() -> None:
    found = explain(f"{FRAMES}RuntimeError: link down, see https://huggingface.co/docs/hub")
    assert "HF_HUB_OFFLINE" not in found.hint


@pytest.mark.parametrize(
    ("output", "accelerator", "fix"),
    [
        ("cat: /dev/davinci2: No such file or directory", "npu", "/dev/davinci_manager"),
        (f"{FRAMES}AssertionError: NPU is not available", "npu", "/dev/davinci_manager"),
        (f"{FRAMES}RuntimeError: the device count is 0", "npu", "/dev/davinci_manager"),
        (f"{FRAMES}RuntimeError: Found no NVIDIA driver on your system. Please check it", "cuda", "apptainer --nv"),
        ("nvidia-container-cli: initialization error: nothing found", "cuda", "--gpus all"),
        ("docker: Error: unknown or invalid runtime name: nvidia", "cuda", "--gpus all"),
    ],
)
def test_a_process_without_devices_has_a_hint_with_what_its_container_needs(
    output: str, accelerator: str, fix: str
) -> None:
    found = explain(output, accelerator)
    assert found.domain == "environment"
    assert found.hint.startswith("compare `") and fix in found.hint


@pytest.mark.parametrize(
    "error",
    [
        "AttributeError: 'State' object has no attribute 'shard_plan'",
        "TypeError: State.__init__() takes 2 positional arguments but 3 were given",
        "TypeError: open_state() got multiple values for argument 'plan'",
    ],
)
def test_an_error_between_two_packages_names_both_with_their_versions(error: str) -> None:
    found = explain(FRAMES + frame("trl") + frame("peft") + error, packages={"peft": "0.11.1", "trl": None})
    assert found.domain == "environment"
    assert "belong together (`peft 0.11.1, trl`)" in found.hint


@pytest.mark.parametrize(
    "frames", [frame("peft"), '  File "/job/model.py", line 3, in call\n    self.part\n', frame("trl") + frame("torch")]
)
def test_an_attribute_that_one_package_or_the_program_lacks_is_the_program_s(frames: str) -> None:
    assert explain(f"{FRAMES}{frames}AttributeError: 'State' object has no attribute 'plan'").domain == "program"


def test_a_package_that_fails_while_it_is_imported_is_named() -> None:
    imported = frame("mmlib", "<module>").replace("value = given.part", "for name in names:")
    found = explain(f"{FRAMES}{imported}RuntimeError: dictionary changed size during iteration")
    assert found.domain == "environment" and found.hint.startswith("`mmlib` raised it")


@pytest.mark.parametrize(
    ("output", "named"),
    [
        (
            "torch.distributed.DistStoreError: Timed out after 31 seconds waiting for clients. 1/2 clients joined.",
            "1/2",
        ),
        ("RuntimeError: timed out: 3 of 4 nodes joined within 60 s", "3/4"),
        ("RuntimeError: [gloo/transport/tcp/pair.cc:144] no error, remote=[10.0.0.9]:4242", "10.0.0.9"),
    ],
)
def test_if_all_only_waited_the_hint_begins_with_whom_they_named(output: str, named: str) -> None:
    found = explain(output)
    assert found.ranks == () and found.domain in ("silent", "network")
    assert found.hint.startswith("the messages name whom the ranks waited for") and f"`{named}`" in found.hint


def test_a_key_of_gloo_s_store_names_the_rank_that_did_not_come() -> None:
    found = explain("torch.distributed.DistStoreError: wait timeout after 30000ms, keys: /default_pg/0//cpu//0/rank_1")
    assert found.code == "ranks-missing" and found.ranks == (1,)


def test_a_name_of_a_function_with_a_timeout_is_no_timeout() -> None:
    found = explain(f"{FRAMES}RuntimeError: call of SynchronizeDeviceWithTimeout failed, error code is 507011")
    assert found.domain == "device" and found.ranks == (0, 1)


@pytest.mark.parametrize(
    ("message", "is_numeric"),
    [
        ("gradient overflow in 20 steps", True),
        ("overflow of the loss scale", True),
        ("receive buffer overflow on this peer", False),
        ("integer overflow in the index", False),
    ],
)
def test_only_an_overflow_of_gradients_or_losses_is_numeric(message: str, is_numeric: bool) -> None:
    assert ("learning rate" in explain(f"{FRAMES}RuntimeError: {message}").hint) == is_numeric


def test_of_a_report_of_cann_the_line_that_says_more_than_failed_is_shown() -> None:
    found = explain(
        "RuntimeError: call aclnnMix failed, detail:[PID: 9] Execution_Error(EZ1008): Failed to execute operator Mix.\n"
        "        Solution: 1.If the function does not exist, register it.\n"
        "        weight[0] must have 2 axes, but has 3.[FUNC:CheckWeight][FILE:mix.cpp][LINE:6]\n"
        "        CheckWeight failed.[FUNC:Tile][FILE:mix.cpp][LINE:9]"
    )
    assert "weight[0] must have 2 axes, but has 3" in found.message
    assert "its spelling" not in found.hint, "the list of usual causes is no finding"


def test_a_call_that_synchronises_is_not_the_library_s_error() -> None:
    freed = f'  File "{PACKAGES}/torch_npu/npu/memory.py", line 9, in empty_cache\n    release()\n'
    found = explain(f"{FRAMES}{freed}RuntimeError: NPU function error: aclrtSync, error code is 507011")
    assert found.domain == "device"


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        ("ValueError: expected a non-empty list of tensors", "something is empty"),
        ("ZeroDivisionError: integer modulo by zero", "something is empty"),
        (
            "AssertionError: length 8192 exceeds max_positions 4096",
            "raise the limit that the message names (`max_positions`)",
        ),
        ("UnboundLocalError: local variable 'plan' referenced before assignment", "the code at that line is wrong"),
        ("RuntimeError: Engine initialization failed. See root cause above.", "this only reports that another process"),
        ("pydantic_core.ValidationError: 1 validation error for Plan\nstages\n  Input should be above 0", "(`stages`)"),
    ],
)
def test_the_first_step_is_about_what_the_message_names(error: str, fix: str) -> None:
    assert fix in explain(FRAMES + error).hint.partition("; check train.py")[0]


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        ("AssertionError: Fused attention is not installed here", "install the package"),
        ("ValueError: Unknown device: npu", "import torch_npu"),
        ("RuntimeError: fused attention only supports newer GPUs", "install the build for this chip"),
    ],
)
def test_what_is_not_installed_is_of_the_environment_whatever_tests_for_it(error: str, fix: str) -> None:
    found = explain(FRAMES + error)
    assert found.domain == "environment" and fix in found.hint


@pytest.mark.parametrize(("frames", "is_first"), [(frame("fastlib"), True), ("", False)])
def test_at_a_line_of_an_installed_package_the_package_comes_first(frames: str, is_first: bool) -> None:
    found = explain(f"{FRAMES}{frames}RuntimeError: shape '[14, -1]' is invalid for input of size 768")
    assert found.hint.startswith("`fastlib` raised it") == is_first


def test_a_package_with_a_longer_name_is_another_one() -> None:
    frames = '  File "/job/megatron_patches/core.py", line 3, in patch\n    megatron.core.plan\n'
    found = explain(f"{FRAMES}{frames}AttributeError: module 'megatron.core' has no attribute 'plan'")
    assert found.domain == "environment" and "source repository" in found.hint


def test_a_queue_of_an_engine_is_no_full_shared_memory() -> None:
    assert explain("No available shared memory broadcast block found in 60 seconds.").domain == "silent"


# ---------------------------------------------------------------- two packages that do not fit

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
    found = explain(FRAMES + output, packages=INSTALLED)
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
            ["`train.py:12` uses `ShardPlan`, which `peft 0.11.1`", '"peft<0.11.1"', "change that line"],
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
            "torch.distributed.DistNetworkError: The client socket has timed out after 300000ms while trying to "
            "connect to (10.4.0.9, 29511).",
            "init_process_group(timeout=...)",
            "5 min",
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


# ---------------------------------------------------------------- what a message is about


@pytest.mark.parametrize(
    "message",
    [
        "invalid value timeout=-5 for the store",
        "cannot parse option client.timeout: expected a number",
        "failed to parse /data/checkpoint/socket/plan.yaml line 3",
        "plan 'dataset' has no stages",
        "/srv/jobs/deadlock/run.py: line 3 is not a stage",
        "bad value for --socket-timeout",
    ],
)
def test_a_part_of_a_name_is_not_what_a_message_is_about(message: str) -> None:
    found = explain(f"{FRAMES}RuntimeError: {message}")
    assert found.domain == "program" and "stacks" not in found.hint and "doctor" not in found.hint


@pytest.mark.parametrize(
    ("message", "domain"),
    [
        ("no heartbeat within the timeout of the store", "silent"),
        ("the socket of the store is gone", "network"),
        ("the dataset of stage 2 has no rows", "data"),
    ],
)
def test_a_noun_of_the_message_still_decides(message: str, domain: str) -> None:
    assert explain(f"{FRAMES}RuntimeError: {message}").domain == domain


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("unsupported key ecc_mode", "the message is about `ecc_mode`"),
        ("stage_kind 'fused' is not supported", "the message is about `stage_kind`"),
        ("unsupported operator type 'Mix' on this device", "replace the operation at that line"),
        ("only stage 2 is possible with offload_stage", "(`offload_stage`) until its condition holds"),
        ("Unrecognized class 'plan.Mixer' for this job", "nothing of that name (`plan.Mixer`)"),
    ],
)
def test_a_common_hint_names_the_object_of_the_message(message: str, shown: str) -> None:
    assert shown in explain(f"{FRAMES}RuntimeError: {message}").hint
