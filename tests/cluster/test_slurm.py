"""Jobs in a real Slurm, with processes tracked by control groups, on the virtual cluster."""

from __future__ import annotations

import json
import os
import re
import signal
from typing import Any

import pytest
from conftest import CODE, start_cluster
from leftovers import controllers, kill
from scenes import Scene, await_that

from ascendrun.sim.ascend.scenario import Scenario
from tests.lib.vcluster import slurm
from tests.lib.vcluster.machines import HEAD
from tests.lib.vcluster.npus import install_on
from tests.lib.vcluster.processes import await_true

ENDLESS = ("print", "ready", "hang")
SET_ENV = "/usr/local/Ascend/ascend-toolkit/set_env.sh"


@pytest.fixture(scope="module")
def module_cluster():
    with start_cluster(4, has_slurm=True) as cluster:
        yield cluster


class SlurmScene(Scene):
    """Jobs of the engine `hpc`."""

    def __init__(self, ascendrun: Any, cluster: Any) -> None:
        super().__init__(ascendrun, cluster)
        (self.folder / "ascendrun").mkdir()
        (self.folder / "ascendrun/config.yaml").write_text(
            "engines:\n  hpc: {type: slurm, partition: train}\n  whole: {type: slurm, options: [--exclusive]}\n"
        )
        self.env = {"XDG_CONFIG_HOME": str(self.folder)}

    def launch(
        self, name: str, *words: object, nodes: int = 2, more: str = "", engine: str = "hpc", **options: Any
    ) -> str:
        file = self.job(name, *words, more=f"nodes: {nodes}\n{more}", **options)
        return self.start(file, "--engine", engine, env=self.env)

    def slurm(self, *argv: str) -> str:
        done = self.cluster.head_run(argv, cwd="/", capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    def queue(self) -> list[dict[str, Any]]:
        return list(json.loads(self.slurm("squeue", "--states=all", "--json"))["jobs"])

    def slurm_state(self, job: str) -> str:
        """What Slurm tells of the newest allocation that the job was granted."""
        granted = [event for event in self.show(job)["events"] if event["code"] == "allocation-granted"]
        (row,) = [one for one in self.queue() if str(one["job_id"]) == granted[-1]["values"]["allocation"]]
        return str(row["job_state"])

    def await_free(self) -> None:
        assert await_true(lambda: not slurm.allocations(self.cluster), deadline_s=60.0), self.slurm("squeue")

    def codes(self, job: str) -> list[str]:
        """Codes of a job's events, and those of their reasons."""
        events = self.show(job)["events"]
        reasons = [event["values"].get("reason") for event in events]
        return [event["code"] for event in events] + [one["code"] for one in reasons if isinstance(one, dict)]

    def links(self) -> list[Any]:
        return [one for one in self.cluster.processes(HEAD) if "--overlap" in one.argv and "--jobid" in str(one.argv)]


@pytest.fixture
def scene(ascendrun, cluster):
    """At the end every allocation must be released, by the controller, which would be ended before it."""
    scene = SlurmScene(ascendrun, cluster)
    yield scene
    scene.await_free()


def test_a_slurm_of_the_cluster_grants_typed_npus_and_is_gone_with_it(cluster_of):
    cluster = cluster_of(2, has_slurm=True)
    argv = ["srun", "-N2", "--gres=npu:910b:2", "hostname"]
    assert sorted(cluster.head_run(argv, cwd="/", capture_output=True, text=True).stdout.split()) == ["node1", "node2"]
    group = slurm.ROOT / "freezer" / f"vcluster-{cluster.cluster_id}"
    assert group.is_dir()
    cluster.down()
    assert not group.exists()


def test_a_killed_rank_is_started_again_in_the_same_allocation(scene):
    job = scene.launch("again", *ENDLESS, more="restart: {max_restarts: 2, backoff_s: [0.1, 1]}\n")
    scene.await_line(job, "ready", count=4)
    before = slurm.allocations(scene.cluster)
    kill([one for one in scene.cluster.processes("node1") if one.pid == scene.ranks_of(job, "node1")[-1]])
    scene.await_line(job, "ready", count=8)
    scene.await_state(job, "RUNNING")
    assert (slurm.allocations(scene.cluster), scene.show(job)["job"]["attempt"]) == (before, 2)
    scene.ascendrun("stop", job, "--now")


def test_a_job_of_which_every_record_is_lost_is_found_in_its_allocation_and_goes_on_there(scene):
    job = scene.launch("lost", *ENDLESS, more="restart: {max_restarts: 2, backoff_s: [0.1, 1]}\n")
    scene.await_line(job, "ready", count=4)
    before = slurm.allocations(scene.cluster)
    scene.lose_the_records(job)
    assert scene.ascendrun("ps", env=scene.env).returncode == 0
    await_that(lambda: scene.ascendrun("show", job, env=scene.env).returncode == 0, "the job is known again")
    scene.await_state(job, "RUNNING")
    scene.await_line(job, "ready", count=4)
    kill([one for one in scene.cluster.processes("node1") if one.pid == scene.ranks_of(job, "node1")[-1]])
    scene.await_line(job, "ready", count=8)
    scene.await_state(job, "RUNNING")
    assert slurm.allocations(scene.cluster) == before and {"adopted", "restarting"} <= set(scene.codes(job))
    scene.ascendrun("stop", job, "--now")


def test_the_allocation_of_a_lost_job_that_is_over_ends_although_its_nodes_were_asked(scene):
    scene.env["ASCENDRUN_HOLDER_IDLE_S"] = "20"
    job = scene.launch("left", "print", "ready", "beat-on", "/tmp/enough")
    scene.await_line(job, "ready", count=4)
    assert scene.everywhere(job)
    scene.lose_the_records(job)
    scene.enough()
    await_that(lambda: not scene.everywhere(job), "its ranks have ended")
    assert slurm.allocations(scene.cluster) and scene.ascendrun("ps", env=scene.env).returncode == 0


def test_ranks_outlive_the_steps_of_the_links_which_come_back(scene):
    job = scene.launch("long", "print", "ready", "beat-on", "/tmp/enough")
    scene.await_line(job, "ready", count=4)
    ranks, links = set(scene.everywhere(job)), {one.pid for one in scene.links()}
    assert links
    (allocation,) = slurm.allocations(scene.cluster)
    steps = scene.slurm("squeue", "--steps", "--noheader", "--format=%i %j", f"--job={allocation}").splitlines()
    found = [step.split()[0] for step in steps if step.split()[1] == "link"]
    assert len(found) == 2, steps
    scene.slurm("scancel", *found)
    assert await_true(lambda: not links & {one.pid for one in scene.links()}, deadline_s=60.0)
    assert ranks <= set(scene.everywhere(job))
    assert await_true(lambda: len(scene.links()) == len(links), deadline_s=60.0)  # each with its fork
    scene.enough()
    scene.await_state(job, "SUCCEEDED")
    scene.await_free()
    codes = scene.codes(job)
    assert "allocation-granted" in codes and "allocation-gone" not in codes


def test_the_allocation_of_a_job_that_is_over_ends_without_its_controller(scene):
    scene.env["ASCENDRUN_HOLDER_IDLE_S"] = "2"
    job = scene.launch("alone", "print", "ready", "beat-on", "/tmp/enough")
    scene.await_line(job, "ready", count=4)
    assert scene.everywhere(job)
    kill(controllers(scene.cluster, scene.ascendrun.state_dir), signal.SIGKILL)  # no command follows
    assert await_true(lambda: not scene.links(), deadline_s=60.0)
    assert len(slurm.allocations(scene.cluster)) == 1 and scene.everywhere(job)
    scene.enough()


def test_scancel_from_outside_leaves_nothing_and_the_job_tells(scene):
    job = scene.launch("cancelled", *ENDLESS, more="restart: {max_restarts: 5}\n")
    scene.await_line(job, "ready", count=4)
    scene.slurm("scancel", *slurm.allocations(scene.cluster))
    scene.await_state(job, "STOPPED")
    assert scene.reason(job)["code"] == "allocation-gone" and "slurm-ended" in scene.codes(job)
    scene.await_nobody(job)


def test_a_job_waits_with_the_reason_of_slurm_and_starts_when_there_is_room(scene):
    first = scene.launch("first", *ENDLESS, nodes=4, more="", per_node=1)
    scene.await_line(first, "ready", count=4)
    holder = scene.slurm("sbatch", "--parsable", "-N4", "--exclusive", "--output=/dev/null", "--wrap=sleep 600").strip()
    never = scene.launch("never", *ENDLESS, nodes=9)
    waits = scene.launch("waits", "print", "x", nodes=1, engine="whole")
    assert await_true(lambda: {"allocation-never", "slurm-never"} <= set(scene.codes(never)), deadline_s=60.0)
    assert await_true(lambda: {"slurm-pending", "slurm-expected"} & set(scene.codes(waits)), deadline_s=60.0)
    scene.ascendrun("stop", never)
    scene.slurm("scancel", holder)
    scene.ascendrun("stop", first, "--now")
    scene.await_state(waits, "SUCCEEDED")


def test_an_allocation_that_the_queue_gives_up_at_its_deadline_ends_the_job(scene):
    """Each request anew would move a deadline that is relative to it."""
    holder = scene.slurm("sbatch", "--parsable", "-N4", "--exclusive", "--output=/dev/null", "--wrap=sleep 600").strip()
    options = "[--exclusive, '--deadline=now+70seconds']"  # a minute to run, and ten seconds to wait
    engine = f"engines: {{hpc: {{type: slurm, time: '1', options: {options}}}}}\n"
    (scene.folder / "ascendrun/config.yaml").write_text(engine)
    more = "checkpoint: {grace_period_s: 5}\nrestart: {max_restarts: 9}\n"
    job = scene.launch("late", "print", "x", nodes=1, more=more)
    scene.await_state(job, "FAILED")
    (gone,) = [one["values"] for one in scene.show(job)["events"] if one["code"] == "allocation-gone"]
    assert (gone["cause"], gone["reason"]["values"]["state"]) == ("time-limit", "DEADLINE")
    assert scene.reason(job)["code"] == "allocation-gone"
    scene.slurm("scancel", holder)


def test_a_preempted_job_waits_and_goes_on_when_there_is_room_again(scene):
    job = scene.launch("preempted", *ENDLESS, more="restart: {max_restarts: 1, backoff_s: [0.1, 1]}\n")
    scene.await_line(job, "ready", count=4)
    urgent = ["sbatch", "--parsable", "-N4", "--exclusive", "--partition=urgent", "--output=/dev/null"]
    above = scene.slurm(*urgent, "--wrap=sleep 600").strip()
    assert await_true(lambda: "allocation-gone" in scene.codes(job), deadline_s=60.0)
    (gone,) = [one for one in scene.show(job)["events"] if one["code"] == "allocation-gone"]
    assert gone["values"]["cause"] == "preempted"
    elsewhere = scene.slurm(*urgent[:2], *urgent[3:], "--nodelist=node1", "--wrap=sleep 600").strip()
    scene.slurm("scancel", above)
    scene.await_line(job, "ready", count=8, deadline_s=120.0)
    assert "node1" not in {node["host"] for node in scene.show(job)["nodes"]}
    assert [one["counted"] for one in scene.show(job)["past_attempts"]] == [False]
    scene.ascendrun("stop", job, "--now")
    scene.slurm("scancel", elsewhere)
    scene.await_free()  # although the bytes of the first attempt on node1 are not here


def test_spare_nodes_are_nodes_of_the_allocation_and_a_drained_one_is_replaced_by_them(scene):
    more = "spare_nodes: 1\nrestart: {max_restarts: 1, backoff_s: [0.1, 1]}\n"
    job = scene.launch("spared", *ENDLESS, nodes=1, more=more)
    scene.await_line(job, "ready", count=2)
    before, (node,) = slurm.allocations(scene.cluster), scene.show(job)["nodes"]
    linked = "--nodelist=node1", "--nodelist=node2"
    assert await_true(lambda: all(word in str(scene.links()) for word in linked), deadline_s=60.0), scene.links()
    assert scene.ascendrun("drain", node["host"], "--now", env=scene.env).returncode == 0
    scene.await_line(job, "ready", count=4)
    (other,) = scene.show(job)["nodes"]
    assert other["host"] != node["host"] and slurm.allocations(scene.cluster) == before
    scene.ascendrun("undrain", node["host"], env=scene.env)
    scene.ascendrun("stop", job, "--now")


def test_an_allocation_that_completes_for_long_ends_no_job_twice(scene):
    completing = slurm.run_folder(scene.cluster.folder) / "completing"
    completing.touch()
    try:
        job = scene.launch("slow", "print", "done")
        scene.await_state(job, "SUCCEEDED")
        await_that(lambda: scene.slurm_state(job) == "COMPLETING", "its epilog runs")
        after = scene.launch("after", "print", "done")
        scene.await_state(after, "SUCCEEDED")
        assert (scene.slurm_state(job), scene.state(job)) == ("COMPLETING", "SUCCEEDED")
    finally:
        completing.unlink()
    scene.await_free()
    assert "allocation-gone" not in scene.codes(job) and scene.state(job) == "SUCCEEDED"


def test_two_jobs_on_one_node_have_the_npus_that_each_was_granted(scene):
    install_on(scene.cluster, "node1", Scenario(cards=8, number=1))
    (scene.folder / "ascendrun/config.yaml").write_text("engines: {hpc: {type: slurm, options: [--nodelist=node1]}}\n")
    command = ["sh", "-c", "echo devices=$ASCEND_RT_VISIBLE_DEVICES ready; sleep 600"]
    jobs = []
    for name in ("left", "right"):
        file = scene.job(name, command=command, more=f"nodes: 1\nsetup: source {SET_ENV}\n")
        file.write_text(file.read_text().replace("{type: cpu, per_node: 2}", "{type: npu, per_node: 2}"))
        jobs.append(scene.start(file, "--engine", "hpc", env=scene.env))
        scene.await_state(jobs[-1], "RUNNING")
        scene.await_line(jobs[-1], "ready", count=2)
    text = [b"".join(scene.on_head(job, "rank-*.out.0").values()).decode() for job in jobs]
    seen = [set(",".join(re.findall("devices=([0-9,]+) ready", one)).split(",")) for one in text]
    assert seen == [{"0", "1"}, {"2", "3"}]
    for job in jobs:
        scene.ascendrun("stop", job, "--now")


def test_a_node_without_power_ends_the_allocation_and_the_job_trains_on_others(ascendrun, cluster_of):
    cluster = cluster_of(4, has_slurm=True)
    scene = SlurmScene(ascendrun.on(cluster), cluster)
    more = "restart: {max_restarts: 2, backoff_s: [0.1, 1]}\n"
    job = scene.launch("moved", *ENDLESS, more=more)
    scene.await_line(job, "ready", count=4)
    lost = scene.show(job)["nodes"][1]["host"]
    scene.cluster.crash(lost)
    scene.await_line(job, "ready", count=8, deadline_s=120.0)
    assert lost not in [node["host"] for node in scene.show(job)["nodes"]] and "allocation-gone" in scene.codes(job)
    scene.ascendrun("stop", job, "--now")
    scene.await_nobody(job)
    cluster.down()  # slurmctld ends the last allocation only when it has given up on the lost node


@pytest.mark.parametrize("times", [5, pytest.param(20, marks=pytest.mark.thorough)])
def test_a_controller_that_is_killed_while_it_requests_leaves_one_allocation(scene, times):
    jobs = []
    for number in range(times):
        jobs.append(scene.launch(f"killed-{number}", *ENDLESS, nodes=1, per_node=1))
        kill([one for one in scene.cluster.processes(HEAD) if "controller" in " ".join(one.argv)], signal.SIGKILL)
    scene.ascendrun("ps")
    for job in jobs:
        scene.await_line(job, "ready", deadline_s=120.0)
    assert len(slurm.allocations(scene.cluster)) == len(jobs)
    for job in jobs:
        scene.ascendrun("stop", job, "--now")


def test_a_slurm_that_does_not_answer_ends_no_job_and_the_job_tells(scene):
    job = scene.launch("silent", "print", "ready", "beat-on", "/tmp/enough")
    scene.await_line(job, "ready", count=4)
    slurm.stop_controller(scene.cluster)
    assert await_true(lambda: "engine-silent" in scene.codes(job), deadline_s=90.0)
    ranks = set(scene.everywhere(job))
    scene.stays(job, "RUNNING", for_s=60.0)
    assert ranks <= set(scene.everywhere(job))
    slurm.start_controller(scene.cluster)
    assert await_true(lambda: "engine-answers" in scene.codes(job), deadline_s=90.0)
    scene.enough()
    scene.await_state(job, "SUCCEEDED")


def test_a_queue_that_is_empty_for_some_seconds_ends_no_job(scene):
    folder = scene.folder / "bin"
    folder.mkdir()
    (folder / "squeue").write_text(
        f'#!/bin/sh\nif [ -e {folder}/empty ]; then echo >>{folder}/empty; echo \'{{"jobs": [], "errors": []}}\'\n'
        'else exec /usr/bin/squeue "$@"; fi\n'
    )
    (folder / "squeue").chmod(0o755)
    scene.env["PATH"] = f"{folder}:{os.environ['PATH']}"
    job = scene.launch("forgotten", "print", "ready", "beat-on", "/tmp/enough")
    scene.await_line(job, "ready", count=4)
    (folder / "empty").touch()
    assert await_true(lambda: len((folder / "empty").read_text()) > 2, deadline_s=60.0)
    (folder / "empty").rename(folder / "full")
    assert scene.state(job) == "RUNNING"
    scene.enough()
    scene.await_state(job, "SUCCEEDED")


def test_an_allocation_that_the_queue_has_forgotten_ended_as_the_accounting_tells(scene):
    folder = scene.folder / "bin"
    folder.mkdir()
    answer = '\'{"jobs": [], "errors": []}\''
    (folder / "squeue").write_text(f'#!/bin/sh\n[ -e {folder}/over ] && echo {answer} || exec /usr/bin/squeue "$@"\n')
    (folder / "sacct").write_text('#!/bin/sh\nfor one; do :; done; echo "${one#--jobs=}|CANCELLED by 1000"\n')
    for name in ("squeue", "sacct"):
        (folder / name).chmod(0o755)
    scene.env["PATH"] = f"{folder}:{os.environ['PATH']}"
    job = scene.launch("over", *ENDLESS)
    scene.await_line(job, "ready", count=4)
    (folder / "over").touch()
    scene.slurm("scancel", *slurm.allocations(scene.cluster))
    scene.await_state(job, "STOPPED")
    assert "1000" in str(scene.show(job)["events"])
    (folder / "over").unlink()


def test_the_stages_of_a_pipeline_use_the_same_nodes(scene):
    file = scene.job("pipe", "print", "x", more="nodes: 2\nstages: [{name: one}, {name: two}]\n")
    pipeline = scene.start(file, "--engine", "hpc", env=scene.env)
    scene.await_state(f"{pipeline}-2", "SUCCEEDED", deadline_s=120.0)
    hosts = [{node["host"] for node in scene.show(f"{pipeline}-{number}")["nodes"]} for number in (1, 2)]
    assert hosts[0] == hosts[1]


def test_a_plan_is_made_on_hosts_that_are_granted_for_it_and_tells_what_came_from_where(scene):
    (scene.folder / "ascendrun/config.yaml").write_text(
        "engines: {hpc: {type: slurm, time: '30', env: {SITE: a}, setup: 'export OF=site'}}\ndefault_engine: hpc\n"
    )
    file = scene.job("planned", "print", "x", more="nodes: 2\nenv: {OWN: b}\nstages: [{name: one}, {name: two}]\n")
    file.write_text(re.sub("hostfile: .*\n", "", file.read_text()))
    for argv in (["submit", file, "--dry-run"], ["plan", file]):
        done = scene.ascendrun(*argv, "-o", "json", env=scene.env)
        assert done.returncode == 0, done.stdout + done.stderr
        for stage in json.loads(done.stdout)["stages"]:
            found = {(one["key"], one["value"], one["origin"]) for one in stage["origins"]}
            assert {("engine", "hpc", "settings"), ("time", "30", "engine"), ("env.OWN", "b", "job")} <= found
            assert {("setup", "export OF=site", "engine"), ("env.SITE", "a", "engine")} <= found
            assert argv[0] == "plan" or len({node["host"] for node in stage["nodes"]}) == 2
        scene.await_free()
    never = scene.job("never", "print", "x", more="nodes: 9\n")
    assert scene.ascendrun("submit", never, "--engine", "hpc", "--dry-run", env=scene.env).returncode == 3


def test_doctor_examines_nodes_that_are_granted_for_it_and_the_engine(scene):
    install_on(scene.cluster, "node1", Scenario(cards=4, number=1))
    file = scene.job("checked", "print", "x", more="nodes: 4\n")

    def findings(*argv: object) -> dict[str, dict[str, Any]]:
        done = scene.ascendrun("doctor", *argv, "-o", "json", env=scene.env)
        report = json.loads(done.stdout)
        assert report["hosts"] == [f"node{number}" for number in range(1, 5)] and not report["unreached"]
        scene.await_free()
        return {one["code"]: one for one in report["findings"]}

    found = findings("--engine", "hpc", "--device-type", "npu")
    assert found["engine-devices-differ"]["hosts"] == ["node1"] and "engine-tracking" not in found
    assert found["engine-devices-differ"]["values"] == {"name": "npu", "engine": 8, "count": 4}
    (scene.folder / "ascendrun/config.yaml").write_text(
        "engines: {hpc: {type: slurm, partition: train}, long: {type: slurm, partition: short, time: '2:00:00'}}\n"
    )
    found = findings(file, "--engine", "long", "--quick")
    assert found["engine-kill-wait"]["values"] == {"seconds": 5.0, "grace_s": 30.0}
    assert found["engine-time-refused"]["values"] == {"limit_s": 7200.0, "longest_s": 3600.0}
    for name in ("sbatch", "squeue", "scancel"):
        (scene.folder / name).symlink_to(f"/usr/bin/{name}")
    done = scene.ascendrun("doctor", "--engine", "hpc", "-o", "json", env={**scene.env, "PATH": str(scene.folder)})
    assert done.returncode == 3 and "srun" in done.stdout + done.stderr


def test_the_quick_start_of_the_page_runs_as_printed(scene):
    page = (CODE / "docs/slurm.md").read_text(encoding="utf-8")
    settings, job = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (command,) = re.findall(r"^\$ ascendrun (.*)$", page, re.MULTILINE)
    (scene.folder / "ascendrun/config.yaml").write_text(settings)
    (scene.folder / "job.yaml").write_text(job)
    done = scene.ascendrun(*command.split(), env=scene.env)
    assert done.returncode == 0, done.stdout + done.stderr
    said = b"".join(scene.on_head("j-0001", "rank-*.out.0").values())
    assert all(f"rank {rank} of 4\n".encode() in said for rank in range(4))


def test_an_allocation_with_a_time_limit_is_followed_by_the_next_one(scene):
    engine = "engines: {hpc: {type: slurm, time: '1'}}\n"
    (scene.folder / "ascendrun/config.yaml").write_text(engine)
    more = "restart: {max_restarts: 1, backoff_s: [0.1, 1]}\ncheckpoint: {grace_period_s: 5}\n"
    job = scene.launch("limited", *ENDLESS, nodes=1, more=more)
    scene.await_line(job, "ready", count=2)
    first = slurm.allocations(scene.cluster)
    scene.await_line(job, "ready", count=4, deadline_s=150.0)
    assert first != slurm.allocations(scene.cluster) and "allocation-ends" in scene.codes(job)
    assert [one["counted"] for one in scene.show(job)["past_attempts"]] == [False]
    scene.ascendrun("stop", job, "--now")
