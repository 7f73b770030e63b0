"""What a job may rely on, whatever reaches its hosts: one suite for every backend."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pexpect
import pytest

from tests.cluster.leftovers import controllers, kill
from tests.cluster.scenes import BEAT_ON, Scene, await_that, run_text
from tests.contract.pods import KubeAscendrun, KubeScene
from tests.lib.kubernetes import BIN, PARTS
from tests.lib.vcluster import containers, slurm
from tests.lib.vcluster.cluster import VirtualCluster
from tests.lib.vcluster.machines import HEAD
from tests.lib.vcluster.processes import Process, await_true

Ascendrun = Any

SSH_HOSTS = "node1 slots=2\nnode2 slots=2\n"
LOCAL_HOSTS = "near1 slots=2 addr=local\nnear2 slots=2 addr=local\n"
BACKENDS: dict[str, dict[str, str]] = {
    "local": {"hosts": LOCAL_HOSTS, "transport": "auto"},
    "paramiko": {"hosts": SSH_HOSTS, "transport": "paramiko", "engine": "site"},
    "openssh": {"hosts": SSH_HOSTS, "transport": "openssh"},
    "docker": {"hosts": SSH_HOSTS, "transport": "auto", "engine": "docker"},
    "podman": {"hosts": SSH_HOSTS, "transport": "auto", "engine": "podman"},
    "slurm": {"hosts": "node1\nnode2\n", "transport": "auto", "engine": "hpc"},
    "slurm-docker": {"hosts": "node1\nnode2\n", "transport": "auto", "engine": "hpc-docker"},
    "kubernetes": {"hosts": "", "transport": "auto", "engine": "cloud"},
}
WITHOUT_HOSTS = ("hpc", "hpc-docker", "cloud")
"""Engines that have no hosts without a job."""
COMMANDS = {"hpc": Path("/usr/bin/srun"), "cloud": BIN / "kubectl"}
"""What carries the connections of an engine."""


class Place(Scene):
    """A scene whose jobs run on the hosts of one backend."""

    def __init__(self, ascendrun: Ascendrun, cluster: VirtualCluster, backend: dict[str, str]) -> None:
        super().__init__(ascendrun, cluster)
        self.backend = backend
        (self.folder / "hosts").write_text(backend["hosts"])
        (self.folder / "ascendrun").mkdir()
        site = {"type": "ssh", "hostfile": str(self.folder / "hosts")}
        boxes = {name: containers.engine(site, name) for name in ("docker", "podman")}
        hpc = {"type": "slurm", "partition": "train"}
        engines = {"site": site, "hpc": hpc, "hpc-docker": containers.engine(hpc, "docker"), **boxes}
        (self.folder / "ascendrun/config.yaml").write_text(json.dumps({"engines": engines}))

    def options(self) -> tuple[str, ...]:
        if "engine" in self.backend:
            return ("--engine", self.backend["engine"], "--set", "nodes=2")
        return ("--hostfile", str(self.folder / "hosts"))

    def submit(self, job_file: Any, *options: str) -> Any:
        return self.ascendrun("submit", job_file, *self.options(), *options, env=self.env())

    def env(self) -> dict[str, str]:
        return {"ASCENDRUN_TRANSPORT": self.backend["transport"], "XDG_CONFIG_HOME": str(self.folder)}

    def head_argv(self, argv: list[str]) -> list[str]:
        return self.cluster.head_argv(argv, cwd="/")

    def links(self) -> list[Process]:
        """The steps that carry the connections of Slurm."""
        return [one for one in self.cluster.processes(HEAD) if "--job-name=link" in one.argv]

    def set_cut(self, is_cut: bool) -> None:
        """Cut the hosts off, or end that."""
        for host in self.cluster.hosts:
            (self.cluster.cut if is_cut else self.cluster.heal)(host)

    def boxes(self) -> list[str]:
        """The containers of jobs."""
        return containers.left(self.cluster)

    is_reached_by_daemons = False
    """Its hosts are reached only while the daemons of the engine run."""

    def kill(self, victim: str) -> None:
        """SIGKILL the controller, the next command of the runtime on any host, or the daemon of each."""
        if victim == "controller":
            kill(controllers(self.cluster, self.ascendrun.state_dir))
        elif victim == "command":
            await_true(lambda: self._kill_named((self.backend["engine"],)), deadline_s=3.0)
        else:
            while self._kill_named(("docker", *containers.DAEMONS)):
                continue

    def _kill_named(self, names: tuple[str, ...]) -> bool:
        everything = [one for host in self.cluster.hosts for one in self.cluster.processes(host) if one.argv]
        found = [one for one in everything if Path(one.argv[0]).name in names]
        kill(found)
        return bool(found)

    def revive(self, victim: str) -> None:
        for host in self.cluster.hosts if victim == "daemon" else ():
            containers.start_daemon(self.cluster, host)
            containers.await_daemon(self.cluster, host)

    def holders(self) -> list[Process]:
        """The first processes of containers."""
        return [one for host in self.cluster.hosts for one in self.cluster.processes(host) if "contain" in one.argv]

    def end_shims(self) -> int:
        """End the shims that a containerd has forgotten which died in the middle of a start; return their number."""
        everything = [one for host in self.cluster.hosts for one in self.cluster.processes(host)]
        found = [one for one in everything if "containerd-shim" in str(one.argv[:1])]
        kill(found)
        return len(found)


class Pods(KubeScene, Place):
    """A place whose hosts are pods."""

    backend = BACKENDS["kubernetes"]

    def boxes(self) -> list[str]:
        return [pod["metadata"]["name"] for pod in self.pods()]

    def env(self) -> dict[str, str]:
        return {}

    is_reached_by_daemons = True

    def kill(self, victim: str) -> None:
        if victim == "controller":
            kill(self.controllers())
        elif victim == "command":
            kill([one for one in self.kubernetes.processes() if Path(one.argv[0]).name == "kubectl"])
        else:
            self.kubernetes.stop(victim)

    def revive(self, victim: str) -> None:
        if victim in PARTS:
            self.kubernetes.start(victim)

    def holders(self) -> list[Process]:
        return []  # they are gone with their pods

    def end_shims(self) -> int:
        return 0


@pytest.fixture(params=list(BACKENDS))
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "kubernetes":
        with closing(Pods(KubeAscendrun(request.getfixturevalue("kubernetes"), tmp_path))) as made:
            yield made
        return
    ascendrun, cluster = request.getfixturevalue("ascendrun"), request.getfixturevalue("cluster")
    has_slurm = slurm.run_folder(cluster.folder).exists()
    if request.param.startswith("slurm") and not has_slurm:
        pytest.skip("Slurm is not installed")
    yield Place(ascendrun, cluster, BACKENDS[request.param])
    if has_slurm:  # its controller releases an allocation after the end of the job, and ends with the test
        await_that(lambda: not slurm.allocations(cluster), "every allocation is released")
    if request.param.endswith(("docker", "podman")):
        await_that(lambda: not containers.left(cluster), "no container is left")


def test_a_failing_rank_fails_the_job_by_name(place: Place) -> None:
    done = place.submit(place.job("failing", "meet", "exit-rank", 3, 7, "hang"))
    assert done.returncode == 1, run_text(done)
    reason = place.reason("failing")
    assert (reason["code"], reason["ranks"], reason["values"]["code"]) == ("rank-exited", [3], 7)
    assert reason["message"] in done.stderr


def test_a_command_that_does_not_exist_starts_nobody(place: Place) -> None:
    done = place.submit(place.job("absent", command=["no-such-program"]))
    assert done.returncode == 1, run_text(done)
    assert "no-such-program" in done.stderr
    detail = place.show("absent")
    assert detail["job"]["state"] == "FAILED"
    assert not any(rank["pid"] for rank in detail["ranks"])


def test_stop_ends_every_rank_and_the_job_says_so(place: Place) -> None:
    job = place.start(place.job("endless", "print", "ready", "hang"), *place.options(), env=place.env())
    place.await_line(job, "ready", count=4)
    assert place.ascendrun("stop", job).returncode == 0
    detail = place.show(job)
    assert detail["job"]["state"] == "STOPPED"
    assert [rank["stopped"] for rank in detail["ranks"]] == [True] * 4
    place.await_nobody(job)


def test_a_shell_has_the_environment_and_the_directory_of_its_rank_and_is_no_part_of_the_job(place: Place) -> None:
    job_file = place.job("endless", "print", "ready", "hang", more="env: {COLOUR: \"a 'b'\"}\n")
    job = place.start(job_file, *place.options(), env=place.env())
    place.await_line(job, "ready", count=4)
    script = "import json, os; print(json.dumps([dict(os.environ), os.getcwd()]))"
    done = place.ascendrun("shell", job, "--rank", 3, "--", "python3", "-c", script, env=place.env())
    assert done.returncode == 0, run_text(done)
    environ, directory = json.loads(done.stdout)
    assert (environ["RANK"], environ["WORLD_SIZE"], environ["COLOUR"]) == ("3", "4", "a 'b'")
    assert not {"ASCENDRUN_RUN_ID", "ASCENDRUN_METRICS_FILE"} & set(environ)
    assert directory == environ["PWD"] and directory.endswith("/work")
    assert place.ascendrun("shell", job, "--", "sh", "-c", "exit 7", env=place.env()).returncode == 7
    with place.ascendrun.pty("shell", job, "--rank", "1", env=place.env()) as terminal:
        terminal.sendline("echo rank=$RANK in $(basename $PWD); exit 5")
        terminal.expect("rank=1 in work")
        terminal.expect_exact(pexpect.EOF)
        terminal.close()
        assert terminal.exitstatus == 5
    assert place.ascendrun("shell", job, "--rank", 4, env=place.env()).returncode == 4
    assert place.ascendrun("stop", job, "--now").returncode == 0
    done = place.ascendrun("shell", job, "--rank", 3, env=place.env())
    assert done.returncode == 7 and done.stdout == "" and "rank 3" in done.stderr, run_text(done)


SERVER = """
import http.server, os, pathlib
kept = pathlib.Path("port-" + os.environ["RANK"])  # of the first attempt, in the directory of the job
class Echo(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if body == b"die":
            os._exit(3)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
port = int(kept.read_text()) if kept.exists() else 0
server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Echo)
kept.write_text(str(server.server_port))
print("serves", server.server_port, "end", flush=True)
server.serve_forever()
"""
CLIENT = """
import os, sys, threading, urllib.request
if sys.argv[2:]:
    urllib.request.urlopen(sys.argv[1], sys.argv[2].encode(), timeout=60)
