"""The package whose code failed: by frames in its source tree, a cut traceback, and the process that printed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ascendrun.health.whose_code import search_line

sys.path.insert(0, str(Path(__file__).parent))

from test_what_helps import HEAD, SITE, explain

LOG = "(VllmWorker rank=0 pid=71) ERROR 01-23 02:09:10 [executor.py:46] "


def frame(file: str, code: str = "go()") -> str:
    return f'  File "{file}", line 9, in go\n    {code}\n'


@pytest.mark.parametrize(
    "file",
    [
        "/src/rollkit/rollkit/comm/ring.py",
        "/work/roll-kit/roll_kit/comm/ring.py",
        "/RollKit/rollkit/comm/ring.py",
        "/work/my-rollkit/rollkit/ring.py",
        "/work/rollkit-0.7.1/rollkit/comm/ring.py",
        "rollkit/comm/ring.py",
        "/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_06ab/rollkit/utils/ring.py",
    ],
)
def test_a_package_in_its_source_tree_raised_it_if_it_is_not_the_jobs_own(file: str) -> None:
    found = explain(f"{HEAD}{frame('/job/train.py')}{frame(file, 'assert ready')}AssertionError: no ring")
    name = "roll_kit" if "roll_kit" in file else "rollkit"
    assert f"`{name}` raised it (a source tree): if that is not the code of the job itself" in found.hint
    assert "a newer commit or release" in found.hint and found.reason_grade.value != "certain"


def test_a_source_tree_that_calls_an_installed_package_is_its_caller() -> None:
    frames = frame("/job/main.py") + frame("/src/rollkit/rollkit/a.py") + frame(f"{SITE}/commlib/ring.py", "assert on")
    assert "`commlib` raised it in a call by `rollkit`" in explain(f"{HEAD}{frames}AssertionError: no ring").hint


def test_a_line_of_torch_that_a_package_calls_is_not_the_caller() -> None:
    mesh = frame(f"{SITE}/torch/distributed/device_mesh.py", "raise RuntimeError('no submesh')")
    cut = f"{frame(f'{SITE}/commlib/ring.py', 'mesh[0]')}{mesh}"
    for head in (HEAD, ""):
        hint = explain(f"{head}{cut}RuntimeError: no submesh").hint
        assert "`commlib` raised it" in hint and "in a call by `device_mesh.py" not in hint


def test_a_function_of_the_program_that_a_package_calls_is_of_the_program() -> None:
    frames = frame(f"{SITE}/fitlib/loop.py") + frame("/job/steps.py", "raise ValueError('bad loss')")
    assert "fitlib" not in explain(f"{HEAD}{frames}ValueError: bad loss").hint


@pytest.mark.parametrize("file", ["/job/train.py", "/data/train.py", f"{SITE}/torch/nn/modules/module.py"])
def test_a_directory_alone_is_no_package(file: str) -> None:
    found = explain(f"{HEAD}{frame(file)}RuntimeError: no ring")
    assert "raised it" not in found.hint


def test_the_package_in_which_a_cut_traceback_ends_is_named() -> None:
    frames = frame("/work/fast/fast/v1/executor.py", "out = f()") + frame(f"{SITE}/rollkit/worker.py", "out = m.go(s)")
    lines = f"WorkerProc hit an exception.\n{HEAD}{frames}"
    found = explain("".join(f"{LOG}{line}\n" for line in lines.splitlines()))
    assert found.code == "exit-code" and found.values["last"] == "WorkerProc hit an exception."
    assert (
        "`rollkit` may have a defect: search its issues and those of its plugins for `WorkerProc hit an" in found.hint
    )


@pytest.mark.parametrize(
    ("prefix", "name"),
    [
        ("(EngineCore_DP2 pid=1804) ERROR 07-02 15:37:42 [core.py:1231] ", "vllm"),
        ("(Worker_TP2 pid=1804) ERROR 07-02 15:37:42 [core.py:1231] ", "vllm"),
        ("(SGLangEngine pid=1804) ", "sglang"),
        ("(WorkerDict pid=1804) ", "verl"),
        ("[rank0]: ", ""),
    ],
)
def test_whose_process_printed_an_exception_without_frames_is_named(prefix: str, name: str) -> None:
    found = explain(f"{prefix}RuntimeError: mixed plain and sharded parts")
    assert (f"`{name}` may have a defect" in found.hint) is bool(name)
    assert ("a package may have a defect" in found.hint) is not bool(name)


def test_a_rejected_call_of_an_operator_may_be_of_the_engine_that_printed_it() -> None:
    line = "RuntimeError: addmm:build/depend.ts:112 NPU function error: call aclnnAddmm failed, error code is 161002"
    assert (
        "`vllm` may have a defect" in explain(f"(EngineCore_DP0 pid=17) ERROR 12-23 12:56:15 [core.py:868] {line}").hint
    )
    assert "may have a defect" not in explain(line).hint


@pytest.mark.parametrize(
    ("code", "error", "names"),
    [
        (
            "run(",
            "AttributeError: 'DeepSpeedZeroOptimizer' object has no attribute 'ipg_x'",
            "deepspeed` raised it in a call by `train.py:9",
        ),
        (
            "x = self.accelerator.prepare(m)",
            "KeyError: \"Invalid names ('a',) given\"",
            "accelerate` raised it in a call by `fitlib",
        ),
        (
            "x = self.prepare(m)",
            "KeyError: \"Invalid names ('a',) given\"",
            "fitlib` raised it in a call by `train.py:9",
        ),
    ],
)
def test_the_object_that_a_message_or_the_last_code_names_is_of_its_package(code: str, error: str, names: str) -> None:
    library = "torch/autograd" if code == "run(" else "fitlib"
    frames = frame("/job/train.py") + frame(f"{SITE}/{library}/loop.py", code)
    hint = explain(f"{HEAD}{frames}{error}").hint
    assert f"`{names}`: correct what is passed there" in hint and "print the keys" not in hint


def test_of_frames_without_a_head_all_that_follow_each_other_are_read() -> None:
    inner = "".join(frame(f"torch/nn/{one}.py") for one in ("a", "b", "c", "d", "e"))
    found = explain(
        f"{frame('rollkit/models/ring.py')}{inner}RuntimeError: Expected all tensors to be on the same device"
    )
    assert "`rollkit` raised it" in found.hint and found.values["where"] == "ring.py:9"


def test_what_adds_the_accelerator_to_a_package_is_named_too() -> None:
    error = "AttributeError: 'Layer' object has no attribute 'y'"
    frames = f"{HEAD}{frame('/job/a.py')}{frame(f'{SITE}/vllm/core.py', 'x.y')}{error}"
    assert "`vllm_ascend` adds NPUs to it" in explain(frames).hint
    assert "adds NPUs" not in explain(frames.replace("/vllm/", "/rollkit/")).hint


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("'Plan' object has no attribute 'x_1'", "'Plan' object has no attribute 'x_1'"),
        (
            "(Worker_TP2 pid=17) ERROR 10-26 15:55:51 [core.py:597] WorkerProc failed to start.",
            "WorkerProc failed to start.",
        ),
        ("Parent directory /data/x/y does not exist for rank 17", "does not exist for rank"),
        (
            "bad id 2 is out of range for assigned_ids [2] (1 given), see the trace above for more",
            "is out of range for assigned_ids",
        ),
        ("x", ""),
    ],
)
def test_what_to_search_for_has_no_data_of_one_run(message: str, line: str) -> None:
    assert search_line(message) == line


@pytest.mark.parametrize("token", ["Ab3", "a=", "a:", "(1", "/a", "a_b"])
def test_a_message_with_a_long_token_takes_no_longer(token: str) -> None:
    assert len(search_line(f"the plan failed for {token * 40_000}")) <= 100
