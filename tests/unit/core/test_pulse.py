"""What a screen states as present is at most 15 s old, else unknown since when; all screens agree."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ascendrun.cli.outcome import describe_bottom, describe_state
from ascendrun.cluster import Cluster
from ascendrun.core.jobs.job import Exit, Job, NodeProgress, Phase, State
from ascendrun.core.jobs.reasons import Reason, because
from ascendrun.core.pulse import FRESH_S, Clock, HostPulse, JobPulse, Pulse, Sight
from ascendrun.core.settings import Settings
from ascendrun.head.loop.monitors import PulseWriter
from ascendrun.head.loop.watch import LoopWatch
from ascendrun.head.state.state_dir import PULSE_NAME, clock_now, read_pulse
from ascendrun.query.views import state_now
from tests.lib.demo_jobs import demo_job
from tests.lib.top_world import controller_lock, make_world, write_pulse

NOW = Clock(10_000.0, 500.0, "boot")
HOSTS = ("npu06", "npu07")
JOB = demo_job(
    hosts=HOSTS,
    nodes=tuple(NodeProgress(host, i, Phase.STARTED, (2 * i, 2 * i + 1)) for i, host in enumerate(HOSTS)),
    state=State.RUNNING,
    world_size=4,
)


def pulse_of(*hosts: HostPulse, age_s: float = 0.0, now: Clock = NOW) -> Pulse:
    jobs = {JOB.id: JobPulse("RUNNING", dict(zip(HOSTS, hosts)))}
    return Pulse(now.at_s - age_s, now.boot_s - age_s, now.boot_id, os.getpid(), "", jobs)


def present(pulse: Pulse | None, now: Clock = NOW, job: Job = JOB) -> tuple[str, Reason]:
    return state_now(job, Sight(pulse, now).job(job.id))


ALIVE = HostPulse("ALIVE", NOW.at_s - 2, 2)


def test_a_recent_pulse_tells_how_many_ranks_run() -> None:
    assert present(pulse_of(ALIVE, ALIVE)) == ("RUNNING", because("running", count=4))
    ended = replace(JOB, nodes=(replace(JOB.nodes[0], exits={1: Exit(0, None, 12)}), JOB.nodes[1]))
    state, reason = present(pulse_of(ALIVE, ALIVE), job=ended)
    assert (state, reason.code) == ("RUNNING", "running-some")
    exits = [replace(node, exits={rank: Exit(0, None, 12) for rank in node.ranks}) for node in JOB.nodes]
    over = replace(JOB, nodes=(exits[0], replace(exits[1], phase=Phase.ENDED)))
    assert present(pulse_of(ALIVE, ALIVE), job=over) == ("RUNNING", because("ending", HOSTS[:1], total=4))


@pytest.mark.parametrize("liveness", ["UNREACHABLE", "ALIVE"], ids=["told", "too-old"])
def test_a_silent_host_is_named_with_its_time_and_the_others_with_theirs(liveness: str) -> None:
    silent = HostPulse(liveness, NOW.at_s - 40, 2)
    state, reason = present(pulse_of(ALIVE, silent))
    assert state == "RUNNING" and reason.code == "running-silent"
    assert (reason.values["running"], reason.values["total"], reason.values["age_s"]) == (2, 4, 2)
    host = reason.values["away"][0]
    assert (host.hosts, host.values["since_s"]) == (("npu07",), NOW.at_s - 40)
    assert host.values["state"] == ("UNREACHABLE" if liveness == "UNREACHABLE" else "UNKNOWN")
    assert present(pulse_of(silent, silent))[1].code == "running-unseen"


@pytest.mark.parametrize(
    ("pulse", "now"),
    [
        (None, NOW),
        (pulse_of(ALIVE, ALIVE, age_s=FRESH_S + 1), NOW),
        (pulse_of(ALIVE, ALIVE), replace(NOW, boot_id="next", boot_s=600.0)),
        (pulse_of(ALIVE, ALIVE), replace(NOW, boot_id="next", boot_s=9.0)),
        (pulse_of(ALIVE, ALIVE), Clock(NOW.at_s - 3600, NOW.boot_s + 20, "boot")),
    ],
    ids=["never", "old", "rebooted", "rebooted-lately", "clock-set-back"],
)
def test_nothing_old_is_stated_as_present(pulse: Pulse | None, now: Clock) -> None:
    state, reason = present(pulse, now)
    assert state == "UNKNOWN" and reason.values["state"] == "RUNNING"
    assert set(Sight(pulse, now).job(JOB.id).liveness.values()) <= {"UNKNOWN"}


def test_a_clock_that_is_set_back_makes_no_pulse_older_or_newer() -> None:
    pulse = pulse_of(ALIVE, HostPulse("UNREACHABLE", NOW.at_s - 40, 2))
    back = Clock(NOW.at_s - 3600 + 5, NOW.boot_s + 5, "boot")
    sight = Sight(pulse, back).job(JOB.id)
    assert sight.is_known and sight.liveness == {"npu06": "ALIVE", "npu07": "UNREACHABLE"}
    assert sight.heard_at_s == {"npu06": back.at_s - 7, "npu07": back.at_s - 45}
    assert Sight(pulse, Clock(NOW.at_s + 3600, NOW.boot_s + 5, "boot")).is_known


@pytest.mark.parametrize("text", ["", "{", "[]", '{"at_s": 1}', '{"jobs": 3}', '{"at_s": "x"}'])
def test_an_unreadable_pulse_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / PULSE_NAME).write_text(text)
    assert read_pulse(tmp_path) is None


class FakeLink:
    heard_boot_s: float | None = None
    failures = 0

    def liveness(self) -> str:
        return "ALIVE"


class FakeRunner:
    job = JOB

    def __init__(self) -> None:
        self.links = {host: FakeLink() for host in HOSTS}

    def link(self, host: str) -> FakeLink:
        return self.links[host]


def test_a_new_controller_claims_nothing_before_a_host_has_answered(tmp_path: Path) -> None:
    runner: Any = FakeRunner()
    now = clock_now()
    PulseWriter(tmp_path, "", LoopWatch()).tick([runner], now)
    assert Sight(read_pulse(tmp_path), now).job(JOB.id).liveness == dict.fromkeys(HOSTS, "UNKNOWN")
    for link in runner.links.values():
        link.heard_boot_s = now.boot_s - 1
    PulseWriter(tmp_path, "", LoopWatch()).tick([runner], now)
    assert Sight(read_pulse(tmp_path), now).job(JOB.id).liveness == dict.fromkeys(HOSTS, "ALIVE")
    runner.links["npu07"].heard_boot_s = None
    PulseWriter(tmp_path, "", LoopWatch()).tick([runner], now)
    sight = Sight(read_pulse(tmp_path), now).job(JOB.id)
    assert sight.liveness["npu07"] == "UNKNOWN"
    assert sight.heard_at_s["npu07"] == pytest.approx(now.at_s - 1, abs=0.1), "an earlier controller's time is kept"


def test_changes_are_written_within_a_second_and_nothing_else_before_five(tmp_path: Path) -> None:
    runner: Any = FakeRunner()
    writer, now = PulseWriter(tmp_path, "", LoopWatch()), clock_now()
    written = []
    for quarter in range(24):
        writer.tick([runner], replace(now, boot_s=now.boot_s + quarter / 4))
        written.append((tmp_path / PULSE_NAME).stat().st_ino)
        if quarter == 8:
            runner.links["npu07"].failures = 1
    assert len(set(written[:9])) == 1 and written[8] != written[13] == written[-1]
    assert (tmp_path / PULSE_NAME).stat().st_mode & 0o777 == 0o600


def test_a_full_disk_ends_no_controller(tmp_path: Path) -> None:
    writer = PulseWriter(tmp_path / "missing", "", LoopWatch())
    writer.tick([])
    (tmp_path / "missing").mkdir()
    writer.tick([], replace(clock_now(), boot_s=clock_now().boot_s + 1))
    assert read_pulse(tmp_path / "missing") is not None


# Every screen over one state directory

SCREENS = ["ps", "show", "follow", "json", "top", "prometheus"]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    world = make_world(tmp_path / "state")
    world.add_job("train", HOSTS, per_node=2, device_type="cpu")
    with controller_lock(world.state_dir):
        yield Cluster(Settings(world.state_dir))


def ageless(text: str) -> str:
    """Without ages: the screens are not made in the same second."""
    return re.sub(r"\d+ s ago", "", text)


def shown(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> dict[str, tuple[str, str]]:
    """(state, reason) of the job on every screen."""
    from ascendrun.cli import main

    def run(*argv: str) -> str:
        assert main(["--state-dir", str(cluster.settings.state_dir), *argv]) == 0
        return capsys.readouterr().out

    job = cluster.jobs.detail("train").job
    record = json.loads(run("ps", "-o", "json"))["jobs"][0]
    top = cluster.samples.top().refresh(now_s=time.time()).jobs[0].job
    states = {
        sample.labels["state"]
        for family in cluster.samples.prometheus().collect()
        for sample in family.samples
        if sample.name in ("ascendrun_job_state", "ascendrun_jobs") and sample.value == 1.0
    }
    row = run("ps", "-o", "wide").splitlines()[1]
    line = str(describe_state(job)) + describe_bottom(job, time.time())
    whole = run("show", "train")
    reason = str(job.reason)
    is_told = ageless(reason) in ageless(line) or not job.unreachable_hosts
    return {
        "ps": (row.split()[2], reason if "npu[06-07]" in row and ageless(reason) in ageless(row) else row),
        "show": (job.state if ageless(f"{job.state}: {reason}") in ageless(whole) else whole, reason),
        "follow": (job.state if job.state in line else line, reason if is_told else line),
        "json": (record["state"], record["reason"]),
        "top": (top.state, str(top.reason)),
        "prometheus": (states.pop() if len(states) == 1 else str(states), reason),
    }


@pytest.mark.parametrize(
    ("age_s", "heard_s", "state"),
    [(1.0, (2.0, 2.0), "RUNNING"), (1.0, (2.0, 60.0), "RUNNING"), (30.0, (2.0, 2.0), "UNKNOWN")],
    ids=["all-answer", "one-is-silent", "controller-silent"],
)
def test_all_screens_agree(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], age_s: float, heard_s: tuple[float, float], state: str
) -> None:
    now = clock_now()
    hosts = [HostPulse("ALIVE" if ago < 15 else "UNREACHABLE", now.at_s - ago, 2) for ago in heard_s]
    write_pulse(cluster.settings.state_dir, pulse=pulse_of(*hosts, age_s=age_s, now=now))
    seen = shown(cluster, capsys)
    assert {name: one[0] for name, one in seen.items()} == dict.fromkeys(SCREENS, state)
    assert len({ageless(reason) for _, reason in seen.values()}) == 1, seen


def test_the_controller_itself_is_asked_when_its_pulse_cannot_be_written(tmp_path: Path) -> None:
    from ascendrun.head.protocol.control_messages import ControllerStatus
    from ascendrun.head.protocol.control_socket import Answer, ControlServer

    world = make_world(tmp_path)
    world.add_job("train", HOSTS, per_node=2, device_type="cpu")

    def reply(op: str, header: object, body: bytes, answer: Answer) -> None:
        now = clock_now()
        answer(ControllerStatus(os.getpid(), (), pulse_of(*[HostPulse("ALIVE", now.at_s, 2)] * 2, now=now)), b"", True)

    server = ControlServer(tmp_path, reply)
    server.start()
    try:
        with controller_lock(tmp_path):
            write_pulse(tmp_path, age_s=100.0)
            assert Cluster(Settings(tmp_path)).jobs.detail("train").job.state == "RUNNING"
    finally:
        server.close()
