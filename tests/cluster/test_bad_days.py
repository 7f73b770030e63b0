"""Bad days: nodes, cables, disks and the head itself fail in mid-job, and every promise about the job still holds."""

import os
import signal
from typing import Callable

import leftovers
import pytest
from invariants import check_ended, states_of
from scenes import BEAT_ON, Scene, await_that, run_text

from ascendrun.node.procs import read_stat
from tests.lib.vcluster.processes import await_true


def agent_fails(scene: Scene, host: str, failpoint: str) -> None:
    """The agents that the next logins start, and their supervisors, reach the failpoint."""
    scene.cluster.sshd_options(host, (f"SetEnv ASCENDRUN_FAILPOINT={failpoint}",))


def stopped(scene: Scene, host: str) -> list[int]:
    """The pids on the host that a signal has stopped."""
    stats = {one.pid: read_stat(one.pid) for one in scene.cluster.processes(host)}
    return [pid for pid, stat in stats.items() if stat is not None and stat.state == "T"]


def test_a_node_whose_disk_is_full_in_mid_job_still_stops_and_says_what_was_lost(scene: Scene) -> None:
    job = scene.begin(scene.job("full", "print", "ready", "beat", 600))
    scene.cluster.fill("node2")
    before = os.path.getsize(scene.spooled(job, "rank-0.out.0")[0])
    await_that(lambda: os.path.getsize(scene.spooled(job, "rank-0.out.0")[0]) > before + 200, "node1 logs on")
    assert scene.state(job) == "RUNNING"
    assert scene.ascendrun("stop", "--now", job).returncode == 0
    check_ended(scene, job, state="STOPPED")


def test_a_disk_that_is_full_before_the_start_means_nobody_starts(scene: Scene) -> None:
    scene.cluster.fill("node2")
    done = scene.ascendrun("submit", scene.job("early", "touch", "/tmp/early"), code=1)
    no_room = ("disk-full", "No space left")  # the agent's word, or that of the login that could not put it there
    assert "node2" in done.stderr and any(word in done.stderr for word in no_room), done.stderr
    assert "node2: node2" not in done.stderr
    assert not scene.cluster.path("node1", "/tmp/early").exists()


def test_a_node_that_refuses_go_ends_the_job_everywhere(scene: Scene) -> None:
    agent_fails(scene, "node2", "launch.before_spawn=raise")
    job = scene.start(scene.job("refusing", "deaf", "print", "ready", "hang"))
    scene.await_state(job, "FAILED")
    assert "node2" in scene.show(job)["job"]["reason"]
    check_ended(scene, job, state="FAILED")


@pytest.mark.parametrize("failpoint", ["stage.mid_file", "stage.after_rename", "prepare.after_record"])
def test_an_agent_that_dies_before_go_means_nobody_starts(scene: Scene, failpoint: str) -> None:
    if failpoint.startswith("stage.") and scene.cluster.has_shared_home:
        pytest.skip("one of the hosts stages, and which is open")
    agent_fails(scene, "node2", f"{failpoint}=kill")
    (scene.folder / "code" / failpoint).touch()  # code that no node has yet
    started = f"/tmp/{failpoint}"
    done = scene.ascendrun("submit", scene.job("dying", "touch", started, "family"), code=1)
    assert "node2" in done.stderr
    assert scene.reason("j-0001")["code"] == "preflight-failed"
    assert not any(scene.cluster.path(host, started).exists() for host in scene.cluster.hosts)


@pytest.mark.shared_home
@pytest.mark.parametrize("failpoint", ["launch.after_claim", "agent.after_exec_before_ack", "agent.after_record:2"])
def test_whoever_dies_in_the_start_each_rank_starts_once_or_all_are_ended(scene: Scene, failpoint: str) -> None:
    starts_once_or_not_at_all(scene, failpoint)


def starts_once_or_not_at_all(scene: Scene, failpoint: str) -> None:
    agent_fails(scene, "node2", f"{failpoint}=kill")
    job = scene.start(scene.job("dying", "family", "print", "ready", "beat", 3, more="timeouts: {start_s: 8}\n"))
    scene.await_state(job, "SUCCEEDED", "FAILED")
    check_ended(scene, job, state=scene.state(job))


@pytest.mark.parametrize("hosts", [["node2"], ["node1", "node2"]], ids=len)
def test_a_node_that_shuts_down_lets_all_ranks_save_and_the_job_is_no_success(scene: Scene, hosts: list[str]) -> None:
    job = scene.begin(scene.job("preempted", "save-on-term", "print", "ready", "hang"))
    found = [one for host in hosts for one in scene.cluster.processes(host)]
    leftovers.kill([one for one in found if "supervise" in one.argv], signal.SIGTERM)
    scene.await_state(job, "FAILED")
    reason = scene.reason(job)
    assert reason["code"] == "preempted" and set(reason["hosts"]) <= set(hosts)
    scene.await_line(job, "saved", count=4)
    check_ended(scene, job, state="FAILED")


