"""Exceptions and error lines without a traceback: at the end of a rank's output they say why it exited."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from corpus import Builder

from ascendrun.health.diagnosis import Confidence, Diagnosis, diagnose, render

LATER = "\n".join(f"Closing the shard reader {number} of the loader" for number in range(10))
SUMMARY = """\
============================================================
pretrain.py FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-06-12_10:00:05
  host      : n1
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 4031)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================"""


def explain(err: str, *, code: int = 1, **row: object) -> Diagnosis:
    groups = [{"ranks": 0, "at": 60, "err": err, "exit": code}]
    made = {"ranks": 1, "world": 8, "launcher": "torchrun", "family": "npu", "groups": groups, "steps": 4, **row}
    return diagnose(Builder(made, seed="bare").evidence())


@pytest.mark.parametrize("after", ["", LATER, SUMMARY], ids=["last", "before the teardown", "before a summary"])
@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "    ",
        "[rank0]: ",
        "[default0]:[rank0]: ",
        "(Worker_TP0 pid=5120) ",
        "(Worker_TP0 pid=5120) ERROR 06-17 09:12:44 [multiproc_executor.py:622] ",
        "(TrainActor pid=7781, ip=10.0.0.4) ",
        "2026-06-17 09:12:44 ",
        "[2026-06-17 09:12:44,123] ",
        "2026-06-17 09:12:44,123 - trainer - ERROR - ",
        "2026-06-17 09:12:44.123 | ERROR    | fit:main:88 - ",
        "ERROR:root:",
        "node-0: ",
        "the job cannot be trained: ",
        "训练失败：",
    ],
)
def test_an_exception_without_a_traceback_is_read_as_one(prefix: str, after: str) -> None:
    found = explain(f"{prefix}ValueError: 12 heads on 5 shards\n{after}")
    assert (found.code, found.domain, found.ranks) == ("exception", "program", (0,))
    assert str(found.values["message"]).startswith("ValueError: 12 heads on 5 shards")
    assert found.confidence is Confidence.LIKELY
    assert "at ?" not in render(found, "en").message


def test_its_class_gives_the_domain() -> None:
    assert explain(f"(Saver pid=81) PermissionError: '/ckpt/7'\n{LATER}").domain == "storage"
    assert explain(f"zarr.errors.ChunkDecodingError: chunk 0.7\n{LATER}").domain == "data"
    assert explain(f"shards.index.Misplaced: chunk 0.7 is not in the index\n{LATER}").code == "exception"
    assert explain(f"rank 0 ended with MemoryError('cannot allocate 9 GiB')\n{LATER}").domain == "host-memory"


@pytest.mark.parametrize(
    ("err", "message"),
    [
        ("AssertionError", "AssertionError"),
        ("(Worker_TP0 pid=9) NotImplementedError", "NotImplementedError"),
        ("fit:88: ShardError:\n  12 heads on 5 shards", "ShardError: 12 heads on 5 shards"),
        ('{"level": "error", "msg": "ValueError: 12 heads", "rank": 0}', "ValueError: 12 heads"),
        ('KeyError: {"a", "b"}, expected c', 'KeyError: {"a", "b"}, expected c'),
        ('    x = f(y)\n  File "/job/m.py", line 8, in f\n    assert y.shape\nAssertionError', "AssertionError"),
    ],
)
def test_the_message_may_be_missing_below_or_in_json(err: str, message: str) -> None:
    assert explain(f"{err}\n{LATER}").values["message"] == message


def test_a_line_of_code_is_no_exception() -> None:
    assert explain("    raise ShardError\n    except ValueError:\n        return None\n").code == "exit-code"


@pytest.mark.parametrize("line", ["srun: error: n7: task 3: Exited with exit code 1", "[ERROR] fit exits with code 1"])
def test_a_report_of_the_exit_code_is_not_its_reason(line: str) -> None:
    assert explain(f"reading the weights\n{line}\n").code == "exit-code"


def test_a_wrapped_message_is_one() -> None:
    err = "RuntimeError: the weights of the projection of layer seventeen do\nnot fit the layout of the checkpoint\n"
    assert str(explain(err + LATER).values["message"]).endswith("do not fit the layout of the checkpoint")
    assert "Closing" not in str(explain(err + LATER).values["message"])


@pytest.mark.parametrize(
    ("after", "rest"),
    [
        ("'/job/model/part'", " '/job/model/part'"),
        ("INFO closing the reader", ""),
        ("WARNING: closing the reader", ""),
        ('  File "/job/train.py", line 3, in main', ""),
    ],
)
def test_a_message_that_ends_in_a_colon_has_the_next_line(after: str, rest: str) -> None:
    found = explain(f"OSError: the identifier must have one of the forms 'a' or 'a/b':\n{after}\n")
    assert found.values["message"] == f"OSError: the identifier must have one of the forms 'a' or 'a/b':{rest}"


def test_what_the_library_gives_as_its_last_error_is_shown_if_no_rank_is_first() -> None:
    err = "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268, remote process exited or there was a "
    err += "network error\nncclRemoteError: A call failed.\nLast error:\nrecv from 10.0.0.9<33759> failed : reset\n"
    found = explain(err, launcher="spawn", world=16)
    assert found.code == "peer-lost" and found.values["detail"] == "recv from 10.0.0.9<33759> failed : reset"


def test_a_traceback_may_lack_its_top() -> None:
    torn = "    return self.proj(x)\n           ^^^^^^^^^^^^\nValueError: 12 heads on 5 shards\n"
    for prefix in ("", "[rank0]: ", "(TrainActor pid=7781, ip=10.0.0.4) "):
        found = explain("".join(prefix + line for line in torn.splitlines(keepends=True)) + LATER)
        assert found.values["message"] == "ValueError: 12 heads on 5 shards"


@pytest.mark.parametrize(
    "err",
    [
        "INFO retried after ConnectionError: peer is busy",
        "WARNING ImportError: fused kernels are missing",
        "ImportError: no fused kernels, using the slow ones",
        "skipped a sample: ValueError: too long",
        "ValueError: too long\n" + "\n".join(f"step {number} loss 1.5" for number in range(300)),
    ],
)
def test_what_the_program_survived_is_not_its_end(err: str) -> None:
    assert explain(err, times=False).code in ("exit-code", "error-line")


def test_an_exception_of_a_rank_that_exited_0_is_none() -> None:
    assert explain("ValueError: too long", code=0).code != "exception"


@pytest.mark.parametrize(
    "line",
    [
        "[ERROR] the weights of layer 7 are not mapped",
        "fatal: not a directory of shards: /data/7",
        "Error: 12 heads on 5 shards",
        "2026-06-17 09:12:44,123 - fit - ERROR - no shards for stage 3",
    ],
)
def test_the_last_error_line_is_more_than_an_exit_code(line: str) -> None:
    found = explain(f"reading the weights\n{line}\n")
    assert found.code == "error-line" and found.confidence is Confidence.LIKELY
    assert line in render(found, "en").message
    assert explain("reading the weights\n").code == "exit-code"


def test_the_meaning_of_an_exit_code_is_told_also_after_an_error_line() -> None:
    assert "shell" in render(explain("bash: error: pretrain: not found", code=127), "en").cause
