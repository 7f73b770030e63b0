"""Roles over real sshd: a service of three roles on three hosts, its end, its failure, and a controller that dies."""

import json
import re
import signal
from pathlib import Path
from typing import Any, Callable

import leftovers
import pytest
from invariants import check_ended
from scenes import ENOUGH, Scene, await_that

from ascendrun.cli.dashboard.jobpage import Kept, read_job
from ascendrun.cli.dashboard.logpage import read_logs
from ascendrun.cluster import Cluster
from ascendrun.core.errors import NotFoundError
from ascendrun.core.settings import Settings

CODE = Path(__file__).resolve().parents[2]
SERVE = {"nodes": 1, "command": ["python3", "rank.py", "print", "ready", "hang"], "ends_job": False}
WORK = {"nodes": 1, "command": ["python3", "rank.py", "print", "ready", "beat-on", ENOUGH], "devices": {"per_node": 1}}


@pytest.fixture
def scene(scene_of: Callable[..., Scene]) -> Scene:
    return scene_of(3)


def start_gang(scene: Scene, name: str) -> str:
    """Start prefill and decode with two ranks each, and a proxy whose end is that of the job; return its id."""
    roles = [{"name": "prefill", **SERVE}, {"name": "decode", **SERVE}, {"name": "proxy", **WORK}]
    path = scene.job(name, more="restart: {max_restarts: 0}\n")
    text = re.sub(r"^command: .*$", f"roles: {json.dumps(roles)}", path.read_text(), flags=re.M)
    path.write_text(text)
    job = scene.start(path)
    scene.await_line(job, "ready", count=5)
    return job


def kill_rank(scene: Scene, host: str, number: int) -> None:
    victims = [one for one in scene.cluster.processes(host) if one.environ.get("RANK") == str(number)]
    leftovers.kill([one for one in victims if "rank.py" in one.argv], signal.SIGKILL)


def explained(scene: Scene, job: str) -> dict[str, Any]:
    return dict(json.loads(scene.ascendrun("explain", job, "-o", "json", code=0).stdout)["diagnosis"])


def test_the_commands_of_the_page_run_the_template(scene: Scene) -> None:
    page = (CODE / "docs/roles.md").read_text(encoding="utf-8")
    typed = [line.split("  ")[0].split() for line in re.findall(r"^    (ascendrun .*)$", page, re.M)]
    [new, *others] = [words[1:] for words in typed]
    folder = scene.folder / "serving"
    scene.ascendrun(*new[:-1], folder, code=0)
    (folder / "cluster.hosts").write_text(scene.cluster.hostfile(slots=1))
    job_file = folder / "job.yaml"
    job_file.write_text(job_file.read_text().replace("nodes: 2", "nodes: 1"))  # the cluster has three
    shown = [
        scene.ascendrun(*[job_file if word == "job.yaml" else word for word in words], code=0).stdout
        for words in others
    ]
    _, submitted, detail, decode, proxy = shown
    assert "[proxy/0] text 7 client the of 7 request" in submitted
    assert re.search(r"^node2 +decode/0 ", detail, re.M) and "SUCCEEDED: work complete" in detail
    assert "[decode/0] decode answered" in decode and "[prefill" not in decode and "[proxy" not in decode
    assert proxy.startswith("[proxy/0] proxy listens on port 8100")
    check_ended(scene, "j-0001", state="SUCCEEDED")


def test_a_role_that_dies_ends_all_and_is_named_and_the_end_of_the_work_ends_all_as_a_success(scene: Scene) -> None:
    dying = start_gang(scene, "dying")
    kill_rank(scene, "node2", 1)
    scene.await_state(dying, "FAILED")
    check_ended(scene, dying, state="FAILED")
    reason = scene.reason(dying)
    assert (reason["ranks"], reason["message"]) == ([3], "rank decode/1 on node2 was killed by signal 9")
    await_that(lambda: scene.show(dying)["job"]["confidence"] != "preliminary", "the diagnosis")
    found = explained(scene, dying)
    assert (found["ranks"], found["hosts"]) == ([3], ["node2"]) and "rank decode/1 on node2" in found["message"]
    assert "rank decode/1 on node2" in scene.ascendrun("ps", "-a", code=0).stdout
    shown = scene.ascendrun("explain", dying, "--all", code=0).stdout
    assert "decode/0" in shown and "proxy/0" in shown and not re.search(r"ranks? \d", shown), shown

    serving = start_gang(scene, "serving")
    cluster = Cluster(Settings(state_dir=scene.ascendrun.state_dir))
    names = ["prefill/0", "prefill/1", "decode/0", "decode/1", "proxy/0"]
    assert list(read_job(cluster, Kept(), serving)["labels"].values()) == names
    for wanted in ("decode/1", "3"):
        lines = read_logs(cluster, serving, {"ranks": wanted})["lines"]
        assert {line["who"] for line in lines} == {"decode/1"}, lines
    with pytest.raises(NotFoundError):
        read_logs(cluster, serving, {"ranks": "wrok"})
    assert set(names) <= set(scene.ascendrun("top", "--job", serving, "--once", code=0).stdout.split())
    scene.enough()
    scene.await_state(serving, "SUCCEEDED")
    check_ended(scene, serving, state="SUCCEEDED")
    detail = scene.show(serving)
    assert detail["first_failure"] is None
    assert [(rank["signal"], rank["stopped"]) for rank in detail["ranks"][:4]] == [(15, True)] * 4
    causes = [event["values"].get("cause") for event in detail["events"] if event["code"] == "state-changed"]
    assert causes[-2:] == ["completed"] * 2


def test_a_dead_controller_completes_the_job_later_and_a_server_that_fell_after_the_work_is_no_failure(
    scene: Scene,
) -> None:
    job = start_gang(scene, "outliving")
    leftovers.kill(leftovers.controllers(scene.cluster, scene.ascendrun.state_dir), signal.SIGKILL)
    proxies = [one.pid for one in scene.cluster.processes("node3") if one.environ.get("ASCENDRUN_ROLE") == "proxy"]
    assert proxies
    scene.enough()
    await_that(lambda: not scene.ranks_of(job, "node3"), "the proxy has ended")
    kill_rank(scene, "node1", 0)
    await_that(lambda: not scene.ranks_of(job, "node1"), "prefill has ended")
    scene.await_state(job, "SUCCEEDED", "FAILED")
    check_ended(scene, job, state="SUCCEEDED")
    assert scene.show(job)["first_failure"] is None
