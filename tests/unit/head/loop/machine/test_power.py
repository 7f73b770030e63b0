"""Hosts that do not respond and that a restart waits for: when their power agent is asked, and what it proves."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ascendrun.core.errors import AuthenticationError
from ascendrun.core.hosts import Host
from ascendrun.core.jobs.job import Job, NodeProgress, Phase, State
from ascendrun.core.jobs.restart import RestartPolicy
from ascendrun.core.power_settings import PowerAgent
from ascendrun.node.layout import make_run
from ascendrun.node.procs import boot_id
from ascendrun.text import Text
from tests.lib.background import join_threads
from tests.lib.small_world import N1, World

N2, N3 = Host("n2", bmc="n2-bmc"), Host("n3", bmc="n3-bmc")
WAIT = RestartPolicy(max_restarts=3, on_unreachable_node="wait")
AGENT = """
import json, sys
answers = json.load(open(sys.argv[1]))
options = dict(one[2:].split("=") for one in sys.argv[2:])
print(options["plug"], options["action"], file=open(sys.argv[1] + ".asked", "a"))
print("Status or " + "Failed: no answer")
sys.exit(answers.get(options["plug"] + " " + options["action"], answers[options["action"]]))
"""


class Powered:
    """A world of three hosts in which a job on the first two waits in BACKOFF for the second, which is silent."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self.file = world, folder / "answers.json"
        (folder / "agent.py").write_text(AGENT)
        self.answers(off=0, status=2)
        self.find()
        for host in (N1, N2, N3):
            world.get(host).node.survey = {"leases": {"leases": []}}

    def find(self) -> None:
        command = (sys.executable, str(self.file.with_name("agent.py")), str(self.file), "--plug={bmc}")
        self.world.jobs.power.find_agent = lambda: PowerAgent(command, 1.0)

    def answers(self, **codes: int) -> None:
        self.file.write_text(json.dumps(codes))

    def asked(self) -> list[str]:
        found = self.file.with_name("answers.json.asked")
        return found.read_text().splitlines() if found.exists() else []

    def waiting(
        self, policy: RestartPolicy = WAIT, *, looked: bool = True, up: bool = False, boot_id: str = "b"
    ) -> Job:
        nodes = tuple(
            NodeProgress(host.name, rank, Phase.STARTED, (rank,), "b", machine_key=f"key-{host.name}", incarnation="i")
            for rank, host in enumerate((N1, N2))
        )
        more: dict[str, Any] = {"go_sent_at_s": time.time(), "world_size": 2, "policy": policy}
        job = self.world.job(N1, N2, N3, hosts=("n1", "n2"), nodes=nodes, state=State.RUNNING, **more)
        for host in (N1, N2):
            self.world.get(host).node.live = {job.run_id}
        self.world.up(*(host for host in (N1, N2, N3) if looked or host != N2))
        self.world.get(N2).is_up = up
        self.world.jobs._listens_boot_s -= 60.0
        runner = self.world.jobs.steps.runners[job.id]
        nodes = (replace(nodes[0], phase=Phase.ENDED), replace(nodes[1], boot_id=boot_id))
        runner.job = replace(runner.job, state=State.BACKOFF, unconfirmed=("n2",), nodes=nodes, not_before_s=1e12)
        return job

    def turn(self) -> None:
        for _ in range(3):
            self.world.turn()
            join_threads("power-")
        self.world.turn()


@pytest.fixture
def powered(world: World, tmp_path: Path) -> Powered:
    return Powered(world, tmp_path)


def test_a_verified_power_off_is_a_fact_that_is_recorded(powered: Powered) -> None:
    job = powered.waiting()
    powered.turn()
    node = powered.world.now(job).node("n2")
    assert (node.phase, node.lost, powered.world.now(job).unconfirmed) == (Phase.LOST, "powered-off", ())
    assert powered.asked() == ["n2-bmc off", "n2-bmc status"]
    events = [one for one in powered.world.store.events.of(job.id) if one.code in ("power-off", "node-lost")]
    assert [(one.code, one.hosts, one.values.get("why")) for one in events] == [
        ("power-off", ("n2",), None),
        ("node-lost", ("n2",), "powered-off"),
    ]


@pytest.mark.parametrize(
    ("codes", "asked"),
    [
        ({"off": 1, "status": 2}, ["off"]),
        ({"off": 2, "status": 2}, ["off"]),
        ({"off": 0, "status": 1}, ["off", "status"]),
        ({"off": 0, "status": 0}, ["off", "status"]),
    ],
)
def test_what_is_not_verified_frees_nothing_and_is_asked_once(
    powered: Powered, codes: dict[str, int], asked: list[str]
) -> None:
    job = powered.waiting()
    powered.answers(**codes)
    powered.turn()
    powered.turn()
    now = powered.world.now(job)
    assert (now.node("n2").phase, now.unconfirmed) == (Phase.STARTED, ("n2",))
    actions = [line.split()[1] for line in powered.asked()]
    assert list(dict.fromkeys(actions)) == asked and actions.count("off") == 1
    reason = now.node("n2").power
    assert reason is not None and reason.code == "power-off-failed" and isinstance(reason.why, Text)
    ended = reason.why.values
    assert (ended["line"], ended["how"].values["code"]) == ("Status or Failed: no answer", codes[asked[-1]])


