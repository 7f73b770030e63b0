"""What a hint advises, by what the message names: a rank, what was being done, a setting, the job."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from corpus import Builder

from ascendrun.health.diagnosis import Diagnosis, diagnose, render

HEAD = "Traceback (most recent call last):\n"
SITE = "/opt/env/lib/python3.11/site-packages"


def explain(err: str, *, ranks: int = 4, failed: str = "0", **job: Any) -> Diagnosis:
    """The diagnosis of a job whose failed ranks print this, while ascendrun stops the others; in English."""
    groups = [{"ranks": failed, "at": 60, "exit": 1, "err": err}]
    groups += [{"ranks": "rest", "at": 61, "exit": -15, "stopped": True}] if failed != "all" and ranks > 1 else []
    row = {"ranks": ranks, "family": "npu", "groups": groups, **job}
    return render(diagnose(Builder(row, seed="helps").evidence()), "en")


# ---------------------------------------------------------------- whom a message names


@pytest.mark.parametrize(
    ("line", "ranks"),
    [
        ('EI0015: the root waited 120 s. List of unconnected ranks: "[2,3,]".', (2, 3)),
        ("RuntimeError: [1] is retrieving ncclUniqueId from [2] by the store, which gave: Socket Timeout", (2,)),
    ],
)
def test_ranks_that_a_message_names_as_awaited_are_the_first_also_in_quotes(line: str, ranks: tuple[int, ...]) -> None:
    groups = [{"ranks": 1, "at": 180, "exit": 1, "err": f"{HEAD}{line}"}]
    found = diagnose(Builder({"ranks": 4, "per_host": 2, "family": "npu", "groups": groups}, seed="helps").evidence())
    assert found.ranks == ranks


@pytest.mark.parametrize(("size", "member", "ranks"), [(4, 2, ()), (8, 2, (0,)), (4, 5, (0,))])
def test_the_number_of_a_rank_in_a_group_is_not_that_in_the_job(size: int, member: int, ranks: tuple[int, ...]) -> None:
    wait = (
        "The Notify register has not received the Notify record from remote rank: [0]. base information: [taskID[4]]."
    )
    group = f"group information: [group:[plan_7], user define information[no], rankSize[{size}], rankId[{member}]]"
    line = f"EI0002: [PID: 9] 2026-03-04-05:06:07.100.200 The wait execution of the Notify register times out. {wait} "
    groups = [{"ranks": 5, "at": 900, "exit": 1, "err": line + group}]
    groups += [{"ranks": "rest", "at": 901, "exit": -15, "stopped": True}]
    found = diagnose(Builder({"ranks": 8, "family": "npu", "groups": groups}, seed="helps").evidence())
    assert found.ranks == ranks and (found.given["LATE"] == "rank 0") is bool(ranks)


def test_a_port_whose_link_is_down_is_not_one_that_another_process_has() -> None:
    raised = (
        "RuntimeError: EJ0002: [PID: 7] 2026-07-01-09:00:00.000.100 The network port is down.Suggestion: see its link"
    )
    refused = (
        "[hccl_socket.cc:1] [7][Listen] socket type[1], listen on ip[10.9.0.8] and specific port[16777] fail. Check it"
    )
    group = {"ranks": 0, "at": 60, "exit": 1, "err": raised, "plog": f"[ERROR] HCCL(7,python):{{plog}} {refused}"}
    rest = {"ranks": "rest", "at": 61, "exit": -15, "stopped": True}
    job = {"ranks": 4, "family": "npu", "groups": [group, rest]}
    found = render(diagnose(Builder(job, seed="helps").evidence()), "en")
    assert found.domain == "network" and "-link -g" in found.hint


# ---------------------------------------------------------------- what was being done


def test_a_path_that_is_gone_while_it_is_deleted_is_a_race_and_not_to_be_created() -> None:
    frames = f'{HEAD}  File "/job/keep.py", line 9, in prune\n    old.unlink()\n'
    frames += '  File "/usr/lib/python3.11/pathlib.py", line 1147, in unlink\n    os.unlink(self)\n'
    found = explain(f"{frames}FileNotFoundError: [Errno 2] No such file or directory: '/out/step_7.bin'")
    assert found.domain == "storage" and found.retry == "unknown"
    assert found.hint.startswith("the path was deleted twice") and "create it first" not in found.hint
    assert "typing error" not in found.cause
    saved = f'{HEAD}  File "/job/keep.py", line 9, in read\n    open(path)\n'
    other = explain(f"{saved}FileNotFoundError: [Errno 2] No such file or directory: '/out/step_7.bin'")
    assert "deleted twice" not in other.hint


@pytest.mark.parametrize(
    ("path", "code", "after_s", "is_early"),
    [
        ("/tmp/tmpa8x_k2lq/plan.json", 0, 3, True),
        ("/data/plan.json", 0, 3, False),
        ("/tmp/tmpa8x_k2lq/plan.json", 0, 300, False),
        ("/tmp/tmpa8x_k2lq/plan.json", 1, 3, False),
    ],
)
def test_a_temporary_file_that_another_rank_took_with_it_was_removed_too_early(
    path: str, code: int, after_s: int, is_early: bool
) -> None:
    err = f"FileNotFoundError: [Errno 2] No such file or directory: '{path}'"
    groups = [{"ranks": 0, "at": 50, "exit": code}, {"ranks": 1, "at": 50 + after_s, "exit": 1, "err": err}]
    found = render(diagnose(Builder({"ranks": 2, "family": "npu", "groups": groups}, seed="helps").evidence()), "en")
    assert found.hint.startswith("a rank that had ended before removed") is is_early
    assert not is_early or (found.domain == "storage" and found.retry == "unknown")


FULL = "OSError: [Errno 28] No space left on device"


@pytest.mark.parametrize(
    "frames",
    [
        '  File "/usr/lib/python3.11/multiprocessing/queues.py", line 43, in __init__\n    self._rlock = ctx.Lock()\n'
        '  File "/usr/lib/python3.11/multiprocessing/synchronize.py", line 57, in __init__\n    sl = SemLock(\n',
        f'  File "{SITE}/torch/storage.py", line 380, in _share_fd_cpu_\n    return super()._share_fd_cpu_()\n',
    ],
)
@pytest.mark.parametrize("head", [HEAD, ""])
def test_what_was_made_gives_the_place_that_is_full(frames: str, head: str) -> None:
    frames = f'{head}  File "/job/feed.py", line 12, in start\n{frames}{FULL}\n'
    found = explain(f'{frames}  File "/job/feed.py", line 30, in stop\n', family="other")
    assert found.domain == "resource" and found.hint.startswith("what was being made there")
    assert "/dev/shm" in found.hint and "feed.py" not in found.hint and "checkpoints" not in found.hint + found.cause


def test_a_file_of_a_frame_is_not_the_path_that_is_full() -> None:
    frames = f'{HEAD}  File "/job/write.py", line 9, in put\n    out.write(rows)\n{FULL}\n'
    found = explain(f'{frames}  File "/job/write.py", line 30, in stop\n')
    assert found.domain == "storage" and "write.py`" not in found.hint


def test_an_error_that_only_asks_for_more_output_has_no_sure_domain() -> None:
    line = "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)"
    found = explain(f'{HEAD}  File "/job/run.py", line 9, in start\n    go()\n{line}', family="cuda")
    assert found.reason_grade.value == "unknown"
    assert found.hint.startswith("the reason is in the lines for which the message asks")
    assert "df -h /dev/shm" in found.hint
    warned = "w0:7:9 [0] misc/socket.cc:50 NCCL WARN socketStartConnect: Connect to 10.7.0.4<50100> failed"
    found = explain(f'{warned}\n{HEAD}  File "/job/run.py", line 9, in start\n    go()\n{line}', family="cuda")
    assert found.domain == "network" and found.reason_grade.value == "likely" and "GLOO_SOCKET_IFNAME" in found.hint


# ---------------------------------------------------------------- what the message is about


@pytest.mark.parametrize(
    ("message", "shown", "hidden"),
    [
        ("output size must be equal to group_size times input size", "which a call has", "correct the setting"),
        (
            "group_size must be even. Got --group-size 3",
            "correct the setting that the message names (`group_size`)",
            "",
        ),
        (
            "group_size (3) must be even",
            "correct the setting that the message names (`group_size`)",
            "which a call has",
        ),
        (
            "group_size must be even. Please increase group_size or decrease max_len",
            "increase group_size or",
            "correct",
        ),
        ("plan() got an unexpected keyword argument 'block_size'", "another type or version", "remove or rename"),
        ("Some unused parameters of the module have no gradient", "", "remove or rename"),
    ],
)
def test_a_name_is_a_setting_of_the_job_only_if_the_message_shows_it(message: str, shown: str, hidden: str) -> None:
    hint = explain(f'{HEAD}  File "{SITE}/commlib/ring.py", line 9, in check\nRuntimeError: {message}').hint
    assert shown in hint and (not hidden or hidden not in hint)


def test_a_message_that_states_a_condition_comes_first_where_nothing_better_is_known() -> None:
    frames = f'{HEAD}  File "{SITE}/commlib/ring.py", line 9, in check\n'
    hint = explain(f"{frames}KeyError: \"Invalid names ('b',) specified. Valid names are ['a'].\"").hint
    assert hint.startswith("the program states: \"Invalid names ('b',) specified. Valid names are ['a'].\"; `commlib`")
    assert "print the keys" not in hint and "print the keys" in explain(f"{frames}KeyError: 'b'").hint


def test_the_last_line_of_a_program_without_an_exception_may_advise_too() -> None:
    line = "Value error, the scheduler is enabled. max_tokens (4096) is too small. Please increase max_tokens or wait"
    assert explain(line).hint.startswith("the program says: Please increase max_tokens or wait;")


def test_a_broken_file_of_a_cache_is_of_the_ranks_that_share_it() -> None:
    reader = (
        '  File "/usr/lib/python3.11/json/decoder.py", line 355, in raw_decode\n    raise JSONDecodeError("", s, 1)\n'
    )
    error = "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)"
    cached = f'{HEAD}  File "{SITE}/torch/_inductor/heuristics.py", line 740, in load\n    read()\n'
    found = explain(f"{cached}{reader}{error}")
    assert found.domain == "storage" and "put this cache on a disk of each node" in found.hint
    assert explain(f'{HEAD}  File "/job/a.py", line 7, in load\n    read()\n{reader}{error}').domain == "data"


# ---------------------------------------------------------------- the job


@pytest.mark.parametrize(
    ("err", "row", "helps", "not_shown"),
    [
        ("RuntimeError: CUDA out of memory.", {"family": "cuda"}, "`nvidia-smi`", "npu-smi"),
        ("ModuleNotFoundError: No module named 'acl'", {"family": "npu"}, "set_env.sh", "pip install"),
        ("OSError: [Errno 98] Address already in use: ('0.0.0.0', 29500)", {}, "sport = :29500", "PORT"),
        (
            "RuntimeError: call failed. You can set the environment variable ASCEND_LAUNCH_BLOCKING=1.",
            {"family": "npu", "hosts": {"npu01": {"facts": {"environ": {"ASCEND_LAUNCH_BLOCKING": "1"}}}}},
            "--rank 1",
            "LAUNCH_BLOCKING",
        ),
    ],
    ids=["another accelerator", "a module of CANN", "a port", "a variable that is set already"],
)
def test_the_hint_fits_the_job(err: str, row: dict[str, object], helps: str, not_shown: str) -> None:
    frame = f'{HEAD}  File "/job/a.py", line 3, in f\n    g()\n'
    groups = [{"ranks": 1, "at": 60, "exit": 1, "err": frame + err}, {"ranks": "rest", "exit": -15, "stopped": True}]
    found = diagnose(Builder({"ranks": 8, "groups": groups, **row}, seed="found").evidence())
    for lang in ("en", "zh"):
        hint = render(found, lang).hint
        assert helps in hint and not_shown not in hint, hint
