"""Jobs that start again by themselves: what restarts, and what does not."""

import json
import signal
import zipfile

import leftovers
import pytest
from invariants import check_ended
from scenes import BEAT_ON, Scene, await_that

AGAIN = "restart: {max_restarts: 1, backoff_s: [1, 2]}\n"


def codes(scene: Scene, job: str) -> list[str]:
    return [event["code"] for event in scene.show(job)["events"]]


def test_a_killed_rank_starts_the_job_again_and_an_exception_does_not(scene: Scene) -> None:
    job = scene.begin(scene.job("killed", "family", "print", "ready", *BEAT_ON, more=AGAIN))
    victims = [one for one in scene.cluster.processes("node2") if one.environ.get("RANK") == "3"]
    leftovers.kill([one for one in victims if "rank.py" in one.argv], signal.SIGKILL)
    await_that(lambda: scene.show(job)["job"]["attempt"] == 2, "attempt 2")
    scene.enough()
    raising = scene.start(
        scene.job("raising", more=AGAIN, command=["python3", "-c", "raise ValueError('no such layer')"])
    )
    scene.await_state(job, "SUCCEEDED", "FAILED")
    check_ended(scene, job, state="SUCCEEDED")
    assert codes(scene, job).count("restarting") == 1
    scene.await_line(job, "ready", count=8)

    scene.await_state(raising, "FAILED")
    assert scene.show(raising)["job"]["attempt"] == 1
    gave_up = [event["values"] for event in scene.show(raising)["events"] if event["code"] == "gave-up"]
    assert [(one["kind"], one["rule"]) for one in gave_up] == [("user", "cause")]

    assert scene.ascendrun("retry", job).returncode == 7, "it succeeded"
    assert scene.ascendrun("retry", raising).returncode == 0
    await_that(lambda: codes(scene, raising).count("gave-up") == 2, "attempt 2 ends as attempt 1 did")
    assert [one["number"] for one in scene.show(raising)["past_attempts"]] == [1]
    explained = json.loads(scene.ascendrun("explain", raising, "-o", "json").stdout)
    assert (explained["attempt"], explained["diagnosis"]["code"]) == (2, gave_up[0]["finding"])


def test_a_checkpoint_that_is_torn_on_one_host_is_passed_over_for_the_older_common_one(scene: Scene) -> None:
    folder = "/root/checkpoints-of-torn"
    for host in scene.cluster.hosts:
        for step in (10, 20):
            path = scene.cluster.path(host, f"{folder}/checkpoint-{step}")
            path.mkdir(parents=True)
            (path / "pytorch_model.bin").write_bytes(b"weights")
            state = json.dumps({"global_step": step})
            is_torn = step == 20 and host == scene.cluster.hosts[1]
            (path / "trainer_state.json").write_text(state[:-4] if is_torn else state)
    program = "import os; print('from', os.environ['ASCENDRUN_RESUME_STEP'], os.environ['ASCENDRUN_RESUME_PATH'])"
    more = f"checkpoint: {{dir: {folder}}}\n"
    job = scene.start(scene.job("torn", more=more, command=["python3", "-c", program]))
    scene.await_state(job, "SUCCEEDED", "FAILED")
    check_ended(scene, job, state="SUCCEEDED")
    scene.await_line(job, f"from 10 {folder}/checkpoint-10", count=4)
    events = {event["code"]: event for event in scene.show(job)["events"]}
    assert events["resume-chosen"]["values"]["step"] == 10
    torn = events["checkpoint-incomplete"]
    assert torn["values"]["why"] == "invalid" and torn["values"]["path"] == f"{folder}/checkpoint-20"


def test_a_pointer_to_a_torn_checkpoint_is_set_back_on_every_host_before_the_start(scene: Scene) -> None:
    folder = "/root/checkpoints-of-pointer"
    for host in scene.cluster.hosts:
        for step in (10, 20):
            for rank in range(4):
                names = ("mp_rank_00_model_states.pt", f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
                for path in (scene.cluster.path(host, f"{folder}/global_step{step}/{name}") for name in names):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with zipfile.ZipFile(path, "w") as file:
                        file.writestr("archive/data.pkl", b"weights")
        scene.cluster.path(host, f"{folder}/latest").write_text("global_step20")
    torn = scene.cluster.path("node2", f"{folder}/global_step20/zero_pp_rank_3_mp_rank_00_optim_states.pt")
    torn.write_bytes(torn.read_bytes()[:-10])
    program = f"print('from', open('{folder}/latest').read())"
    more = f"checkpoint: {{dir: {folder}, pointer: repair}}\n"
    job = scene.start(scene.job("pointer", more=more, command=["python3", "-c", program]))
    scene.await_state(job, "SUCCEEDED", "FAILED")
    check_ended(scene, job, state="SUCCEEDED")
    scene.await_line(job, "from global_step10", count=4)
    repaired = [event for event in scene.show(job)["events"] if event["code"] == "checkpoint-pointer-repaired"]
    assert sorted(event["hosts"] for event in repaired) == [["node1"], ["node2"]]
    assert {event["values"]["before"] for event in repaired} == {"global_step20"}
    for host in scene.cluster.hosts:
        assert scene.cluster.path(host, f"{folder}/latest.old").read_text() == "global_step20"


@pytest.mark.thorough
def test_a_node_ends_its_ranks_when_its_lease_is_over_and_the_job_starts_again(scene: Scene) -> None:
    fence = "restart: {max_restarts: 1, backoff_s: [1, 2], on_unreachable_node: fence, fence_after_s: 90}\n"
    more = f"{fence}checkpoint: {{grace_period_s: 0}}\n"
    job = scene.start(scene.job("leased", "print", "ready", "hang", hosts=["node2"], more=more))
    scene.await_line(job, "ready", count=2)
    scene.stays(job, "RUNNING", for_s=70)  # longer than a lease that is not renewed
    assert scene.show(job)["job"]["attempt"] == 1
    scene.cluster.cut("node2")
    await_that(
        lambda: not [one for one in scene.cluster.processes("node2") if "rank.py" in one.argv],
        "no ranks",
        deadline_s=90,
    )
    assert scene.state(job) == "RUNNING", "the head does not know it"
    scene.cluster.heal("node2")
    scene.await_line(job, "ready", count=4)
    assert [one["counted"] for one in scene.show(job)["past_attempts"]] == [False]
    scene.ascendrun("stop", job, "--now")
    check_ended(scene, job, state="STOPPED")
