"""Checks of the engine that granted the hosts, with a planted fault for each finding."""

from dataclasses import replace
from typing import Any

import pytest

from ascendrun.backends.slurm.facts import read_facts
from ascendrun.core.allocations import EngineFacts
from ascendrun.health.checks import run_checks
from tests.lib.npu_worlds import node, world

DAY_S = 86_400.0
CONFIG = """\
Configuration data as of 2026-11-28T07:00:00
GresTypes               = npu
KillWait                = 60 sec
KillOnBadExit           = 0
ProctrackType           = proctrack/cgroup
SLURM_VERSION           = 22.05.8
"""
TIMES = "|1-00:00:00|n/a\n"
NODES = f"train*|3|npu:910b:8(S:0-1),lic:2{TIMES}other|2|gpu:4|infinite|30:00\ntrain*|1|npu:910b:8{TIMES}"
"""As scontrol and sinfo of 22.05 print them."""


def facts(config: str = CONFIG, nodes: str = NODES, **options: Any) -> EngineFacts:
    return read_facts(config, nodes, {"partition": "train", "gres": "npu", **options})


def told(engine: EngineFacts, more: str = "") -> dict[str, dict[str, Any]]:
    context = replace(world(node("n1"), job=f"checkpoint: {{grace_period_s: 60}}\n{more}", per_node=8), engine=engine)
    return {one.code: dict(one.values) for one in run_checks(context) if one.code.startswith("engine-")}


def test_a_sound_engine_has_nothing_to_be_told() -> None:
    assert facts() == EngineFacts("proctrack/cgroup", True, 60.0, (8,), "npu", 4, DAY_S, DAY_S)
    assert facts(gres="npu:910b").devices == (8,) and facts(partition="other").nodes == 2
    assert (facts(partition="other").limit_s, facts(time="2:00:00").limit_s) == (1800.0, 7200.0)
    assert facts(partition=None).nodes == 4, "those of the default partition"
    assert told(facts()) == {} and facts("", "").nodes == 0 and told(facts("", "")) == {}


@pytest.mark.parametrize(
    ("engine", "code", "values"),
    [
        (facts(CONFIG.replace("cgroup", "linuxproc")), "engine-tracking", {"kind": "proctrack/linuxproc"}),
        (facts(CONFIG.replace("60 sec", "30 sec")), "engine-kill-wait", {"seconds": 30.0, "grace_s": 60.0}),
        (facts(time="1-01"), "engine-time-refused", {"limit_s": 90_000.0, "longest_s": DAY_S}),
        (facts(gres="ascend"), "engine-devices-unknown", {"name": "ascend"}),
        (facts(nodes=NODES.replace(":8", ":9")), "engine-devices-differ", {"name": "npu", "engine": 9, "count": 8}),
        (replace(facts(), state_on="nfs4"), "engine-state-remote", {"file_system": "nfs4"}),
    ],
)
def test_each_fault_is_found(engine: EngineFacts, code: str, values: dict[str, Any]) -> None:
    assert told(engine) == {code: values}


def test_a_run_that_is_longer_than_its_allocation_is_found_unless_it_goes_on_in_the_next_one() -> None:
    longer = "timeouts: {run_s: 90000}\n"
    assert told(facts(), longer) == {"engine-time-short": {"run_s": 90_000.0, "limit_s": DAY_S}}
    assert told(facts(), longer + "restart: {max_restarts: 1}\n") == told(facts(), "timeouts: {run_s: 80000}\n") == {}