def post(size):
    body = os.urandom(size)
    with urllib.request.urlopen(sys.argv[1], body, timeout=60) as reply:
        print(size, reply.read() == body, flush=True)
threads = [threading.Thread(target=post, args=(size,)) for size in (1, 100, 3_000_000)]
[one.start() for one in threads], [one.join() for one in threads]
"""


ANSWERS = ["1 True", "100 True", "3000000 True"]


def test_a_port_of_a_ranks_host_is_reached_from_this_machine_while_the_rank_runs_also_after_a_restart(
    place: Place,
) -> None:
    (place.folder / "code" / "serve.py").write_text(SERVER)
    job_file = place.job("serving", command=["python3", "serve.py"], more="restart: {max_restarts: 1}\n")
    job = place.start(job_file, *place.options(), env=place.env())
    place.await_line(job, "serves", count=4)
    printed = place.ascendrun("logs", job, "--rank", 3, env=place.env()).stdout
    remote = printed.partition("serves ")[2].split()[0]
    with place.ascendrun.pty("port", job, "--rank", "3", f"0:{remote}", env=place.env()) as terminal:
        terminal.expect(r"127\.0\.0\.1:(\d+) leads to")
        url = f"http://127.0.0.1:{int(terminal.match.group(1))}"

        def ask(*words: str) -> subprocess.CompletedProcess[str]:
            argv = place.head_argv([sys.executable, "-c", CLIENT, url, *words])
            return subprocess.run(argv, capture_output=True, text=True, timeout=120)

        def answers() -> bool:
            return sorted(ask().stdout.splitlines()) == ANSWERS

        first = ask()
        assert sorted(first.stdout.splitlines()) == ANSWERS, first.stderr
        assert ask("die").returncode != 0
        await_that(answers, "the rank of the second attempt answers")
        assert place.show(job)["job"]["attempt"] == 2
        terminal.sendintr()
        terminal.expect_exact(pexpect.EOF)
        terminal.close()
        assert terminal.exitstatus == 0
    assert place.ascendrun("stop", job, "--now").returncode == 0
    done = place.ascendrun("port", job, "--rank", 3, f"0:{remote}", env=place.env())
    assert done.returncode == 7 and "rank 3" in done.stderr, run_text(done)


def test_files_are_copied_both_ways_between_this_machine_a_job_and_hosts(place: Place) -> None:
    job = place.start(place.job("copied", "print", "ready", "hang"), *place.options(), env=place.env())
    place.await_line(job, "ready", count=4)

    def copy(*arguments: object) -> Any:
        return place.ascendrun("cp", *arguments, "-o", "json", env=place.env())

    (place.folder / "data/deep").mkdir(parents=True)
    (place.folder / "data/deep/a.csv").write_text("1")
    (place.folder / "data/b.bin").write_bytes(b"2" * 3_000_000)
    done = copy(place.folder / "data", f"{job}:in", "--rank", 3)
    assert done.returncode == 0, run_text(done)
    assert [(row["files"], row["done_bytes"]) for row in json.loads(done.stdout)["hosts"]] == [(2, 3_000_001)]
    for source, files in (("in/data", ["data/b.bin", "data/deep/a.csv"]), ("in/**/*.csv", ["data/deep/a.csv"])):
        back = place.folder / f"back-{len(files)}"
        done = copy(f"{job}:{source}", back, "--rank", 3)
        assert done.returncode == 0, run_text(done)
        assert sorted(str(path.relative_to(back)) for path in back.rglob("*") if path.is_file()) == files
    assert (place.folder / "back-2/data/b.bin").read_bytes() == b"2" * 3_000_000
    assert copy(f"{job}:in/data", place.folder, "--rank", 0).returncode == 4, "it is on the host of rank 3 only"
    if place.backend.get("engine") in WITHOUT_HOSTS:
        assert place.ascendrun("stop", job, "--now").returncode == 0
        return
    names = [line.split()[0] for line in place.backend["hosts"].splitlines()]
    far = f"/tmp/copied-{job}-{os.getpid()}"
    done = copy(place.folder / "data/b.bin", f"{','.join(names)}:{far}", "-H", place.folder / "hosts")
    assert done.returncode == 0 and len(json.loads(done.stdout)["hosts"]) == 2, run_text(done)
    done = copy(f"{','.join(names)}:{far}/*.bin", place.folder / "far", "-H", place.folder / "hosts")
    assert done.returncode == 0, run_text(done)
    assert sorted(path.parent.name for path in (place.folder / "far").glob("*/b.bin")) == sorted(names)
    place.ascendrun("exec", "-H", place.folder / "hosts", "--", "rm", "-r", far, env=place.env())
    assert place.ascendrun("stop", job, "--now").returncode == 0


@pytest.mark.parametrize("place", ["paramiko", "slurm", "kubernetes"], indirect=True)
def test_ranks_live_on_without_their_links_for_half_a_minute(place: Place) -> None:
    """Hosts are cut off. Links that are commands cannot be: they are killed, and fail for so long."""
    tools, command = place.folder / "tools", COMMANDS.get(place.backend.get("engine", ""))
    tools.mkdir()
    if command is not None:
        wrapper = tools / command.name
        wrapper.write_text(f'#!/bin/sh\n[ -e {tools}/cut ] && exit 1\nexec {command} "$@"\n')
        wrapper.chmod(0o755)
    env = {**place.env(), "PATH": f"{tools}:{os.environ['PATH']}"}
    job = place.start(place.job("cut", "print", "ready", *BEAT_ON), *place.options(), env=env)
    place.await_line(job, "ready", count=4)
    ranks = set(place.everywhere(job))
    assert len(ranks) >= 4
    if command is not None:
        (tools / "cut").touch()
        kill(place.links())
    else:
        place.set_cut(True)
    place.stays(job, "RUNNING", for_s=30.0)
    assert await_true(lambda: set(place.everywhere(job)) >= ranks, deadline_s=5.0), "no rank has noticed"
    (tools / "cut").unlink(missing_ok=True)
    if command is None:
        place.set_cut(False)
    place.enough()
    place.await_state(job, "SUCCEEDED")
    await_that(lambda: place.is_drained(job), "every byte is here")
    assert len(place.on_head(job, "rank-*.out.0")) == 4


@pytest.mark.parametrize("place", ["slurm-docker"], indirect=True)
@pytest.mark.parametrize("how", ["TERM", "KILL"])
def test_a_container_ends_with_its_allocation(place: Place, how: str) -> None:
    job = place.start(place.job("taken", "family", "print", "ready", "hang"), *place.options(), env=place.env())
    place.await_line(job, "ready", count=4)
    assert len(place.boxes()) == 2
    (allocation,) = slurm.allocations(place.cluster)
    argv = ["scancel", *(["--signal=KILL"] if how == "KILL" else []), allocation]
    place.cluster.head_run(argv, cwd="/", check=True)
    place.await_nobody(job)
    await_that(lambda: not place.boxes() and not place.holders(), "no container is left")
    place.await_state(job, "STOPPED", "FAILED")


def test_words_and_variables_reach_the_ranks_exactly(place: Place) -> None:
    odd = "a'; touch /tmp/pwn; echo $(id) `id` \\ \" * ~ \n second line 汉字"
    job_file = place.job("exact", "print", odd, "env", "ODD", more=f"env: {{ODD: {json.dumps(odd)}}}\n")
    done = place.submit(job_file)
    assert done.returncode == 0, run_text(done)
    for data in place.on_head("j-0001", "rank-*.out.0").values():
        assert data.decode() == f"{odd}\n{json.dumps({'ODD': odd})}\n"


def test_all_output_is_here_when_the_job_has_ended(place: Place) -> None:
    done = place.submit(place.job("talking", "meet", "beat", 1, "print", "the last word"))
    assert done.returncode == 0, run_text(done)
    await_that(lambda: place.is_drained("j-0001"), "every byte is here")
    files = place.on_head("j-0001", "rank-*.out.0")
    assert len(files) == 4 and all(data.endswith(b"the last word\n") for data in files.values())


def test_roles_are_one_gang_that_ends_with_its_work(place: Place) -> None:
    """One role finds the other by ASCENDRUN_ROLES, and the other is stopped when it has ended. Over ssh one of them
    has a container."""
    serve = (
        "import os, http.server as s; print('in a box:', os.path.exists('/.dockerenv'), flush=True); "
        "s.HTTPServer(('', 8123), s.SimpleHTTPRequestHandler).serve_forever()"
    )
    look = (
        "until (exec 3<>/dev/tcp/$(echo $ASCENDRUN_ROLES | cut -d'\"' -f4)/8123) 2>&-; do sleep 0.1; done; echo served"
    )
    roles = [
        {"name": "server", "command": ["python3", "-c", serve], "ends_job": False},
        {"name": "client", "command": ["bash", "-c", look]},
    ]
    is_mixed = place.backend.get("engine") == "site"
    if is_mixed:
        roles[0]["container"] = {"image": containers.IMAGE, "mounts": list(containers.MOUNTS)}
    job_file = place.job("gang", per_node=1, command=["x"])
    job_file.write_text(job_file.read_text().replace('command: ["x"]', f"roles: {json.dumps(roles)}"))
    done = place.ascendrun("submit", job_file, *place.options()[:2], env=place.env())
    assert done.returncode == 0, run_text(done)
    assert "[client/0] served" in done.stdout and ("in a box: True" in done.stdout or not is_mixed), done.stdout
    server, client = place.show("gang")["ranks"]
    assert (server["signal"], server["stopped"], client["exit_code"]) == (15, True, 0)
    place.await_nobody("gang")
    await_that(lambda: not place.boxes(), "no container is left")
