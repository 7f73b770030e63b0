"""Messages that list the ranks that did not come: these are first, and their hosts the place."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from corpus import Builder

from ascendrun.health.diagnosis import Confidence, Diagnosis, Role, diagnose, render

LISTS = [
    "[ERROR] HCCL(41,python):2026-11-26-10:00:00.123.117 [topoinfo_exchange_server.cc:115] [9][TopoInfoExchangeServer]"
    "[Setup]Broadcast Rank Basic Infos failed, connectFailedAgentIdList[4,6,]",
    "RuntimeError: Timed out after 600 s at the barrier, still waiting for ranks 4, 6",
    "RuntimeError: store barrier: waiting for ranks: [4, 6] of group dp",
    "[2026-11-26 10:00:00] ERROR rendezvous: ranks [4, 6] did not join within 600 s",
    "[ERROR] ranks 4 and 6 have not yet reported",
    "[ERROR] ranks (4, 6) never entered the barrier",
    "DistStoreError: Timed out after 601 seconds waiting for clients. 6/8 clients joined. Missing ranks: 4, 6",
    "EI0015: [PID: 41] 2026-11-26-10:00:00.123.117 Not all ranks are there. The ranks that are not connected: [4, 6].",
]


def explain(err: str, **row: object) -> Diagnosis:
    groups = [{"ranks": 0, "at": 60, "err": err, "exit": 1}]
    return diagnose(Builder({"ranks": 1, "family": "npu", "groups": groups, "steps": 4, **row}, seed="a").evidence())


@pytest.mark.parametrize("line", LISTS, ids=[str(number) for number in range(len(LISTS))])
@pytest.mark.parametrize("world", [1, 8], ids=["size unknown", "size known"])
def test_listed_ranks_are_first_though_only_one_rank_was_recorded(line: str, world: int) -> None:
    found = explain(f"{line}\n", launcher="torchrun", world=world)
    assert (found.code, found.ranks, found.domain, found.scope) == ("ranks-missing", (4, 6), "silent", "ranks")
    assert found.confidence is Confidence.LIKELY


def test_all_listed_ranks_of_a_host_are_that_host() -> None:
    err = "RuntimeError: Timed out after 600 s at the barrier, waiting for ranks 4, 5, 6, 7\n"
    rest = [{"ranks": "0-3", "at": 60, "err": err, "exit": 1}, {"ranks": "4-7", "at": 61, "exit": -15, "stopped": True}]
    found = explain("", ranks=8, per_host=4, groups=rest)
    assert (found.ranks, found.hosts, found.scope) == ((4, 5, 6, 7), ("npu02",), "host")


OF_WATCHDOG = "[rank{}]:[E1128 21:11:49.04 ProcessGroupNCCL.cpp:1870] [PG ID 0 PG GUID 0(default_pg) Rank {}] "
TIMED_OUT = (
    f"{OF_WATCHDOG}Received a dump signal due to a collective timeout from this local rank and we will try our best"
    " to dump the debug info. Last enqueued NCCL work: 22, last completed NCCL work: 21."
)


@pytest.mark.parametrize(
    "signal",
    [
        "Observed flight recorder dump signal from another rank via TCPStore.",
        "Received a dump signal due to a collective timeout from  rank 1 and we will try our best to dump the debug "
        "info. Last enqueued NCCL work: 21, last completed NCCL work: 21.",
    ],
)
def test_the_rank_that_only_follows_the_timeout_of_others_was_not_there(signal: str) -> None:
    waiting = [{"ranks": rank, "at": 2400, "exit": -6, "err": TIMED_OUT.format(rank, rank)} for rank in (1, 2)]
    late = {"ranks": 0, "at": 2400, "exit": -6, "err": OF_WATCHDOG.format(0, 0) + signal}
    found = explain("", ranks=3, groups=[late, *waiting])
    assert (found.ranks, found.domain, found.confidence) == ((0,), "silent", Confidence.LIKELY)


def test_ranks_that_all_timed_out_themselves_are_no_crash_of_a_library() -> None:
    waiting = [{"ranks": rank, "at": 2400, "exit": -6, "err": TIMED_OUT.format(rank, rank)} for rank in range(3)]
    found = explain("", ranks=3, groups=waiting)
    assert (found.code, found.domain) == ("peer-lost", "silent")


def test_many_ranks_that_follow_the_timeout_of_one_are_not_named() -> None:
    late = [
        {"ranks": rank, "at": 2400, "exit": -6, "err": OF_WATCHDOG.format(rank, rank) + "dump signal from another rank"}
        for rank in range(1, 8)
    ]
    found = explain(
        "", ranks=8, per_host=4, groups=[{"ranks": 0, "at": 2400, "err": TIMED_OUT.format(0, 0), "exit": -6}, *late]
    )
    assert not {1, 2, 3} & {*found.ranks}


@pytest.mark.parametrize(
    "line",
    ["[INFO] waiting for ranks 4, 6", "[ERROR] ranks 4.5 did not join", "the ranks of words that did not appear: 12"],
)
def test_a_list_that_is_no_report_of_an_end_names_nobody(line: str) -> None:
    rest = [{"ranks": 0, "at": 60, "err": f"{line}\nValueError: 12 heads on 5 shards\n", "exit": 1}]
    assert explain("", launcher="torchrun", world=8, groups=rest).ranks == (0,)


STOPPED = {"ranks": "rest", "at": 1862, "exit": -15, "stopped": True}
TIMEOUT = "[E ProcessGroupNCCL.cpp:475] {}[Rank {}] Watchdog caught collective operation timeout: WorkNCCL({}) ran on."
LIMIT = "Timeout(ms)=1800000"


def waited(call: str, *ranks: int, at: float = 1860, before: str = "", group: str = "") -> list[dict[str, object]]:
    return [{"ranks": rank, "at": at, "exit": -6, "err": before + TIMEOUT.format(group, rank, call)} for rank in ranks]


@pytest.mark.parametrize(
    ("call", "group", "wait", "helps"),
    [
        (f"SeqNum=3, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, {LIMIT}", "", "early", "do that once before the job"),
        (f"SeqNum=19, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, {LIMIT}", "", "one", "the same number of batches"),
        (
            "SeqNum=493, OpType=ALLGATHER, NumelIn=1, NumelOut=4, Timeout(ms)=60000",
            "",
            "one",
            "the limit of `1 min` is short",
        ),
        (f"SeqNum=1, OpType=ALLGATHER, {LIMIT}", "", "first", "is the first collective of its group"),
        (f"OpType=ALLREDUCE, NumelIn=1, NumelOut=1, {LIMIT}", "", "one", "the same number of batches"),
        (
            f"SeqNum=4720, OpType=ALLTOALL_BASE, NumelIn=4070, NumelOut=4070, {LIMIT}",
            "[PG ID 2 PG GUID 5(mesh_sp) Rank 2] ",
            "many",
            "`mesh_sp` is a group that",
        ),
    ],
    ids=["one element at the start", "one element", "a short limit", "the first call", "no number", "a named group"],
)
def test_what_is_known_of_the_call_gives_the_first_step(call: str, group: str, wait: str, helps: str) -> None:
    """The hint was the same for a barrier, for the first call of the run, and for a group of a library."""
    found = explain("", ranks=4, groups=[*waited(call, 2, group=group), STOPPED], family="cpu", launcher="spawn")
    assert (found.code, found.domain, found.given["WAIT"]) == ("peer-lost", "silent", wait)
    assert found.given["SHOWN"] == "2" and found.given["ABSENT"] == ("" if group else "0-1,3")
    shown = render(found, "en")
    assert helps in "; ".join(shown.hint.split("; ")[:3])
    assert "SHOWN" not in shown.hint and "LIMITED" not in shown.hint and "ABSENT" not in shown.hint


def test_a_call_that_all_ranks_report_has_no_missing_rank() -> None:
    call = f"SeqNum=196, OpType=ALLREDUCE, {LIMIT}"
    found = explain("", ranks=2, groups=waited(call, 0, 1), family="cpu")
    assert (found.given["WAIT"], found.given["ABSENT"]) == ("all", "")


def test_an_exception_of_c10d_that_has_a_time_limit_is_no_lost_connection() -> None:
    call = f"SeqNum=19, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, {LIMIT}"
    thrown = "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  "
    found = explain("", ranks=4, groups=[*waited(call, 2, 3, before=thrown), STOPPED], family="cpu")
    assert [link.code for link in found.chain if link.role is Role.CONSEQUENCE] == ["waited-exec"]
    assert (found.code, found.domain) == ("peer-lost", "silent")


def test_the_reports_of_several_ranks_in_one_output_leave_the_one_that_did_not_come() -> None:
    call = f"SeqNum=2, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, {LIMIT}"
    lines = "\n".join(TIMEOUT.format("", rank, call) for rank in (2, 1, 3))
    console = {"ranks": 2, "at": 1860, "exit": -6, "err": lines}
    found = explain("", ranks=4, groups=[console, STOPPED], family="cpu")
    assert (found.code, found.ranks, found.given["ABSENT"]) == ("rank-unresponsive", (0,), "0")


@pytest.mark.parametrize(("ended", "first"), [(7, (0,)), (1, (1,))], ids=["most ended", "one ended"])
def test_the_few_that_wait_when_all_others_have_ended_called_something_else(ended: int, first: tuple[int]) -> None:
    call = "SeqNum=1, OpType=ALLREDUCE, Timeout(ms)=10000"
    done = {"ranks": "rest", "at": 12, "exit": 0, "out": "completed"}
    found = explain("", ranks=ended + 1, groups=[*waited(call, 0, at=22), done], family="cpu", launcher="spawn")
    assert (found.domain, found.ranks) == ("collectives", first)


@pytest.mark.parametrize(("at", "first"), [(1860, ()), (700, (2,))], ids=["with the limit", "long before it"])
def test_an_end_without_a_reason_at_the_limit_of_others_did_not_begin_their_wait(at: int, first: tuple[int]) -> None:
    call = f"SeqNum=1, OpType=ALLGATHER, {LIMIT}"
    torn = {"ranks": 2, "at": at, "exit": 1, "err": '  File "/job/a.py", line 4, in run\n    wrap(model)'}
    found = explain("", ranks=8, groups=[*waited(call, 1, 4), torn, STOPPED], family="cpu", launcher="spawn")
    assert found.ranks == first


CALLED = (
    "node1:71:71 [{}] NCCL INFO Broadcast: opCount 0 sendbuff 0x7f recvbuff 0x7f count {} datatype 4 op 0 root 0 "
    "comm {} [nranks={}] stream 0x5"
)


@pytest.mark.parametrize(
    ("size", "comms", "first"),
    [(8, ["0xa"], (0,)), (4, ["0xa"], ()), (8, ["0xa", "0xb"], ())],
    ids=["all ranks", "a smaller group", "two communicators"],
)
def test_calls_that_nccl_logs_are_compared_of_the_one_communicator_of_all_ranks(
    size: int, comms: list[str], first: tuple[int, ...]
) -> None:
    groups = [
        {
            "ranks": rank,
            "at": 100,
            "exit": -15,
            "stopped": True,
            "out": "\n".join(CALLED.format(rank, 53 if rank else 25503912, f"{comm}{rank}", size) for comm in comms),
        }
        for rank in range(5)
    ]
    found = explain("", ranks=8, groups=[*groups, {**STOPPED, "at": 100}], family="cpu", launcher="slurm")
    assert found.ranks == first
    assert ("rank `0` passes `25503912` elements" in render(found, "en").hint) == bool(first)