@pytest.mark.parametrize(
    "change",
    [
        {"up": True},
        {"policy": replace(WAIT, max_restarts=0)},
        {"policy": replace(WAIT, on_unreachable_node="auto", has_epochs=True)},
    ],
    ids=["it responds", "no restart", "fenced by epochs"],
)
def test_hosts_stay_on_that_need_not_be_off(powered: Powered, change: dict[str, Any]) -> None:
    powered.waiting(**change)
    powered.turn()
    assert powered.asked() == []


def test_a_host_that_refuses_the_key_responds(powered: Powered) -> None:
    powered.waiting()
    powered.world.get(N2).last_error = AuthenticationError("no key")
    powered.turn()
    assert powered.asked() == []


def test_a_head_that_reaches_too_few_other_hosts_may_be_cut_off_itself(powered: Powered) -> None:
    powered.waiting()
    powered.world.get(N3).is_up = False
    powered.turn()
    assert powered.asked() == []
    powered.world.get(N3).is_up = True
    powered.turn()
    assert powered.asked()


@pytest.mark.parametrize("why", ["power.used-by-other", "power.used-by-job", "power.own-machine", "power.not-looked"])
def test_a_host_that_others_use_stays_on_and_the_job_shows_why(powered: Powered, why: str) -> None:
    if why == "power.used-by-other":
        rows = [{"user": "li", "tag": make_run("other", "j-0001") + ".1"}]
        powered.world.get(N2).node.survey = {"leases": {"leases": rows}}
    if why == "power.used-by-job":
        powered.world.running(N2)
    job = powered.waiting(looked=why != "power.not-looked", boot_id=boot_id() if why == "power.own-machine" else "b")
    powered.turn()
    reason = powered.world.now(job).node("n2").power
    assert powered.asked() == [] and reason is not None and isinstance(reason.why, Text)
    assert (reason.code, reason.why.key) == ("power-off-failed", why)


def test_another_job_that_may_run_there_since_the_request_was_stored_keeps_the_host_on(powered: Powered) -> None:
    job = powered.waiting()
    powered.world.turn()
    stored = powered.world.now(job).node("n2").power
    assert stored is not None and stored.code == "power-off-asked"
    powered.world.running(N2)
    powered.turn()
    reason = powered.world.now(job).node("n2").power
    assert powered.asked() == [] and reason is not None and isinstance(reason.why, Text)
    assert (reason.code, reason.why.key) == ("power-off-failed", "power.used-by-job")


def test_too_few_hosts_respond_since_the_request_was_stored(powered: Powered) -> None:
    powered.waiting()
    powered.world.turn()
    powered.world.get(N3).is_up = False
    powered.turn()
    assert powered.asked() == []


@pytest.mark.parametrize(
    ("codes", "proof"),
    [
        ({"status": 0}, "power.not-looked"),
        ({"status": 2}, "power.no-witness"),
        ({"status": 1}, "power.end"),
        ({"n3-bmc status": 0, "n2-bmc status": 2}, None),
    ],
    ids=["on", "every host is off", "fails", "off"],
)
def test_the_next_controller_cannot_have_looked_and_asks_for_the_status_only(
    powered: Powered, codes: dict[str, int], proof: str | None
) -> None:
    job = powered.waiting()
    powered.world.turn()  # it is stored that the agent is asked
    powered.world.restart()
    powered.find()
    powered.answers(**{"off": 0, "status": 1, **codes})
    for host in (N1, N3):
        powered.world.up(host)
    powered.world.jobs._listens_boot_s -= 60.0
    powered.turn()
    powered.turn()
    node = powered.world.now(job).node("n2")
    assert powered.asked() and not any("off" in line for line in powered.asked())
    assert (node.phase is Phase.LOST) == (proof is None)
    if proof is not None:
        assert node.power is not None and isinstance(node.power.why, Text)
        assert (node.power.code, node.power.why.key) == ("power-off-failed", proof)


@pytest.mark.parametrize(
    ("codes", "is_lost"),
    [
        ({"n3-bmc status": 0, "n2-bmc status": 2}, True),
        ({"n2-bmc status": 0}, False),
        ({"n2-bmc status": 1}, False),
        ({"n3-bmc status": 2, "n2-bmc status": 2}, False),
    ],
    ids=["off", "on", "fails", "every host is off"],
)
def test_a_running_attempt_ends_when_its_silent_host_has_no_power_and_nothing_is_switched_off(
    powered: Powered, codes: dict[str, int], is_lost: bool
) -> None:
    powered.answers(**{"off": 0, "status": 1, **codes})
    job = powered.waiting()
    runner = powered.world.jobs.steps.runners[job.id]
    nodes = (replace(runner.job.nodes[0], phase=Phase.STARTED), runner.job.nodes[1])
    runner.job = replace(runner.job, state=State.RUNNING, unconfirmed=(), nodes=nodes, not_before_s=None)
    powered.turn()
    now = powered.world.now(job)
    assert now.node("n2").lost == ("no-power" if is_lost else None)
    assert (now.state, now.first_failure is None) == ((State.STOPPING, False) if is_lost else (State.RUNNING, True))
    assert powered.asked()[0] == "n2-bmc status" and not any("off" in line for line in powered.asked())
    asked = len(powered.asked())
    powered.turn()
    assert len(powered.asked()) == asked
