"""Failures of a group of ranks: a rack or a role, a process group of torch, a group of HCCL."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from corpus import Builder
from test_classes import FRAME, found_of

from ascendrun.health.diagnosis import diagnose
from ascendrun.health.diagnosis.render import class_text
from ascendrun.health.flight_recorder import Recorded
from ascendrun.text import Text


def test_a_collective_of_a_part_of_the_ranks_names_its_group() -> None:
    told = (
        "[rank{rank}]:[E1120 10:00:40.1 ProcessGroupNCCL.cpp:616] [Rank 0] [PG ID 3 PG GUID 12(tensor) Rank 0] "
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum={seq}, OpType=ALLREDUCE, NumelIn=9, NumelOut=9, "
        "Timeout(ms)=600000) ran for 600013 milliseconds before timing out."
    )
    groups = [
        {"ranks": 3, "at": 90, "exit": 1, "err": told.replace("{seq}", "7")},
        {"ranks": "0-2", "at": 90, "exit": 1, "err": told.replace("{seq}", "9")},
        {"ranks": "rest", "exit": -15, "stopped": True},
    ]
    found = found_of("", family="cuda", groups=groups)
    shown = [proof.text for proof in found.evidence if isinstance(proof.text, Text)]
    assert found.ranks == (3,)
    assert [(text.values["group"], text.values["ranks"]) for text in shown] == [("12(tensor)", [0, 1, 2, 3])]


RAISED = f"{FRAME}ModuleNotFoundError: No module named 'mindspeed'"
OF_HCCL = (
    "[ERROR] HCCL({pid},python):{plog} [task_exception_handler.cc:771] [{pid}][TaskExecStage][Timeout][Host]Task run "
    "failed, groupRank information is group:[tensor_0], user define information[], rankSize[4], rankId[0]."
)
GROUPS = {
    "a rack": (
        {"per_host": 2, "hosts": {f"npu0{k}": {"groups": ["npus", f"rack{k // 2}"]} for k in (1, 2, 3, 4)}},
        "2-5",
    ),
    "a role": ({"labels": {rank: f"{'prefill' if rank < 3 else 'decode'}/{rank}" for rank in range(8)}}, "0-2"),
    "a process group of torch": ({"members": (2, 3, 4, 5)}, "2-5"),
    "a group of HCCL": ({"plog": OF_HCCL}, "4-7"),
    "a part of a group of HCCL": ({"plog": OF_HCCL}, "5-7"),
}


@pytest.mark.parametrize(
    ("name", "scope", "group", "retry"),
    [
        ("a rack", "group", "rack1", "exclude"),
        ("a role", "group", "prefill", "never"),
        ("a process group of torch", "group", "7(tensor)", "never"),
        ("a group of HCCL", "group", "tensor_0", "never"),
        ("a part of a group of HCCL", "ranks", "", "never"),
    ],
)
def test_a_failure_of_all_ranks_of_a_group_names_it(name: str, scope: str, group: str, retry: str) -> None:
    row, ranks = GROUPS[name]
    first = {"ranks": ranks, "at": 60, "exit": 1, "err": RAISED, "plog": row.get("plog")}
    groups = [first, {"ranks": "rest", "at": 62, "exit": -15, "stopped": True}]
    made = Builder({"ranks": 8, "family": "npu", "groups": groups, **row}, seed="group").evidence()
    call = Recorded("7(tensor)", 1, "all_reduce", "started", ((), ()), members=row.get("members", ()))
    hosts = tuple(replace(host, recorded={0: [call]}) for host in made.hosts)
    found = diagnose(replace(made, hosts=hosts, labels=row.get("labels", {})))
    assert (found.scope, found.group, found.retry) == (scope, group, retry)
    assert all((group in str(class_text(found).render(lang))) for lang in ("en", "zh"))
