"""A pipeline on local hosts: stages one after the other in one folder, called off after a failure, gone on with."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from test_controller_crashes import DEADLINE_S, Head, await_that, head

from ascendrun.head.protocol.control_messages import Status
from ascendrun.head.protocol.control_socket import ControlClient

__all__ = ["head"]

STAGES = """
name: pipe
hostfile: two.hosts
devices: {per_node: 1}
stages:
  - name: prepare
    command: [sh, -c, "echo of $RANK >data; while test ! -e FOLDER/prepared; do sleep 0.05; done"]
  - {name: train, command: [sh, -c, "cat data; test ! -e FOLDER/broken"]}
  - {name: judge, command: [cat, data]}
"""


def pipeline(head: Head) -> str:
    (head.folder / "pipe.yaml").write_text(STAGES.replace("FOLDER", str(head.folder)))
    return head.submit("pipe.yaml")


def touch(path: Path) -> None:
    path.write_text("")


def whole(head: Head) -> dict[str, Any]:
    """The one line that ps has for the pipeline."""
    (only,) = head.ask("ps", "-a")["jobs"]
    return dict(only)


def reason(head: Head, job: str) -> tuple[str, dict[str, Any]]:
    """The code of the job's newest reason, and its values; the stage that is needed as (stage, job)."""
    newest = [event["values"]["reason"] for event in head.show(job)["events"] if "reason" in event["values"]][-1]
    values = dict(newest["values"])
    if "needed" in values:
        values["needed"] = tuple(values["needed"]["values"].values())
    return newest["code"], values


def states(head: Head) -> list[str]:
    return [stage["state"] for stage in whole(head)["stages"]]


def test_a_failed_stage_calls_off_those_after_it_and_a_later_submit_goes_on_in_the_same_folder(head: Head) -> None:
    touch(head.folder / "broken")
    job = pipeline(head)
    await_that(lambda: states(head) == ["RUNNING", "QUEUED", "QUEUED"])
    await_that(lambda: len(head.show(f"{job}-2")["events"]) >= 2)
    prepare = {"needed": ("prepare", f"{job}-1"), "job": f"{job}-1"}
    assert reason(head, f"{job}-2") == ("waiting-for-job", prepare)
    touch(head.folder / "prepared")
    assert head.run("wait", job).returncode == 1
    assert states(head) == ["SUCCEEDED", "FAILED", "STOPPED"]
    assert whole(head)["state"] == "FAILED" and whole(head)["stage"] == "train"
    codes = [
        event["values"]["reason"]["code"] for event in head.show(f"{job}-2")["events"] if "reason" in event["values"]
    ]
    assert "rank-exited" in codes  # after it, the diagnosis may be there: both ranks failed
    train = {"needed": ("train", f"{job}-2"), "job": f"{job}-2", "state": "FAILED"}
    assert reason(head, f"{job}-3") == ("dependency-failed", train)
    assert head.show("pipe")["job"]["id"] == f"{job}-2"  # the stage that tells how it stands
    told = {line["job"] for line in head.ask("events", "pipe")["events"]}
    assert told == {f"{job}-1", f"{job}-2", f"{job}-3"}
    ended = head.run("logs", "-f", "pipe")
    assert ended.returncode == 1 and f"{job}-2 FAILED" in ended.stderr

    os.unlink(head.folder / "broken")
    again = head.run("submit", "pipe.yaml", "--resume", job, code=0)
    assert "of 0" in again.stdout and "of 1" in again.stdout  # what each host had prepared
    assert states(head) == ["SUCCEEDED"] * 3 and whole(head)["state"] == "SUCCEEDED"
    assert [stage["job_id"] for stage in whole(head)["stages"]] == [f"{job}-1", f"{job}-4", f"{job}-5"]
    nothing_left = head.run("submit", "pipe.yaml", "--resume", job)
    assert nothing_left.returncode == 7 and job in nothing_left.stderr
    assert head.run("submit", "pipe.yaml", "--resume", job, "--from-stage", "judge").returncode == 0


class Follower:
    """A command that follows, its output in files: what it has shown so far can be waited for."""

    def __init__(self, head: Head, name: str, *argv: str) -> None:
        self._files = head.folder / f"{name}.out", head.folder / f"{name}.err"
        with open(self._files[0], "w") as out, open(self._files[1], "w") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ascendrun", *argv], env=head.environ(), cwd=head.folder, stdout=out, stderr=err
            )

    @property
    def has_begun(self) -> bool:
        return any(file.stat().st_size for file in self._files)

    def result(self) -> tuple[int, str, str]:
        """(exit code, standard output, standard error), once it has ended."""
        code = self._process.wait(timeout=DEADLINE_S)
        return code, self._files[0].read_text(), self._files[1].read_text()


def test_a_pipeline_goes_on_and_is_followed_when_the_controller_is_killed_between_its_stages(head: Head) -> None:
    job = pipeline(head)
    await_that(lambda: states(head) == ["RUNNING", "QUEUED", "QUEUED"])
    logs = Follower(head, "logs", "logs", "-f", "pipe")
    events = Follower(head, "events", "events", "-f", job, "-o", "jsonl")
    await_that(lambda: logs.has_begun and events.has_begun)  # killed before that, they would follow from after it
    with ControlClient(head.state_dir) as client:
        os.kill(client.call(Status(), timeout_s=DEADLINE_S).pid, signal.SIGKILL)
    touch(head.folder / "prepared")
    head.run("wait", job, code=0)
    assert states(head) == ["SUCCEEDED"] * 3
    code, shown, talk = logs.result()
    assert code == 0 and shown.count("of 0") == shown.count("of 1") == 2, shown + talk  # train and judge
    assert [f"stage {n}/3" in talk for n in (1, 2, 3)] == [True] * 3 and f"{job}-3 SUCCEEDED" in talk
    assert talk.splitlines()[-1].startswith(f"{job} SUCCEEDED after ")
    code, shown, _ = events.result()
    story = [json.loads(line) for line in shown.splitlines()]
    assert code == 0 and {line["job"] for line in story} == {f"{job}-{n}" for n in (1, 2, 3)}


def test_stopping_a_pipeline_stops_the_stage_that_runs_and_starts_no_other(head: Head) -> None:
    job = pipeline(head)
    await_that(lambda: states(head) == ["RUNNING", "QUEUED", "QUEUED"])
    assert head.run("stop", "pipe", "--now").returncode == 0
    await_that(lambda: states(head) == ["STOPPED"] * 3)
    assert whole(head)["state"] == "STOPPED"
    assert not head.show(f"{job}-2")["ranks"]
