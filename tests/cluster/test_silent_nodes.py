"""Nodes of running jobs that fall silent, lose their power or boot again: what the job does, with another host at hand.

The windows of the hang detection are divided by 20: a job with a silent host is stopped after 9 s without a step.
"""

import json
import time
from datetime import datetime
from typing import Any, Callable

import leftovers
import pytest
from conftest import Ascendrun
from invariants import check_ended
from looks import DEADLINE_S
from scenes import SAVED, Scene, await_that

from tests.lib.vcluster.cluster import VirtualCluster

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1200)]
DIVISOR = {"ASCENDRUN_HANG_DIVISOR": "20"}
FENCE_S = 90
HEARD_EACH_S = 15.0
"""How long ago the last message of a node may have been that responds."""


class Lossy(Scene):
    """Three hosts, and a job on two of them that saves into a folder that all of them see."""

    def train(
        self, name: str, *, mode: str = "auto", more: str = "", is_fenced: bool = False, env: dict[str, str] = DIVISOR
    ) -> str:
        """Start the training; it runs, and has saved a checkpoint."""
        fence = f", fence_after_s: {FENCE_S}" if mode == "fence" else ""
        path = self.job(
            name,
            per_node=1,
            slots=1,
            command=["python3", "training.py", SAVED],
            more=(
                f"nodes: 2\nrestart: {{max_restarts: 3, backoff_s: [1, 2], on_unreachable_node: {mode}{fence}}}\n"
                f"checkpoint: {{dir: {SAVED}, grace_period_s: 0, fenced: {str(is_fenced).lower()}}}\n"
                f"sampling: {{interval_s: 0.5}}\n{more}"
            ),
        )
        job = self.start(path, env=env)
        self.await_state(job, "RUNNING")
        self.await_line(job, "saved 20")
        assert self.show(job)["job"]["hosts"] == ["node1", "node2"]
        return job

    def saved(self) -> list[int]:
        found = (self.folder / "saved").glob("checkpoint-*")
        return sorted(int(path.name.rpartition("-")[2]) for path in found)

    def saved_by(self, job: str, attempt: int) -> dict[str, tuple[int, int]]:
        """By path, the size and the time of each file that the attempt has written into the checkpoints' folder."""
        found = {}
        for state in (self.folder / "saved").glob("*/trainer_state.json"):
            if json.loads(state.read_text())["by"] == f"{self.run(job)}.{attempt}":
                found.update({str(path): path.stat() for path in (state.parent, *state.parent.iterdir())})
        return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in found.items()}

    def await_attempt(self, job: str, number: int, *, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
        """Wait until ranks of the attempt train; what `show` has of the job."""
        self.await_that_of(job, lambda row: row["attempt"] == number, f"attempt {number}", deadline_s=deadline_s)
        self.await_state(job, "RUNNING")
        shown: dict[str, Any] = self.show(job)["job"]
        assert shown["attempt"] == number
        return shown

    def await_that_of(
        self, job: str, fact: Callable[[Any], bool], what: str, *, deadline_s: float = DEADLINE_S
    ) -> None:
        try:
            await_that(lambda: fact(self.show(job)["job"]), what, deadline_s=deadline_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{json.dumps(self.show(job)['events'], indent=1)}") from error

    def check_apart(self, job: str, attempts: int) -> None:
        """No rank of an attempt lived when one of the next began."""
        await_that(lambda: len(self.lives(job, attempts)) == 2, f"the ranks of attempt {attempts} live")
        for number in range(1, attempts):
            earlier, later = self.lives(job, number), self.lives(job, number + 1)
            assert earlier and later, (earlier, later)
            assert max(last for _, last in earlier) < min(first for first, _ in later)

    def check_moved_by_lease(self, job: str) -> None:
        """The job trains on the spare host, after the lease of node2 was over."""
        assert self.await_attempt(job, 2, deadline_s=5 * FENCE_S)["hosts"] == ["node1", "node3"]
        assert not self.ranks_of(job, "node2")
        self.check_apart(job, 2)
        [fenced] = self.events(job, "host-fenced")
        assert (fenced["hosts"], fenced["values"]["by"]) == (["node2"], "lease")

    def stop(self, job: str) -> None:
        """End the job and check it. Hosts that are off boot again: their last words before that are nobody's."""
        off = [host for host in self.cluster.hosts if not self.cluster.is_up(host)]
        for host in off:
            self.cluster.reboot(host, keep_disk=True)
        self.ascendrun("stop", job, "--now", code=0)
        if not off:
            await_that(lambda: self.is_drained(job), "every attempt's bytes are here")
        check_ended(self, job, state="STOPPED", but=off)

    def events(self, job: str, code: str) -> list[dict[str, Any]]:
        return [event for event in self.show(job)["events"] if event["code"] == code]


@pytest.fixture
def scene(training_scene_of: Callable[..., Lossy]) -> Lossy:
    return training_scene_of(3, Lossy)


def test_with_fence_a_cut_node_ends_its_ranks_and_then_the_job_runs_elsewhere(scene: Lossy) -> None:
    job = scene.train("fenced", mode="fence")
    scene.cluster.cut("node2")
    scene.check_moved_by_lease(job)
    scene.cluster.heal("node2")
    scene.await_line(job, f"saved {scene.saved()[-1] + 10}")
    assert scene.show(job)["job"]["attempt"] == 2
    scene.stop(job)


@pytest.mark.parametrize("shift_s", [7200.0, -3600.0])
def test_neither_lost_packets_nor_a_shifted_clock_end_a_lease_too_early_or_too_late(
    scene: Lossy, shift_s: float
) -> None:
    scene.cluster.clock("node2", shift_s)
    more = "checks: {skip: [clock]}\n"
    job = scene.train("lossy", mode="fence", more=more, env={"ASCENDRUN_HANG_DIVISOR": "2"})
    scene.cluster.loss("node2", 20)
    scene.stays(job, "RUNNING", for_s=FENCE_S + 30)  # longer than a lease that is not renewed
    assert scene.show(job)["job"]["attempt"] == 1
    step = scene.saved()[-1]
    await_that(lambda: scene.saved()[-1] > step, "it trains")
    scene.cluster.cut("node2")
    scene.check_moved_by_lease(job)
    scene.cluster.loss("node2", 0)
    scene.cluster.heal("node2")
    scene.stop(job)


def test_renewals_that_arrive_50_s_late_do_not_let_two_attempts_live_at_once(scene: Lossy) -> None:
    job = scene.train("late", mode="fence")
    scene.cluster.delay("node2", 50_000.0)
    shown = scene.await_attempt(job, 2, deadline_s=5 * FENCE_S)
    assert shown["hosts"] == ["node1", "node3"]
    scene.check_apart(job, 2)
    scene.cluster.delay("node2", 0.0)
    scene.stop(job)
    scene.ascendrun.end_controller(scene.cluster)
    lasts_s = 300.0  # the pause between two tries of TCP has doubled many times
    await_that(lambda: not leftovers.strangers(scene.cluster), "the old connection ends", deadline_s=lasts_s)


def test_a_killed_controller_costs_no_rank_of_a_job_with_leases(scene: Lossy) -> None:
    job = scene.train("guarded", mode="fence")
    for _ in range(3):
        killed = scene.controller()
        assert killed is not None
        leftovers.kill([killed])
        await_that(
            lambda killed=killed: scene.controller() not in (None, killed), "the guard starts another controller"
        )
        scene.stays(job, "RUNNING", for_s=FENCE_S / 2)  # renewed by nobody, the lease would have run out after three
    assert scene.show(job)["job"]["attempt"] == 1 and len(scene.lives(job, 1)) == 2
    step = scene.saved()[-1]
    await_that(lambda: scene.saved()[-1] > step, "it trains")
    scene.stop(job)


@pytest.mark.parametrize("lost", ["power", "cable"])
def test_the_spare_takes_the_place_of_a_lost_node_with_code_that_it_has(scene: Lossy, lost: str) -> None:
    job = scene.train("spared", is_fenced=True, more="spare_nodes: 1\n")
    await_that(lambda: bool(scene.events(job, "spare-ready")), "the spare is examined and staged")
    [ready] = scene.events(job, "spare-ready")
    assert ready["hosts"] == ["node3"]
    before = trees(scene.cluster, "node3")
    assert before
    (scene.cluster.crash if lost == "power" else scene.cluster.cut)("node1")
    shown = scene.await_attempt(job, 2)
    assert shown["hosts"] == ["node3", "node2"], "it takes rank 0"
    resumed = scene.events(job, "resume-chosen")[-1]["values"]["step"]
    scene.await_line(job, f"from {resumed}", count=2)
    scene.await_line(job, f"saved {resumed + 5}")  # there was no newer one: a checkpoint is never saved twice
    assert trees(scene.cluster, "node3") == before
    [fenced] = scene.events(job, "host-fenced")
    assert (fenced["hosts"], fenced["values"]["by"]) == (["node1"], "epoch")

    old = scene.saved_by(job, 1)
    if lost == "power":
        scene.cluster.reboot("node1", keep_disk=True)
    else:
        assert scene.ranks_of(job, "node1"), "behind the cut cable they live"
        scene.cluster.heal("node1")
    await_that(lambda: not scene.ranks_of(job, "node1", with_sampler=True), "nothing is left on the old node")
    scene.await_line(job, f"saved {scene.saved()[-1] + 10}")
    assert scene.saved_by(job, 1) == old and not scene.ranks_of(job, "node1", with_sampler=True)
    assert scene.show(job)["job"]["attempt"] == 2
    scene.stop(job)


def trees(cluster: VirtualCluster, host: str) -> dict[str, tuple[int, int]]:
    """By path, the inode and the time of each file of staged code."""
    folder = cluster.path(host, "/root/.ascendrun/trees")
    found = {str(path.relative_to(folder)): path.lstat() for path in folder.rglob("*") if path.suffix == ".py"}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in found.items()}


def test_a_node_that_the_head_does_not_reach_trains_on_and_screens_say_since_when(scene: Lossy) -> None:
    """For longer than half an hour by the divided windows."""
    trains_on_out_of_reach(scene, for_s=100, env=DIVISOR)


@pytest.mark.usefixtures("only_long")
@pytest.mark.timeout(3600)
def test_half_an_hour_out_of_reach_restarts_nothing(scene: Lossy) -> None:
    trains_on_out_of_reach(scene, for_s=1800, env={})


def trains_on_out_of_reach(scene: Lossy, *, for_s: float, env: dict[str, str]) -> None:
    """The head loses every packet from and to one node for so long. The two nodes reach each other.

    The kernel of that node gives up a connection after seconds, not after a quarter of an hour: sshd waits for it.
    """
    give_up = ["sh", "-c", "echo 5 > /proc/sys/net/ipv4/tcp_retries2"]
    scene.cluster.host_run("node2", give_up, check=True, capture_output=True)
    job = scene.train("away", env=env)
    cut_at_s = time.time()
    for source, target in (("head", "node2"), ("node2", "head")):
        scene.cluster.block(source, target)
    await_that(lambda: bool(scene.events(job, "unreachable")), "it is unreachable")
    known_at_s = time.time()
    until = time.monotonic() + for_s
    while time.monotonic() < until:
        scene.stays(job, "RUNNING", for_s=10)
        shown = scene.show(job)
        node = shown["nodes"][1]
        assert (shown["job"]["attempt"], node["host"], node["liveness"]) == (1, "node2", "UNREACHABLE")
        heard_at = datetime.fromisoformat(node["heard_at"])
        assert cut_at_s - HEARD_EACH_S <= heard_at.timestamp() <= known_at_s
        since = heard_at.astimezone().strftime("%H:%M:%S")
        screens = [scene.ascendrun(*words) for words in (["ps"], ["show", job])]
        assert all(f"node2 UNREACHABLE since {since}" in " ".join(done.stdout.split()) for done in screens), screens
    scene.cluster.unblock("head")
    scene.cluster.unblock("node2")
    await_that(lambda: bool(scene.events(job, "reachable")), "it responds again")
    step = scene.saved()[-1]
    await_that(lambda: scene.saved()[-1] > step, "it trains")
    shown = scene.show(job)["job"]
    assert (shown["state"], shown["attempt"]) == ("RUNNING", 1)
    assert not scene.events(job, "restarting")
    scene.stop(job)


@pytest.mark.parametrize("mode", ["auto", "wait"])
def test_without_a_fence_a_powered_off_node_holds_the_job_until_a_person_gives_it_up(scene: Lossy, mode: str) -> None:
    job = scene.train("waits", mode=mode)
    scene.cluster.crash("node2")
    scene.await_that_of(job, lambda row: row["reason_code"] == "waiting-for-end", "it waits")
    scene.stays(job, "BACKOFF", for_s=10)
    assert not scene.everywhere(job)
    scene.ascendrun("lost", "node2", code=0)
    assert scene.await_attempt(job, 2)["hosts"] == ["node1", "node3"]
    scene.await_line(job, "from", count=4)
    scene.stop(job)


def test_a_node_that_boots_again_is_a_fact_and_the_job_restarts_without_a_person(scene: Lossy) -> None:
    job = scene.train("rebooted", mode="wait")
    scene.cluster.reboot("node2", keep_disk=True)
    shown = scene.await_attempt(job, 2)
    assert shown["hosts"] == ["node1", "node3"], "who has just failed is chosen last"
    [lost] = scene.events(job, "node-lost")
    assert (lost["hosts"], lost["values"]["why"]) == (["node2"], "rebooted")
    scene.check_apart(job, 2)
    scene.stop(job)


LEAVE = ["python3", "rank.py", "print", "prepared", "touch", "left"]
LOOK = ["python3", "-c", "import os, signal; print('left', os.path.exists('left'), flush=True); signal.pause()"]
STAGES = [{"name": "prepare", "command": LEAVE}, {"name": "train", "command": LOOK}]


def resume_without_its_host(scene: Lossy) -> tuple[str, str, str]:
    """A pipeline whose second stage is resumed after the host of both stages is gone, and reported as lost.

    Its id, the id of the resumed stage, the host.
    """
    pipeline = scene.start(scene.job("stages", per_node=1, more=f"nodes: 1\nstages: {json.dumps(STAGES)}\n"))
    train = f"{pipeline}-2"
    scene.await_line(train, "left True")
    [host] = scene.show(train)["job"]["hosts"]
    assert scene.show(f"{pipeline}-1")["job"]["hosts"] == [host]
    assert scene.ascendrun("stop", "--now", pipeline).returncode == 0
    scene.cluster.crash(host)
    scene.ascendrun("retry", train, code=0)
    resumed = str(scene.show(pipeline)["job"]["id"])
    scene.await_that_of(resumed, lambda row: row["reason_code"] == "too-few-hosts", "it waits")
    scene.ascendrun("lost", host, code=0)
    return pipeline, resumed, host


def test_a_stage_whose_files_were_on_a_host_that_is_lost_fails_and_names_the_fix(scene: Lossy) -> None:
    pipeline, resumed, host = resume_without_its_host(scene)
    scene.await_state(resumed, "FAILED")
    reason = scene.reason(resumed)
    assert reason["code"] == "stage-files-lost"
    assert {"lost": host, "stage": "prepare", "pipeline": pipeline}.items() <= reason["values"].items()
    explained = json.loads(scene.ascendrun("explain", resumed, "-o", "json").stdout)
    assert explained["diagnosis"]["code"] == "stage-files-lost"

    again = ("submit", scene.folder / "stages.yaml", "--detach", "--resume", pipeline, "--from-stage")
    for stage, line in (("train", "left False"), ("prepare", "left True")):
        scene.ascendrun(*again, stage, code=0)
        await_that(lambda: scene.show(pipeline)["job"]["stage"] == "train", "the stage that looks is here")
        look = str(scene.show(pipeline)["job"]["id"])
        scene.await_line(look, line)
        assert host not in scene.show(look)["job"]["hosts"]
        scene.stop(look)


def test_a_stage_moves_where_the_files_of_a_lost_host_are_in_a_home_that_all_share(
    ascendrun: Ascendrun, cluster_of: Callable[..., VirtualCluster]
) -> None:
    cluster = cluster_of(3, shared_home=True)
    scene = Lossy(ascendrun.on(cluster), cluster)
    _, resumed, host = resume_without_its_host(scene)
    scene.await_line(resumed, "left True")
    assert host not in scene.show(resumed)["job"]["hosts"]
    scene.stop(resumed)


def test_without_controller_and_guard_a_host_whose_peers_have_failed_ends_its_ranks(scene: Lossy) -> None:
    job = scene.begin(scene.job("alone", "print", "ready", "beat", "600", hosts=["node1", "node2"]))
    left, right = (scene.ranks_of(job, host) for host in ("node1", "node2"))
    leftovers.kill(leftovers.controllers(scene.cluster, scene.ascendrun.state_dir))
    leftovers.kill([one for one in scene.cluster.processes("node2") if one.pid == right[0]])
    scene.await_nobody(job)  # no command is called
    assert len(left) >= 2 and not leftovers.controllers(scene.cluster, scene.ascendrun.state_dir)
    scene.await_state(job, "FAILED")
    assert scene.reason(job)["hosts"] == ["node2"]
