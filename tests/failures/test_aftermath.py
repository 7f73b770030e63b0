"""What helper processes of a rank print after its own report: it is no reason of its end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from corpus import Builder

from ascendrun.health.diagnosis import Diagnosis, diagnose

HELPERS = {
    "alone": "(CompileWorker pid=91) EOFError",
    "pipe": "queue feeder: BrokenPipeError: [Errno 32] Broken pipe",
    "reset": "(Loader pid=92) ConnectionResetError: [Errno 104] Connection reset by peer",
    "message": "loader child: EOFError: Ran out of input",
    "child": "[ERROR] TBE Subprocess[task_distribute] raise error[], main process disappeared!",
}
HELPERS["traceback"] = """\
Process ForkServerProcess-2:
Traceback (most recent call last):
  File "/usr/lib/python3.10/multiprocessing/process.py", line 314, in _bootstrap
    self.run()
  File "/usr/local/Ascend/latest/python/site-packages/tbe/common/repository_manager/route.py", line 262, in distribute
    key, func_name, detail = resource_proxy[TASK_QUEUE].get()
  File "/usr/lib/python3.10/multiprocessing/connection.py", line 383, in _recv
    raise EOFError
EOFError"""
HELPERS["feeder"] = """\
Traceback (most recent call last):
  File "/usr/lib/python3.10/multiprocessing/queues.py", line 244, in _feed
    send_bytes(obj)
  File "/usr/lib/python3.10/multiprocessing/connection.py", line 368, in _send
    n = write(self._handle, buf)
BrokenPipeError: [Errno 32] Broken pipe"""
WATCHDOG = (
    "[rank0]:[E1126 10:00:00.123 compiler_depend.ts:444] [PG 0 Rank 0] Watchdog caught collective operation timeout: "
    "WorkHCCL(SeqNum=118, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1800512 milliseconds before timing out."
)
NOTIFY = (
    "EI0002: [PID: 4001] 2026-11-26-10:00:00.123.117 The wait execution of the Notify register times out. "
    "Reason: The Notify register has not received the Notify record from remote rank [5]."
)
KERNEL = (
    "E39999: [PID: 4001] 2026-11-26-10:00:00.123.117 Inner_Error(E39999): Aicore kernel execute failed, device_id=3, "
    "stream_id=2, task_id=1, fault kernel_name=MatMulV2_7[FUNC:PrintErrorInfo][FILE:task_info.cc][LINE:1234]"
)
RUNTIME = "[ERROR] 2026-11-26-10:00:00 (PID:4001, Device:0, RankID:0) ERR00100 PTA call failed, error code is 507011"


def explain(err: str, *, code: int = 1) -> Diagnosis:
    groups = [{"ranks": 0, "at": 60, "err": err, "exit": code}]
    row = {"ranks": 1, "world": 8, "launcher": "torchrun", "family": "npu", "groups": groups, "steps": 4}
    return diagnose(Builder(row, seed="aftermath").evidence())


@pytest.mark.parametrize("helper", HELPERS.values(), ids=HELPERS)
@pytest.mark.parametrize(
    ("report", "end", "code"),
    [
        (WATCHDOG, 1, "peer-lost"),
        (WATCHDOG, -6, "peer-lost"),
        (NOTIFY, 1, "peer-lost"),
        (KERNEL, 1, "aicore-kernel-named"),
        (RUNTIME, 1, "acl-code"),
        ("Fatal Python error: Aborted", -6, "aborted"),
    ],
    ids=["watchdog", "watchdog, aborted", "notify", "kernel", "runtime", "abort"],
)
def test_helpers_that_fail_after_the_report_of_a_rank(report: str, end: int, code: str, helper: str) -> None:
    found, alone = (explain(f"{report}\n{after}", code=end) for after in (f"{helper}\n{helper}\n", ""))
    assert (found.code, found.domain) == (code, alone.domain)


def test_the_exception_of_the_rank_comes_before_that_of_its_helpers() -> None:
    own = 'Traceback (most recent call last):\n  File "/job/t.py", line 3, in <module>\n    f()\nValueError: 12 heads'
    found = explain(f"{own}\n{HELPERS['traceback']}\n{HELPERS['feeder']}\n")
    assert str(found.values["message"]) == "ValueError: 12 heads"


def test_a_helper_that_only_lost_its_parent_is_not_the_last_error() -> None:
    found = explain(f"[ERROR] stage 2 has 11 layers, of 48\n{HELPERS['child']}\n")
    assert found.code == "error-line" and str(found.values["last"]).endswith("of 48")
