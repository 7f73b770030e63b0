"""The package whose code failed: by frames in its source tree, a cut traceback, and the process that printed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

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
        "/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_06ab/rollkit/utils/ring.py",
    ],
)
def test_a_package_in_its_source_tree_raised_it_if_it_is_not_the_jobs_own(file: str) -> None:
    found = explain(f"{HEAD}{frame('/job/train.py')}{frame(file, 'assert ready')}AssertionError: no ring")
    name = "roll_kit" if "roll_kit" in file else "rollkit"
    assert f"`{name}` raised it (a source tree): if that is not the code of the job itself" in found.hint
    assert "another commit or release" in found.hint and found.reason_grade.value != "certain"


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
    assert "`rollkit` may have a defect: search its issues and those of its plugins for the quoted" in found.hint


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
