"""The innermost line of a tool, mixed releases of a toolkit, the owner of a library, and kills during memory work."""

from __future__ import annotations

import pytest

from ascendrun.health.diagnosis import Diagnosis, Evidence, HostEvidence, Line, RankEvidence, diagnose, render
from tests.lib.explained import FRAMES, PACKAGES, explain, frame

HEADER = "/job/plan.cpp:3:10: fatal error: plan/table.h: No such file or directory"
STOPPED = "ninja: build stopped: subcommand failed.\n"
BUILD = f"FAILED: plan.o\n{HEADER}\n    3 | #include <plan/table.h>\ncompilation terminated.\n{STOPPED}"
LINK = "/usr/bin/ld: cannot find -lplan: No such file or directory"
LINKED = f"FAILED: plan.so\n{LINK}\ncollect2: error: ld returned 1 exit status\n{STOPPED}"
CALLED = "subprocess.CalledProcessError: Command '['c++', 'plan.cpp']' returned non-zero exit status 1."


@pytest.mark.parametrize(
    ("output", "line"),
    [
        (f"{FRAMES}RuntimeError: Error building extension 'plan': [1/2] c++ -o plan.o\n{BUILD}", HEADER),
        (f"{FRAMES}RuntimeError: Error building extension 'plan': [2/2] c++ -shared -lplan\n{LINKED}", LINK),
        (f"{BUILD}{FRAMES}{frame('plankit')}{CALLED}", HEADER),
        (f"{FRAMES}{frame('plankit')}{CALLED}\n{BUILD}", HEADER),
        (f"{HEADER}\ncompilation terminated.\nerror: command '/usr/bin/g++' failed with exit code 1", HEADER),
        (f'plan.cu(12): error: identifier "steps" is undefined\n{FRAMES}{CALLED}', "plan.cu(12): error: identifier"),
        (f"/bin/sh: 1: plan-config: not found\n{FRAMES}{CALLED}", "/bin/sh: 1: plan-config: not found"),
        (f"fatal: not a git repository: plans\n{FRAMES}{CALLED}", "fatal: not a git repository: plans"),
    ],
)
def test_the_headline_has_the_innermost_line_of_a_tool_and_not_its_wrapper(output: str, line: str) -> None:
    found = explain(output, "")
    assert line in found.message
    assert "non-zero exit" not in found.message and "build stopped" not in found.message


def test_an_exception_that_reports_no_tool_keeps_its_message() -> None:
    assert "no plan" in explain(f"{HEADER}\n{FRAMES}RuntimeError: no plan of 3 steps", "").message


@pytest.mark.parametrize(("line", "part"), [(BUILD, "this header"), (LINKED, "the linker does not find this library")])
def test_what_a_compiler_or_linker_does_not_find_has_its_own_fix(line: str, part: str) -> None:
    found = explain(f"{line}{FRAMES}{CALLED}", "")
    assert found.domain == "environment" and part in found.hint


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("/usr/local/Ascend/ascend-toolkit/8.0.RC2", "/usr/local/Ascend/ascend-toolkit/8.1.RC1"),
        ("/usr/local/Ascend/cann-8.0.0", "/usr/local/Ascend/cann/8.1.0"),
        ("/usr/local/cuda-11.8", "/usr/local/cuda-12.1"),
    ],
)
def test_two_releases_of_one_toolkit_in_a_message_are_a_mixed_installation(first: str, second: str) -> None:
    found = explain(f"{FRAMES}RuntimeError: plan.so of {first}/lib64 does not load {second}/lib64/libplan.so", "")
    assert found.domain == "environment"
    assert found.hint.startswith("two releases of") and f"`{first}` and `{second}`" in found.hint


def test_one_release_in_two_paths_is_no_mixture() -> None:
    error = "RuntimeError: /usr/local/cuda-12.1/lib64/a.so does not load /usr/local/cuda-12.1/lib64/b.so"
    assert "two releases" not in explain(FRAMES + error, "").hint


@pytest.mark.parametrize(
    ("symbol", "packages", "shown", "grade"),
    [
        ("_ZN2at4_ops4planE", {"torch": "2.5.1", "plankit": "1.2"}, "`plankit 1.2` was built for another", "certain"),
        (
            "_ZN2at4_ops4planE",
            {"torch": "2.5.1"},
            "`plankit` was built for another version than `torch 2.5.1`",
            "likely",
        ),
        ("_ZN2at4_ops4planE", {}, "install the build of `plankit` for the installed `torch`", "likely"),
        ("aclnnPlanTable", {"torch": "2.5.1"}, "install the build of `plankit` for the installed `CANN`", "likely"),
        ("plan_open", {}, "reinstall `plankit`, or build it again", "likely"),
    ],
)
def test_the_owner_of_the_library_is_named_and_certain_only_with_both_versions(
    symbol: str, packages: dict[str, str], shown: str, grade: str
) -> None:
    error = f"ImportError: {PACKAGES}/plankit/_ops.so: undefined symbol: {symbol}"
    found = explain(FRAMES + error, packages=packages)
    assert shown in found.hint and found.reason_grade.value == grade
    assert "torch_npu does not fit" not in found.message


def killed(*output: str) -> Diagnosis:
    lines = tuple(Line(text, "out", number, 50.0) for number, text in enumerate(output))
    ranks = (RankEvidence(0, "a", pid=7, signal=9, exited_at_s=60.0, lines=lines), RankEvidence(1, "a", pid=8))
    hosts = (HostEvidence("a", dmesg=()),)
    return render(diagnose(Evidence("j", "FAILED", cause="failure", world_size=2, ranks=ranks, hosts=hosts)), "en")


@pytest.mark.parametrize(
    "last", ["Loading checkpoint shards:  40%|####  | 2/5", "moving optimizer states to host", "cpu offload of plan"]
)
def test_a_kill_during_work_that_fills_the_memory_of_the_host_is_of_that_memory_first(last: str) -> None:
    found = killed("step 3", last)
    assert (found.domain, found.retry, found.reason_grade.value) == ("host-memory", "unknown", "likely")
    assert found.hint.startswith("memory first: `dmesg") and "/sys/fs/cgroup" in found.hint


def test_another_kill_stays_one_from_outside() -> None:
    assert (killed("step 3").domain, killed("step 3").retry) == ("outside", "same")