def test_the_logs_of_a_rebooted_node_that_kept_its_disk_still_come(scene: Scene) -> None:
    job = scene.begin(scene.job("rebooted", "print", "ready", "beat", 600))
    scene.cluster.cut("node2")
    files = scene.runs_on("node2")
    size = lambda: sum(path.stat().st_size for path in files.glob("*/attempt-1/rank-3.out.0"))  # noqa: E731
    before = size()
    await_that(lambda: size() > before + 500, "it writes on behind the cut cable")
    scene.cluster.reboot("node2", keep_disk=True)
    scene.await_state(job, "FAILED")
    reason = scene.reason(job)
    assert (reason["code"], reason["hosts"]) == ("node-rebooted", ["node2"])
    check_ended(scene, job, state="FAILED")


def test_a_home_on_a_network_that_hangs_delays_neither_ranks_nor_their_output(scene_of: Callable[..., Scene]) -> None:
    scene = scene_of(2)
    home = scene.cluster.node_fs("node2", kind="fuse.remote")
    job = scene.start(scene.job("hanging", "meet", *BEAT_ON, "print", "done"))
    scene.await_line(job, "beat 20 of rank 3")
    home.hang()
    scene.await_line(job, "beat 120 of rank 3")
    home.heal()
    scene.enough()
    scene.await_state(job, "SUCCEEDED")
    await_that(lambda: scene.is_drained(job), "every byte is here")
    assert scene.on_head(job) == scene.on_node(job) and "node2/rank-3.out.0" in scene.on_node(job)
    assert not list(scene.runs_on("node2").glob("*/attempt-1/rank-*"))


def test_a_controller_that_was_away_longer_than_a_start_may_take_does_not_blame_the_start(scene: Scene) -> None:
    agent_fails(scene, "node2", "launch.before_claim=pause")
    job = scene.start(scene.job("patient", "print", "ready", "hang", more="timeouts: {start_s: 10}\n"))
    await_that(lambda: any(stopped(scene, "node2")), "the supervisor of node2 pauses before it starts anything")
    leftovers.kill(leftovers.controllers(scene.cluster, scene.ascendrun.state_dir))  # its guard too
    assert not await_true(lambda: not stopped(scene, "node2"), deadline_s=11)
    os.kill(stopped(scene, "node2")[0], signal.SIGCONT)
    scene.await_state(job, "RUNNING")
    scene.ascendrun("stop", "--now", job)
    check_ended(scene, job, state="STOPPED")


@pytest.mark.usefixtures("only_long")
def test_a_controller_that_sleeps_for_20_s_judges_nobody_when_it_wakes(scene: Scene) -> None:
    job = scene.begin(scene.job("asleep", "print", "ready", "hang"))
    pid = scene.controller().pid
    os.kill(pid, signal.SIGSTOP)
    scene.stays("j-0001", "RUNNING", "UNKNOWN", for_s=20)
    os.kill(pid, signal.SIGCONT)
    seen: set[str] = set()
    look = lambda: bool(seen.update(n["liveness"] for n in scene.show(job)["nodes"]))  # noqa: E731
    await_that(lambda: look() or "ALIVE" in seen, "its hosts respond")
    await_true(look, deadline_s=4)
    assert seen <= {"ALIVE", "UNKNOWN"}, seen  # its last pulse may be older than 15 s
    scene.ascendrun("stop", "--now", job)
    check_ended(scene, job, state="STOPPED")


# --- cables ---


def unhurt(scene: Scene, name: str, hurt: Callable[[], None]) -> None:
    """A job runs while `hurt` does its work, and neither fails nor is started anew nor loses a byte."""
    job = scene.begin(scene.job(name, "meet", "print", "ready", *BEAT_ON))
    hurt()
    scene.enough()
    scene.await_state(job, "SUCCEEDED")
    assert [state.value for state in states_of(scene, job)] == [
        "CHECKING",
        "STAGING",
        "STARTING",
        "RUNNING",
        "SUCCEEDED",
    ]
    check_ended(scene, job, state="SUCCEEDED")


@pytest.mark.usefixtures("only_long")
@pytest.mark.parametrize("source,target", [("node2", "head"), ("head", "node2")])
def test_a_cable_that_carries_one_way_only_is_noticed_and_harms_nothing(scene: Scene, source: str, target: str) -> None:
    def hurt() -> None:
        scene.cluster.block(source, target)
        await_that(
            lambda: {"host": "node2", "liveness": "UNREACHABLE"}.items() <= scene.show("j-0001")["nodes"][1].items(),
            "node2 is known to be out of reach",
            deadline_s=40,
        )
        scene.cluster.unblock(source)

    unhurt(scene, "one-way", hurt)


@pytest.mark.usefixtures("only_long")
def test_a_fifth_of_all_packets_lost_makes_all_slower_and_breaks_nothing(scene: Scene) -> None:
    scene.cluster.loss("node2", 20)
    unhurt(scene, "lossy", lambda: None)


