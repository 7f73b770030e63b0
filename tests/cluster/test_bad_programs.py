"""Programs that misbehave, secrets that must not be seen, and two heads at once: promises about a job all the same."""

import os
from pathlib import Path
from typing import Callable

import pytest
from invariants import check_ended, too_open
from scenes import Scene, await_that, run_text

from tests.lib.vcluster.machines import HEAD

FORKS = """
import os, sys, time
for _ in range(200):
    if not os.fork():
        time.sleep(1000)
print("forked", flush=True)
"""

ODD = r"""
import os, sys, time
out = sys.stdout.buffer
out.write(b"nul\0nul\rprogress 1\rprogress 2\n\xff\xfe\x1b]0;title\x07\n")
out.write(b"x" * 10_000_000 + b"\n")
for number in range(20000):
    out.write(b"line %d\r\n" % number)
out.write(b"no newline at the end")
out.flush()
"""


KILLS = """
import os, signal, sys, time
print("ready", flush=True)
if os.environ["RANK"] == "3":
    time.sleep(1)
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = open("/proc/%s/cmdline" % pid).read().split("\\0")
        except OSError:
            continue
        if "supervise" in words or "serve" in words:
            os.kill(int(pid), signal.SIGKILL)
time.sleep(1000)
"""


def program(scene: Scene, name: str, text: str, *words: str, more: str = "", per_node: int = 2) -> Path:
    (scene.folder / "code" / "program.py").write_text(text)
    return scene.job(name, command=["python3", "program.py", *words], more=more, per_node=per_node)


def test_children_that_outlive_their_rank_are_ended_and_the_job_still_succeeds(scene: Scene) -> None:
    job = scene.start(program(scene, "forks", FORKS, per_node=1))
    scene.await_state(job, "SUCCEEDED")
    check_ended(scene, job, state="SUCCEEDED")


def test_whatever_bytes_a_rank_writes_the_head_has_the_same(scene: Scene) -> None:
    job = scene.start(program(scene, "odd", ODD, per_node=1))
    scene.await_state(job, "SUCCEEDED")
    check_ended(scene, job, state="SUCCEEDED")
    assert all(
        data.startswith(b"nul\0nul\r") and data.endswith(b"no newline at the end")
        for data in scene.on_head(job, "rank-*.out.0").values()
    )
    shown = scene.ascendrun("logs", job, "--tail", "3")
    assert shown.returncode == 0 and "no newline at the end" in shown.stdout, run_text(shown)


def test_a_rank_that_kills_its_supervisor_and_the_agent_leaves_nothing_running(scene: Scene) -> None:
    job = scene.start(program(scene, "killer", KILLS))
    scene.await_state(job, "FAILED")
    assert "node2" in scene.show(job)["job"]["reason"]
    check_ended(scene, job, state="FAILED")


def test_a_job_that_reaches_its_time_limit_is_ended_everywhere_with_that_reason(scene: Scene) -> None:
    job = scene.start(
        scene.job(
            "limited",
            "family",
            "print",
            "ready",
            "hang",
            more="timeouts: {run_s: 2}\ncheckpoint: {grace_period_s: 1}\n",
        )
    )
    scene.await_state(job, "FAILED")
    assert scene.reason(job)["code"] == "time-limit"
    check_ended(scene, job, state="FAILED")


SECRET = "canary-4711-do-not-show"


def test_a_secret_is_seen_by_the_ranks_and_nowhere_else_and_all_files_are_private(scene: Scene) -> None:
    secrets = scene.folder / "secret.env"
    secrets.write_text(f"TOKEN={SECRET}\n")
    job = scene.begin(scene.job("secret", "print", "ready", "hang", more="env_file: [secret.env]\n"))
    ranks = [
        one
        for host in scene.cluster.hosts
        for one in scene.cluster.processes(host)
        if one.environ.get("RANK") is not None
    ]
    assert len(ranks) == 4 and {one.environ.get("TOKEN") for one in ranks} == {SECRET}
    everybody = [one for name in (HEAD, *scene.cluster.hosts) for one in scene.cluster.processes(name)]
    assert not [one.argv for one in everybody if SECRET in " ".join(one.argv)]
    others = [one for one in everybody if one.pid not in {rank.pid for rank in ranks}]
    assert not [one.argv for one in others if SECRET in "".join(one.environ.values())]
    scene.ascendrun("stop", "--now", job)
    check_ended(scene, job, state="STOPPED")
    check_private(scene)
    for verb in (("show", job), ("show", job, "-o", "json"), ("logs", job), ("ps", "-a", "-o", "json")):
        done = scene.ascendrun(*verb)
        assert SECRET not in done.stdout + done.stderr
    nodes = (scene.cluster.path(host, "/root/.ascendrun") for host in scene.cluster.hosts)
    folders = [scene.ascendrun.state_dir, *nodes]
    assert not [
        path
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink() and SECRET.encode() in path.read_bytes()
    ]


