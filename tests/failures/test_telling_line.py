"""Which line is the reason: a name on the next line, a warning with the only code, and what a message proves."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from test_what_helps import HEAD, explain


@pytest.mark.parametrize("head", ["", f'{HEAD}  File "/job/a.py", line 3, in go\n    go()\n'])
def test_a_message_that_ends_before_its_object_has_it_on_the_next_line(head: str) -> None:
    found = explain(f"{head}AttributeError: 'Plan' object has no attribute \n'gather_all_v2'")
    assert "has no attribute 'gather_all_v2'" in str(found.values["message"])


def test_a_warning_with_an_exact_error_is_the_last_output_where_there_is_no_other() -> None:
    warned = "/env/lib/a.py:3: UserWarning: CUDA initialization: Error 802: system not yet initialized (at a.cpp:9)\n"
    found = explain(f"{warned}  return count() > 0\n", family="cuda")
    assert "system not yet initialized" in str(found.values["last"]) and "nvidia-fabricmanager" in found.hint
    assert explain(f"{warned}  return count() > 0\ngiving up\n", family="cuda").values["last"] == "giving up"
    assert explain("/env/lib/a.py:3: UserWarning: slow path\n").values["last"] == "-"


@pytest.mark.parametrize(
    ("library", "step"),
    [
        ("libtorch_npu.so", "the loader does not find this library of torch_npu"),
        ("libc10.so", "the loader does not find this library of torch"),
        ("libatb.so", "source /usr/local/Ascend/nnal/atb/set_env.sh"),
    ],
)
def test_a_library_that_is_not_found_leads_to_its_path_and_not_to_another_release(library: str, step: str) -> None:
    found = explain(f"ImportError: {library}: cannot open shared object file: No such file or directory")
    first = found.hint.split("; ")[0]
    assert step in first and "built for another" not in first and "does not fit" not in first
    assert "is missing on" not in found.message


@pytest.mark.parametrize("symbol", ["_ZN7c10_npu9NPUStreamE", "_ZN2at4_ops3addE", "_ZN3atb9OperationE"])
def test_an_undefined_symbol_leads_to_another_release(symbol: str) -> None:
    hint = explain(f"ImportError: /x/site-packages/fastlib/_c.so: undefined symbol: {symbol}").hint
    assert "the loader does not find this" not in hint
    assert "install the build" in hint or "of the same release" in hint


@pytest.mark.parametrize(
    ("err", "code", "head"),
    [("sh: bin/run: Permission denied", 126, "cannot execute it"), ("sh: run: some error", 3, "check its last output")],
)
def test_an_exit_code_with_a_meaning_comes_before_the_words_of_the_output(err: str, code: int, head: str) -> None:
    groups = [{"ranks": "all", "at": 4, "exit": code, "err": err}]
    assert head in explain("", groups=groups).hint.split("; ")[0]


@pytest.mark.parametrize(
    ("err", "code", "retry"),
    [
        ("gpu.cc:414] CUDA_ERROR_CONTAINED: Invalid access of peer memory or a hardware error", -6, "unknown"),
        ("Caught signal 7 (Bus error: nonexistent physical address)", -7, "unknown"),
        (
            "RuntimeError: Initialize:a.ts:146 NPU function error: c10_npu::SetDevice(id), error code is 507033",
            1,
            "unknown",
        ),
        (
            "RuntimeError: The server socket has failed to bind to [::]:29400 (errno: 98 - Address already in use).",
            1,
            "same",
        ),
    ],
)
def test_a_retry_without_changes_is_not_advised_where_the_same_state_fails_again(
    err: str, code: int, retry: str
) -> None:
    groups = [{"ranks": "all", "at": 60, "exit": code, "err": err}]
    assert explain("", groups=groups, family="cuda" if code < 0 else "npu").retry == retry


def test_quotes_of_gnu_are_kept_in_pairs() -> None:
    groups = [{"ranks": "all", "at": 60, "exit": -6, "err": "Assertion `n_done >= n_min' failed"}]
    assert "Assertion 'n_done >= n_min' failed" in explain("", groups=groups).message
    groups = [{"ranks": "all", "at": 60, "exit": -6, "err": "the key `a b` isn't of `c`"}]
    assert "`a b` isn't of `c`" in explain("", groups=groups).message


def test_operators_that_no_library_registered_are_of_their_compiled_package() -> None:
    found = explain("AttributeError: '_OpNamespace' '_C' object has no attribute 'add_turned_'", failed="all")
    assert found.domain == "environment"
    assert found.hint.startswith("no library that was loaded registers this operator")


@pytest.mark.parametrize("indent", ["", "        "])
def test_a_line_of_cann_with_its_place_is_the_detail_where_the_report_only_failed(indent: str) -> None:
    report = (
        "RuntimeError: run:a.cpp:287 OPS function error: aclnnTurn, error code is 561000\n"
        "[ERROR] (PID:36, Device:0, RankID:0) ERR01100 OPS call acl api failed.\n"
        "AclNN_Runtime_Error(EZ9903): InitParseCtx failed\n"
        f"{indent}op[Turn], compile info not contain [_pattern][FUNC:Parse][FILE:auto_tiling.cc][LINE:120]\n"
    )
    assert "compile info not contain [_pattern]" in str(explain(report).values["detail"])


@pytest.mark.parametrize(
    "line", ['  File "/job/train.py", line 9, in run', "compiling helpers", "connect to n2 failed"]
)
def test_the_only_rank_that_printed_under_a_launcher_ended_as_its_launcher(line: str) -> None:
    """torchrun's report is missing, and the line has no reason."""
    found = explain(f"[rank3]: {line}\n", failed="0", ranks=2, launcher="torchrun", world=16, per_host=1)
    assert found.code == "exit-code" and found.ranks == (3,) and found.reason_grade.value != "certain"


def test_which_of_several_ranks_ended_is_not_known_without_the_report_of_their_launcher() -> None:
    found = explain("[rank3]: compiling\n[rank5]: compiling\n", ranks=2, launcher="torchrun", world=16, per_host=1)
    assert found.ranks == ()
