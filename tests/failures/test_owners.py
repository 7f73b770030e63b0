"""Who provides what an environment lacks gives the fix, and what the versions of a host tell comes first."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from corpus import Builder

from ascendrun.ascend.vocabularies import lacking_in
from ascendrun.health.diagnosis import Diagnosis, diagnose, render

FRAMES = 'Traceback (most recent call last):\n  File "/job/a.py", line 3, in <module>\n    import x\n'
CANN, NNAL = "source /usr/local/Ascend/ascend-toolkit/set_env.sh", "source /usr/local/Ascend/nnal/atb/set_env.sh"


def explain(err: str, facts: dict[str, Any] | None = None) -> Diagnosis:
    """The diagnosis of a job of one node whose ranks all print this and fail, in English."""
    row = {"ranks": 4, "family": "npu", "groups": [{"ranks": "all", "at": 60, "exit": 1, "err": err}]}
    hosts = {"npu01": {"facts": facts}} if facts else {}
    return render(diagnose(Builder({**row, "hosts": hosts}, seed="owners").evidence()), "en")


@pytest.mark.parametrize(
    ("message", "fix", "not_fix"),
    [
        ("ModuleNotFoundError: No module named 'tbe.common'", CANN, "install it there"),
        ("ModuleNotFoundError: No module named 'acl'", CANN, "install it there"),
        ("ImportError: libhccl.so: cannot open shared object file: No such file", CANN, "ldd"),
        ("ImportError: libascend_hal.so: cannot open shared object file: No such file", "driver/lib64", "ldd"),
        ("OSError: /x/libop.so: undefined symbol: _ZN3atb6CreateEv", NNAL, "the pair of one version"),
        ("ImportError: /x/libtorch_npu.so: undefined symbol: aclrtNewEv", "CANN (toolkit", "the pair of one version"),
        ("OSError: /x/ext.so: undefined symbol: _ZN7c10_npu3acl4PeekEv", "another torch_npu", "NNAL"),
        ("ImportError: /x/ext.so: undefined symbol: _ZN2at4_ops5zerosE", "another torch:", "set_env.sh"),
        ("ImportError: /x/ext.so: undefined symbol: _ZTVN5torch8autograd4NodeE", "another torch:", "set_env.sh"),
        ("ImportError: /x/l.so: undefined symbol: _ZNK6AsdOps3Ops18GetOperationByNameERKSs", NNAL, "another torch:"),
        ("ImportError: /x/l.so: undefined symbol: _ZNK2ge5Shape7GetDimsEv", "CANN (toolkit", "another torch:"),
        ("ImportError: /x/l.so: undefined symbol: ncclMemFree", "build for CPU or NPU", "on GPUs"),
        ("ModuleNotFoundError: No module named 'megatron.training'", "pip install -e .", "the package is there"),
        ("ModuleNotFoundError: No module named 'triton'", "triton-ascend", "on GPUs"),
        ("ModuleNotFoundError: No module named 'flash_attn'", "sdpa or eager", "on GPUs"),
        ("AttributeError: module 'peft' has no attribute 'new'", "the package is there", "the pair of one version"),
        ("ModuleNotFoundError: No module named 'peft.tuners.new'", "the package is there", "install it there"),
        ("ModuleNotFoundError: No module named 'vllm._C'", "its source tree", "install it there"),
        ("ModuleNotFoundError: No module named 'megatron'", "pip install -e .", "install it there"),
        ("ModuleNotFoundError: No module named 'peft'", "install it there", "the package is there"),
        ("RuntimeError: Failed to import a because of the following error:\nNo module named 'te'", CANN, "pip install"),
    ],
)
def test_the_owner_of_what_is_missing_gives_the_fix(message: str, fix: str, not_fix: str) -> None:
    found = explain(FRAMES + message)
    assert found.domain == "environment"
    assert fix in found.hint and not_fix not in found.hint


@pytest.mark.parametrize(("own", "free", "is_held"), [("3.40", "12.20 MiB", True), ("58.90", "901.20 MiB", False)])
def test_memory_that_others_hold_comes_before_a_smaller_batch(own: str, free: str, is_held: bool) -> None:
    """The numbers of the allocator tell that this process has little of the device."""
    sizes = f"60.97 GiB total capacity; 3.10 GiB already allocated; {free} free; {own} GiB reserved in total by PyTorch"
    found = explain(f"{FRAMES}RuntimeError: NPU out of memory. Tried to allocate 256.00 MiB (NPU 0; {sizes})")
    assert found.domain == "device-memory"
    assert found.hint.startswith("other processes hold") == is_held


@pytest.mark.parametrize("name", ["NODE_RANK", "RANK"])
def test_a_variable_that_is_not_set_is_named(name: str) -> None:
    assert f"(`{name}`) under `env:`" in explain(f"{FRAMES}KeyError: '{name}'").hint
    assert "env:" not in explain(f"{FRAMES}KeyError: 'tokens'").hint


def test_a_weight_that_the_program_does_not_have_is_of_its_release() -> None:
    assert "vllm-ascend" in explain(f"{FRAMES}KeyError: 'visual.merger.linear_fc1.weight'").hint


def test_the_package_that_raised_is_named_where_nothing_better_is_known() -> None:
    frame = '  File "/opt/lib/python3.10/site-packages/trl/a.py", line 3, in f\n    assert x\n'
    assert "pip index versions trl" in explain(f"{FRAMES}{frame}AssertionError").hint
    assert "pip show" not in explain(f"{FRAMES}AssertionError").hint


def test_a_module_a_symbol_and_a_library_of_nobody_have_no_owner() -> None:
    assert not [*lacking_in("No module named 'peft'; libGL.so.1: cannot open shared object; undefined symbol: png_x")]


def test_versions_that_do_not_fit_by_the_vendors_table_come_first() -> None:
    """The symbol alone would be of any CANN: what was recorded of the host names the versions."""
    err = f"{FRAMES}ImportError: /x/libtorch_npu.so: undefined symbol: aclrtNewEv"
    facts = {"packages": {"torch": "2.6.0", "torch-npu": "2.6.0"}, "cann": "8.0.RC3", "python": "3.10.12"}
    found = explain(err, facts)
    assert [proof.line for proof in found.evidence if proof.line.startswith("version.")] == ["version.cann-older"]
    assert found.hint.startswith("install CANN 8.2.RC1")
    fitting = explain(err, {**facts, "cann": "8.2.RC1"})
    assert not [proof for proof in fitting.evidence if proof.line.startswith("version.")]
    other = explain(f"{FRAMES}KeyError: 'x'", facts)
    assert not [proof for proof in other.evidence if proof.line.startswith("version.")]


ASYNC = (
    "RuntimeError: The Inner error is reported as above. Since the operator is called asynchronously, the stacktrace "
    "may be inaccurate. If you want to get the accurate stacktrace, please set ASCEND_LAUNCH_BLOCKING=1."
)


def test_a_run_that_waits_for_each_operator_is_not_advised_for_memory() -> None:
    memory = "[ERROR] Call rtMalloc fail, purpose: page caching, type = 2, size:3221291008, device_id:0"
    found = explain(f"{memory}\n{FRAMES}{ASYNC}")
    assert found.domain == "device-memory" and "LAUNCH_BLOCKING" not in found.hint
    assert "LAUNCH_BLOCKING=1" in explain(f"{FRAMES}{ASYNC}").hint


def test_the_lines_behind_a_known_error_are_of_its_report() -> None:
    report = "EZ9999: 2026-06-28-13:05:55.631.066  Parse dynamic kernel config fail.\n        Op Cast has no file."
    found = explain(f"RuntimeError: call aclnnCast failed, detail:EZ9999: Inner Error!\n{report}")
    assert (found.code, found.domain) == ("aclnn-call-failed", "environment")
    assert "kernels package of the chip" in found.hint