def check_private(scene: Scene) -> None:
    """Nobody else may open what ascendrun keeps on head and nodes."""
    found = too_open(scene.ascendrun.state_dir)
    for host in scene.cluster.hosts:
        root = scene.cluster.path(host, "/root/.ascendrun")
        found += [name for name in too_open(root) if "/trees/" not in name and "/work/" not in name]
    assert not found, "\n".join(found)


@pytest.mark.shared_home
def test_two_heads_on_the_same_nodes_start_their_jobs_side_by_side(scene: Scene) -> None:
    job_file = scene.job("shared", "meet", "print", "ready", "hang", slots=4)
    other = {"ASCENDRUN_STATE_DIR": str(scene.ascendrun.state_dir)[:-5] + "other"}
    one, two = (
        scene.ascendrun.popen("submit", job_file, "--detach", env=env, stdout=-1, stderr=-1) for env in (None, other)
    )
    assert (one.wait(60), two.wait(60)) == (0, 0), (one.communicate(), two.communicate())
    scene.await_line("j-0001", "ready", count=4)
    await_that(
        lambda: '"RUNNING"' in scene.ascendrun("show", "j-0001", "-o", "json", env=other).stdout,
        "the other head's job runs too",
    )
    ports = {
        process.environ.get("MASTER_PORT")
        for process in scene.cluster.processes("node1")
        if process.environ.get("RANK") == "0"
    }
    assert len(ports) == 2
    assert scene.ascendrun("stop", "--now", "j-0001").returncode == 0
    left = [
        process
        for host in scene.cluster.hosts
        for process in scene.cluster.processes(host)
        if process.environ.get("RANK") is not None
    ]
    assert len(left) == 4, "the other head's ranks live on"
    assert scene.ascendrun("stop", "--now", "j-0001", env=other).returncode == 0
    assert scene.ascendrun("controller", "stop", env=other).returncode == 0


def test_two_users_of_hosts_with_one_home_run_side_by_side(scene_of: Callable[..., Scene]) -> None:
    scene = scene_of(2, shared_home=True, users={"wang": "sh"})
    jobs = []
    for user in ("root", "wang"):
        job_file = scene.job(user, "meet", "print", "ready", "hang", slots=4)
        (scene.folder / f"{user}.hosts").write_text(scene.cluster.hostfile(slots=4, user=user))
        jobs.append(scene.start(job_file))
    for job in jobs:
        scene.await_line(job, "ready", count=4)
    assert scene.ascendrun("stop", "--now", jobs[0]).returncode == 0
    assert scene.state(jobs[1]) == "RUNNING" and len(scene.everywhere(jobs[1])) == 4
    assert scene.ascendrun("stop", "--now", jobs[1]).returncode == 0


def test_one_machine_under_two_names_is_refused_with_both_names(scene: Scene) -> None:
    job_file = scene.job("twice", "touch", "/tmp/started")
    address = scene.cluster.address("node1")
    (scene.folder / "twice.hosts").write_text(f"node1 slots=2\nalias slots=2 addr={address}\n")
    done = scene.ascendrun("submit", job_file)
    assert done.returncode != 0, run_text(done)
    assert "alias,node1" in done.stderr and "one machine" in done.stderr, run_text(done)
    assert not scene.cluster.path("node1", "/tmp/started").exists()


def test_two_hundred_oddly_named_files_are_staged_as_they_are(scene: Scene) -> None:
    code = scene.folder / "code"
    names: list[bytes] = [
        b"%03d " % n + word
        for n, word in enumerate(
            [
                b"space name",
                b"quote'\"",
                b"new\nline",
                b"$(touch x)",
                b"-rf",
                b"\xff\xfe",
                "ü漢".encode(),
                b"a" * 200,
                b"*?[",
                b"tab\t",
                b"back\\slash",
                b"#hash",
                b"~",
                b";semi",
                b"\x1b[31m",
                b".hidden",
            ]
            * 13
        )
    ][:200]
    for name in names:
        with open(os.path.join(os.fsencode(code), name), "wb") as file:
            file.write(name)
    (code / "empty").mkdir()
    scene.ascendrun("submit", scene.job("odd", "print", "ok"), code=0)
    for host in scene.cluster.hosts:
        work = next(scene.runs_on(host).glob("*/work"))
        tree = next(scene.cluster.path(host, "/root/.ascendrun/trees").glob("[0-9a-f]*/empty")).parent
        assert {name for name in os.listdir(os.fsencode(tree)) if name[:3].isdigit()} == set(names)
        assert all(Path(os.fsdecode(os.path.join(os.fsencode(tree), name))).read_bytes() == name for name in names)
        assert work.is_dir()
