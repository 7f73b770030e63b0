"""What to do first about messages that nobody has entered: who did not respond, what is missing, who did not come."""

from __future__ import annotations

import pytest

from tests.lib.explained import FRAMES, PACKAGES, explain, frame


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
