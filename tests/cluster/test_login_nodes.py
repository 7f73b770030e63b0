"""A laptop (the head of the cluster) and two login nodes with one home, node1 and node2; jobs run on node3."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import CODE, start_cluster
from scenes import Scene

from tests.lib.vcluster.processes import await_that, await_true
from tests.lib.vcluster.spec import root_home

WRAPPER = f'#!/bin/sh\nPYTHONPATH={CODE} exec {sys.executable} -m ascendrun "$@"\n'
ON_PATH = "/usr/local/bin/ascendrun"
STORE = "/var/tmp/ascendrun-0/state"
WORK = "/home/work"
FIRST = ("exec", "--hostfile", "cluster.hosts", "--", "true")


@pytest.fixture(scope="module")
def module_cluster():
    with start_cluster(3, shared_home=True) as cluster:
        for name in ("node1", "node2"):
            cluster.file_system(name, f"{root_home()}/.local/state", kind="fuse.sshfs")
        put_on_path(cluster, WRAPPER)
        yield cluster


def put_on_path(cluster: Any, text: str) -> None:
    cluster.path("node1", ON_PATH).write_text(text)
    cluster.path("node1", ON_PATH).chmod(0o755)


class Laptop(Scene):
    """Jobs of a machine that has a `head`; `on` types a command on a login node."""

    def __init__(self, ascendrun: Any, cluster: Any) -> None:
        super().__init__(ascendrun, cluster)
        self.env = {"ASCENDRUN_HEAD": "root@node1"}

    def run_here(self, *argv: object, **options: Any) -> subprocess.CompletedProcess[str]:
        return self.ascendrun(*argv, env=self.env, **options)

    def ask(self, *argv: object) -> Any:
        return self.ascendrun.ask(*argv, env=self.env)

    def show(self, job: str) -> dict[str, Any]:
        return dict(self.ask("show", job))

    def start(self, job_file: Path, *options: object, env: Any = None) -> str:
        return str(self.ask("submit", job_file, "--detach", *options)["id"])

    def on(self, name: str, *argv: object) -> subprocess.CompletedProcess[str]:
        environ = {**self.cluster.host_environ(), "PYTHONPATH": str(CODE)}
        words = [sys.executable, "-m", "ascendrun", *map(str, argv)]
        return self.cluster.host_run(name, words, cwd=WORK, env=environ, capture_output=True, text=True)

    def commands(self, word: str) -> list[Any]:
        """Commands with a word that run on node1, where sshd or ssh has started them."""
        return [
            one for one in self.cluster.processes("node1") if one.argv[1:3] == ("-m", "ascendrun") and word in one.argv
        ]


@pytest.fixture
def laptop(ascendrun, cluster):
    for name in ("node1", "node2"):
        cluster.host_run(name, ["rm", "-rf", STORE, f"{root_home()}/.ascendrun/head.json"], check=True)
    cluster.path("node1", WORK).mkdir(exist_ok=True)
    cluster.path("node1", f"{WORK}/cluster.hosts").write_text("node3\n")
    scene = Laptop(ascendrun, cluster)
    yield scene
    for name in ("node1", "node2"):
        if cluster.is_up(name):
            scene.on(name, "controller", "stop")


def test_a_job_of_a_laptop_runs_from_its_directory_as_it_is_now(laptop):
    file = laptop.job("staged", command=["sh", "-c", "cat part; ls"], hosts=["node3"], per_node=1)
    (laptop.folder / "code/old").touch()
    for text in ("first\n", "second\n", "second\n"):
        (laptop.folder / "code/part").write_text(text)
        done = laptop.run_here("submit", Path(file.name))
        assert (done.returncode, "old" in done.stdout.split()) == (0, text == "first\n"), done.stdout + done.stderr
        assert text.strip() in done.stdout
        (laptop.folder / "code/old").unlink(missing_ok=True)
    assert laptop.run_here("validate", file).returncode == 0
    assert laptop.run_here("submit", laptop.job("fails", "exit", 3, hosts=["node3"])).returncode == 1
    assert laptop.run_here("show", "j-99").returncode == 4
    assert not laptop.ascendrun.state_dir.exists()  # of the laptop


def test_files_come_to_the_laptop_and_go_to_hosts(laptop):
    command = ["sh", "-c", "mkdir out; echo weights >out/best"]
    file = laptop.job("left", command=command, hosts=["node3"], per_node=1, more="outputs: [out]\n")
    assert laptop.run_here("submit", file).returncode == 0
    far = laptop.folder / "far"
    copies = {"models/best": "models", str(far / "best"): far}
    for path, into in copies.items():
        done = laptop.run_here("cp", "left:out/best", into)
        assert ((laptop.folder / path).read_text(), done.returncode) == ("weights\n", 0), done.stderr
    assert laptop.run_here("fetch", "left").returncode == 0
    assert [one.read_text() for one in (laptop.folder / "left").rglob("best")] == ["weights\n"]
    (laptop.folder / "data").mkdir()
    (laptop.folder / "data/table").write_text("rows")
    hostfile = laptop.folder / "left.hosts"
    done = laptop.run_here("cp", "data", "node3:/tmp/there", "--hostfile", hostfile)
    assert done.returncode == 0, done.stderr
    assert laptop.cluster.path("node3", "/tmp/there/data/table").read_text() == "rows"
    folders = laptop.cluster.path("node1", f"{root_home()}/.ascendrun/laptops")
    assert len(list(folders.iterdir())) == 1  # what was only for one command is gone


def test_the_queue_of_the_head_is_listed_on_the_laptop(laptop):
    cluster, settings = laptop.cluster, laptop.cluster.path("node1", "/etc/ascendrun/config.yaml")
    settings.parent.mkdir(exist_ok=True)
    settings.write_text("queue: /run/ascendrun-queue\n")
    argv = [sys.executable, "-m", "ascendrun", "controller", "run", "--shared", "/run/ascendrun-queue"]
    environ = {**cluster.host_environ(), "PYTHONPATH": str(CODE)}
    server = cluster.host_popen("node1", argv, env=environ)
    try:
        job = laptop.start(laptop.job("shown", "print", "ready", "beat-on", "/tmp/enough", hosts=["node3"]))
        laptop.await_state(job, "RUNNING")  # a new server grants nothing for 10 s

        def rows() -> list[Any]:
            done = laptop.run_here("ps", "--all-users", "-o", "json")
            listed = json.loads(done.stdout)["jobs"] if done.returncode == 0 else []  # else: no connection in time
            return [(row["user"], row["job"], row["state"]) for row in listed]

        await_that(lambda: rows() == [("root", job, "RUNNING")], lambda: str(rows()))
        assert f"root  -        {job}" in laptop.run_here("ps", "--all-users").stdout
        assert laptop.run_here("stop", f"root/{job}", "--now").returncode == 0
        laptop.await_state(job, "STOPPED")
    finally:
        settings.unlink()
        server.terminate()
        server.wait(30)
    assert laptop.run_here("ps", "--all-users").returncode == 7, "its settings name no queue"


def test_a_terminal_of_the_laptop_is_that_of_the_command(laptop):
    file = laptop.job("endless", "print", "ready", "hang", hosts=["node3"], per_node=1)
    child = laptop.ascendrun.pty("submit", file, env=laptop.env)
    child.expect("ready")
    child.sendintr()
    child.expect("endless|j-0001")
    child.wait()
    assert child.exitstatus == 130 and laptop.state("endless") == "RUNNING"
    shell = laptop.ascendrun.pty("shell", "endless", env=laptop.env)
    shell.sendline("stty size; echo on-$(hostname)")
    shell.expect("30 100")
    shell.expect("on-node3")
    shell.sendline("exit 7")
    shell.wait()
    assert shell.exitstatus == 7
    top = laptop.ascendrun.pty("top", env=laptop.env)
    top.expect("node3")
    top.send("q")
    top.wait()
    assert top.exitstatus == 0
    laptop.run_here("stop", "endless", "--now")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_without_a_terminal_ends_with_its_sender(laptop, number):
    job = laptop.start(laptop.job("endless", "print", "ready", "hang", hosts=["node3"], per_node=1))
    with laptop.ascendrun.popen("logs", "-f", job, env=laptop.env, stdout=subprocess.PIPE, text=True) as child:
        assert "ready" in child.stdout.readline()
        assert laptop.commands("logs")
        if number == signal.SIGINT:  # ^C goes to all
            (ssh,) = [one for one in laptop.cluster.processes("head") if one.argv[:1] == ("ssh",)]
            os.kill(ssh.pid, number)
        child.send_signal(number)
    assert await_true(lambda: not laptop.commands("logs"), deadline_s=20.0)
    assert laptop.state(job) == "RUNNING"
    laptop.run_here("stop", job, "--now")


def test_a_head_that_is_gone_or_has_no_ascendrun_is_told(laptop):
    put_on_path(laptop.cluster, WRAPPER.replace("-m ascendrun", "-c 'print(\"ascendrun 0.1\")'"))
    assert "0.1" in laptop.run_here("ps").stderr
    laptop.cluster.path("node1", ON_PATH).unlink()
    absent = laptop.run_here("ps")
    assert (absent.returncode, "root@node1" in absent.stderr) == (3, True)
    put_on_path(laptop.cluster, WRAPPER)
    laptop.cluster.cut("node1")
    done = laptop.ascendrun("ps", env={"ASCENDRUN_HEAD": "", **laptop.env})
    assert (done.returncode, "root@node1" in done.stderr) == (5, True)
    file = laptop.job("late", "print", "x", hosts=["node3"])
    assert laptop.run_here("submit", file).returncode == 5


def test_a_command_on_another_login_node_runs_where_the_store_is(laptop):
    cluster = laptop.cluster
    path = cluster.path("node1", f"{WORK}/job.yaml")
    path.write_text("name: shared\ncommand: [sh, -c, 'echo seen; exit 3']\ndevices: {type: cpu, per_node: 1}\n")
    assert laptop.on("node1", *FIRST).returncode == 0
    pointer = json.loads(cluster.path("node2", f"{root_home()}/.ascendrun/head.json").read_text())
    assert pointer["host"] == "node1" and cluster.path("node1", STORE).is_dir()
    done = laptop.on("node2", "submit", "job.yaml", "-H", "cluster.hosts")
    assert (done.returncode, "seen" in done.stdout) == (1, True), done.stdout + done.stderr
    assert not cluster.path("node2", STORE).exists()
    assert laptop.run_here("show", "shared").returncode == 0
    jobs = {name: json.loads(laptop.on(name, "history", "-o", "json").stdout) for name in ("node1", "node2")}
    assert jobs["node1"] == jobs["node2"] and "shared" in str(jobs["node1"])


def test_a_login_node_takes_the_store_over_with_its_running_jobs(laptop):
    job = laptop.start(laptop.job("moved", "print", "ready", "beat-on", "/tmp/enough", hosts=["node3"], per_node=1))
    assert await_true(lambda: laptop.state(job) == "RUNNING", deadline_s=60.0)
    assert laptop.on("node2", "controller", "move").returncode == 0
    assert json.loads(laptop.on("node2", "show", job, "-o", "json").stdout)["job"]["state"] == "RUNNING"
    assert laptop.state(job) == "RUNNING"  # by node1
    assert not [one for one in laptop.cluster.processes("node1") if "controller" in one.argv]
    laptop.enough()
    assert laptop.on("node1", "wait", job).returncode == 0


def test_without_the_login_node_of_the_store_another_one_takes_over_with_a_new_store(laptop):
    job = laptop.start(laptop.job("left", "print", "ready", "beat-on", "/tmp/enough", hosts=["node3"], per_node=1))
    assert await_true(lambda: laptop.state(job) == "RUNNING", deadline_s=60.0)
    laptop.cluster.cut("node1")
    gone = laptop.on("node2", "ps")
    assert (gone.returncode, "controller move" in gone.stderr) == (5, True)
    moved = laptop.on("node2", "controller", "move")
    assert (moved.returncode, "node1" in moved.stderr) == (0, True)
    assert laptop.on("node2", "nodes", "-H", "cluster.hosts").returncode == 0

    def state() -> str:
        shown = laptop.on("node2", "show", job, "-o", "json")
        return "" if shown.returncode else str(json.loads(shown.stdout)["job"]["state"])

    assert await_true(lambda: state() == "RUNNING", deadline_s=60.0), "it is found on its host"
    laptop.cluster.heal("node1")
    assert laptop.on("node1", "ps").returncode == 0
    pointer = json.loads(laptop.cluster.path("node1", f"{root_home()}/.ascendrun/head.json").read_text())
    assert pointer["host"] == "node2"
    running = lambda: [one for one in laptop.cluster.processes("node1") if "controller" in one.argv]  # noqa: E731
    assert await_true(lambda: not running(), deadline_s=20.0), "one of them has the jobs"
    laptop.enough()
    assert laptop.on("node2", "wait", job).returncode == 0