def test_a_slow_and_thin_cable_carries_a_whole_job(scene: Scene) -> None:
    for host in scene.cluster.hosts:
        scene.cluster.delay(host, 50)
        scene.cluster.rate(host, 2000)
    unhurt(scene, "thin", lambda: None)


@pytest.mark.usefixtures("only_long")
def test_sshd_that_stops_and_comes_back_under_a_job_is_not_noticed(scene: Scene) -> None:
    def hurt() -> None:
        scene.cluster.sshd_restart("node1")
        scene.cluster.sshd_stop("node2")
        processes = scene.cluster.processes("node2")  # its sessions too
        leftovers.kill([one for one in processes if "sshd" in one.argv[0] and one.inner_pid != 1])
        scene.stays("j-0001", "RUNNING", for_s=3)
        scene.cluster.sshd_start("node2")

    unhurt(scene, "sshd", hurt)


@pytest.mark.usefixtures("only_long")
def test_a_frozen_node_thaws_and_goes_on_where_it_was(scene: Scene) -> None:
    def hurt() -> None:
        scene.cluster.freeze("node2")
        scene.stays("j-0001", "RUNNING", for_s=20)
        scene.cluster.thaw("node2")

    unhurt(scene, "frozen", hurt)


# --- stops ---


@pytest.mark.usefixtures("only_long")
def test_a_stop_while_one_node_is_frozen_is_honest_and_is_carried_out_when_it_thaws(scene: Scene) -> None:
    job = scene.begin(scene.job("frozen", "family", "print", "ready", "hang"))
    scene.cluster.freeze("node2")
    assert scene.ascendrun("stop", "--no-wait", job).returncode == 0
    assert scene.ascendrun("stop", "--no-wait", job).returncode == 0
    done = scene.ascendrun("stop", "--now", job, timeout=90)
    assert done.returncode == 6 and "node2" in done.stderr, run_text(done)
    scene.cluster.thaw("node2")
    await_that(lambda: scene.show(job)["unconfirmed_hosts"] == [], "node2 is confirmed")
    check_ended(scene, job, state="STOPPED")


@pytest.mark.usefixtures("only_long")
def test_a_node_that_reboots_before_it_could_hear_the_stop_is_confirmed_by_its_boot_id(scene: Scene) -> None:
    job = scene.begin(scene.job("rebooting", "print", "ready", "hang"))
    scene.cluster.cut("node2")
    scene.ascendrun("stop", "--now", job, timeout=90, code=6)
    scene.cluster.reboot("node2", keep_disk=True)
    await_that(lambda: scene.show(job)["unconfirmed_hosts"] == [], "node2 is confirmed")
    check_ended(scene, job, state="STOPPED")


@pytest.mark.usefixtures("only_long")
@pytest.mark.parametrize("phase", ["CHECKING", "STAGING", "STARTING"])
def test_a_node_that_freezes_in_the_start_and_thaws_ends_in_all_or_nothing(scene: Scene, phase: str) -> None:
    """Its agent stops at that step, with all that the node runs, for longer than a silence may last."""
    step = {"CHECKING": None, "STAGING": "stage.before_rename", "STARTING": "launch.before_claim"}[phase]
    if phase == "STAGING" and scene.cluster.has_shared_home:
        pytest.skip("one of the hosts stages, and which is open")
    if step is not None:
        agent_fails(scene, "node2", f"{step}=pause")
    else:
        scene.cluster.freeze("node2")
    (scene.folder / "code" / phase).touch()  # code that no node has yet
    job = scene.start(scene.job("freezing", "family", "meet", "print", "ready", "beat", 3))
    if step is not None:
        await_that(lambda: bool(stopped(scene, "node2")), "it pauses")
    scene.cluster.freeze("node2")
    await_true(lambda: scene.state(job) == "FAILED", deadline_s=20)
    scene.cluster.thaw("node2")
    for pid in stopped(scene, "node2"):
        os.kill(pid, signal.SIGCONT)
    agent_fails(scene, "node2", "never=kill")
    scene.await_state(job, "SUCCEEDED", "FAILED")
    states = [state.value for state in states_of(scene, job)]
    check_ended(scene, job, state=scene.state(job))
    assert (states[-1] == "FAILED") == ("RUNNING" not in states), scene.show(job)["events"]


@pytest.mark.parametrize("power", ["kill", "crash"])
def test_a_node_that_loses_power_in_mid_job_is_out_of_reach_and_not_failed(scene: Scene, power: str) -> None:
    job = scene.begin(scene.job("dark", "print", "ready", "hang"))
    getattr(scene.cluster, power)("node2")
    await_that(lambda: scene.show(job)["nodes"][1]["liveness"] == "UNREACHABLE", "it is known to be out of reach")
    assert scene.state(job) == "RUNNING"
    scene.cluster.reboot("node2")
    scene.await_state(job, "FAILED")
    reason = scene.reason(job)
    assert (reason["code"], reason["hosts"]) == ("node-rebooted", ["node2"])
    check_ended(scene, job, state="FAILED", but=["node2"])
