"""Nodes that are not as a job left them: recreated containers, wiped homes, processes that cannot be killed."""

import json

from scenes import Scene, await_that

STUCK = ["sh", "-c", "echo ready; while :; do ls /data > /dev/null; sleep 0.1; done"]


def why_lost(scene: Scene, job: str) -> tuple[str, str]:
    reason = scene.reason(job)
    return reason["code"], reason["hosts"][0]


def test_a_recreated_container_ends_its_job_and_the_next_job_runs_there(scene: Scene) -> None:
    job = scene.begin(scene.job("recreated", "meet", "print", "met", "hang"), "met")
    scene.cluster.recreate("node2")
    scene.await_state(job, "FAILED")
    assert why_lost(scene, job) == ("node-directory-gone", "node2")
    scene.await_nobody(job)
    later = scene.start(scene.job("later", "print", "done"))
    scene.await_state(later, "SUCCEEDED")


def test_after_a_wiped_home_a_stop_ends_the_ranks_and_the_host_is_free(scene: Scene) -> None:
    job = scene.begin(scene.job("wiped", "meet", "print", "met", "hang"), "met")
    scene.cluster.wipe("node2")
    scene.ascendrun("stop", job, "--now", code=0)
    assert scene.state(job) == "STOPPED"
    scene.await_nobody(job)
    later = scene.start(scene.job("later", "print", "done"))
    scene.await_state(later, "SUCCEEDED")


def test_a_process_in_state_d_holds_its_host_until_it_is_gone(scene: Scene) -> None:
    data = scene.cluster.file_system("node2", "/data")
    job = scene.start(scene.job("stuck", hosts=["node2"], per_node=1, command=STUCK))
    scene.await_line(job, "ready")
    data.stick()
    await_that(lambda: data.status()["stuck"] > 0, "a rank waits in the file system")
    done = scene.ascendrun("stop", job, "--now")
    assert done.returncode == 6 and "node2" in done.stderr, done.stdout + done.stderr
    [left] = [event for event in scene.show(job)["events"] if event["code"] == "processes-remain"]
    assert left["hosts"] == ["node2"] and left["values"]["processes"][0]["state"] == "D"
    [row] = json.loads(scene.ascendrun("nodes", "--hostfile", "stuck.hosts", "-o", "json").stdout)["nodes"]
    [hold] = row["holds"]
    assert (hold["state"], hold["job"], hold["processes"][0]["state"]) == ("leftovers", job, "D")
    later = scene.start(scene.job("later", "print", "done", hosts=["node2"]))
    elsewhere = scene.start(scene.job("elsewhere", "print", "done", more="nodes: 1\n", hosts=["node2", "node1"]))
    scene.await_state(elsewhere, "SUCCEEDED")
    waiting = scene.show(later)["job"]
    assert (waiting["state"], waiting["reason_code"]) == ("QUEUED", "too-few-hosts")
    scene.ascendrun("release", "node2", code=7)
    data.heal()
    scene.await_state(later, "SUCCEEDED")

    def is_gone() -> bool:
        return "leftovers-gone" in [event["code"] for event in scene.show(job)["events"]]

    await_that(is_gone, "the supervisor records that they are gone")


def test_a_job_whose_records_are_lost_is_adopted_and_can_be_stopped(scene: Scene) -> None:
    job = scene.begin(scene.job("lost", "meet", "print", "met", "beat", 600), "met")
    scene.lose_the_records(job)
    assert scene.ascendrun("nodes", "--hostfile", "lost.hosts").returncode == 0
    await_that(lambda: scene.ascendrun("show", job).returncode == 0, "the job is known again")
    scene.await_state(job, "RUNNING")
    scene.await_line(job, "met", count=4)
    assert scene.ascendrun("stop", job).returncode == 0
    scene.await_nobody(job)


def test_an_attempt_without_a_copy_of_its_job_is_found_and_can_be_stopped(scene: Scene) -> None:
    path = scene.job("bare", "print", "ready", "beat", 600, hosts=["node1"])
    job = scene.start(path)
    scene.await_line(job, "ready", count=2)
    tag = f"{scene.run(job)}.1"
    (scene.runs_on("node1") / scene.run(job) / "attempt-1" / "job.json").unlink()
    scene.lose_the_records(job)
    assert scene.ascendrun("nodes", "--hostfile", "bare.hosts").returncode == 0
    rows = lambda: json.loads(scene.ascendrun("ps", "-o", "json").stdout)["jobs"]  # noqa: E731
    await_that(lambda: bool(rows()), "what was found is stored")  # with the next turn after the reply to `nodes`
    assert [(row["id"], row["name"], row["state"], row["hosts"]) for row in rows()] == [(job, tag, "FOUND", ["node1"])]
    later = scene.start(scene.job("later", "print", "done", hosts=["node1"]))
    assert later != job, "no id is given twice"
    await_that(lambda: scene.show(later)["job"]["reason_code"] == "too-few-hosts", "it waits for the host")
    assert scene.ascendrun("stop", tag).returncode == 0
    scene.await_state(later, "SUCCEEDED")
    assert scene.cluster.processes("node1") and not [
        one for one in scene.cluster.processes("node1") if one.environ.get("ASCENDRUN_RUN_ID") == tag
    ]
