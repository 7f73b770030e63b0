"""Messages that list the ranks that did not come: these are first, and their hosts the place."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from corpus import Builder

from ascendrun.health.diagnosis import Confidence, Diagnosis, diagnose

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
