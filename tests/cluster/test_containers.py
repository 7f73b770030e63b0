"""Jobs in real containers: a dockerd in each host of the virtual cluster, and podman next to it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import CODE, start_cluster
from leftovers import kill
from scenes import Scene, await_that, run_text

from tests.lib.vcluster import containers

ENDLESS = ("print", "ready", "hang")


@pytest.fixture(scope="module")
def module_cluster():
    with start_cluster(2, has_containers=True) as cluster:
        yield cluster


class BoxScene(Scene):
    """Jobs of the engines `docker` and `podman`."""

    def __init__(self, ascendrun: Any, cluster: Any) -> None:
        super().__init__(ascendrun, cluster)
        (self.folder / "hosts").write_text(cluster.hostfile(slots=2))
        site = {"type": "ssh", "hostfile": str(self.folder / "hosts")}
        engines = {name: containers.engine(site, name) for name in ("docker", "podman")}
        (self.folder / "ascendrun").mkdir()
        (self.folder / "ascendrun/config.yaml").write_text(json.dumps({"engines": engines}))
        self.env = {"XDG_CONFIG_HOME": str(self.folder)}

    def launch(self, name: str, *words: object, engine: str = "docker", more: str = "") -> str:
        return self.start(self.job(name, *words, more=more), "--engine", engine, env=self.env)

    def submit(self, *words: object, more: str = "") -> Any:
        return self.ascendrun("submit", self.job("asked", *words, more=more), "--engine", "docker", env=self.env)

    def codes_of_refusal(self, **options: Any) -> list[str]:
        done = self.submit("print", "x", **options)
        assert done.returncode == 1, run_text(done)
        return re.findall(r"\[([a-z-]+)\]", done.stderr)

    def kill_daemon(self, host: str) -> None:
        """The commands and the daemons of docker die; the shims of its containers live on."""
        names = ("docker", *containers.DAEMONS)
        while found := [one for one in self.cluster.processes(host) if one.argv and Path(one.argv[0]).name in names]:
            kill(found)

    def start_daemon(self, host: str) -> None:
        containers.start_daemon(self.cluster, host)
        containers.await_daemon(self.cluster, host)


@pytest.fixture
def scene(ascendrun, cluster):
    yield BoxScene(ascendrun, cluster)
    await_that(lambda: not containers.left(cluster), "no container is left")


def test_a_rank_killed_in_its_container_restarts_the_job_in_new_ones(scene: BoxScene) -> None:
    more = "restart: {max_restarts: 1, backoff_s: [0, 0], causes: [infra, unknown, user]}\n"
    job = scene.launch("again", *ENDLESS, more=more)
    scene.await_line(job, "ready", count=4)
    before = containers.left(scene.cluster)
    assert len(before) == 2 and {line.split()[0] for line in before} == set(scene.cluster.hosts)
    rank = next(rank for rank in scene.show(job)["ranks"] if rank["rank"] == 3)
    [process] = [one for one in scene.cluster.processes("node2") if one.inner_pid == rank["pid"]]
    assert "runc" not in str(process.argv) and process.environ["RANK"] == "3", "its pid is true outside"
    kill([process])
    await_that(lambda: scene.show(job)["job"]["attempt"] == 2, "there is a second attempt")
    scene.await_line(job, "ready", count=4)
    assert not set(before) & set(containers.left(scene.cluster))
    assert scene.ascendrun("stop", job).returncode == 0
    assert scene.state(job) == "STOPPED"


def test_what_is_wrong_with_a_runtime_or_an_image_is_a_finding_before_the_start(scene: BoxScene) -> None:
    cluster = scene.cluster
    assert "python-missing" in scene.codes_of_refusal(more="python: python3.99\n")
    newer = Path("/usr/bin/python3").read_bytes()
    version = max(re.findall(rb"\0GLIBC_2\.\d\d\0", newer))
    for host in cluster.hosts:
        path = Path(cluster.path(host, "/tmp/newer-python"))
        path.write_bytes(newer.replace(version, b"\0GLIBC_2.99\0"))
        path.chmod(0o755)
    codes = scene.codes_of_refusal(more="python: /tmp/newer-python\n")
    assert "glibc-too-old" in codes and "container-failed" not in codes
    assert "container-failed" in scene.codes_of_refusal(
        more=f"container: {{image: '{containers.IMAGE}', options: [--device=/dev/none]}}\n"
    )
    saved = containers.run(cluster, "node1", "docker", "save", containers.IMAGE, check=True).stdout
    containers.run(cluster, "node2", "docker", "rmi", containers.IMAGE, check=True)
    never = f"container: {{image: '{containers.IMAGE}', pull: never}}\n"
    assert scene.codes_of_refusal(more=never)[0] == "image-missing"
    assert scene.codes_of_refusal()[0] == "image-pull-failed"
    containers.run(
        cluster, "node2", "docker", "import", "-", containers.IMAGE, stdin=containers.image_tar(), check=True
    )
    assert scene.codes_of_refusal()[0] == "image-differs"
    containers.run(cluster, "node2", "docker", "load", stdin=saved, check=True)
    scene.kill_daemon("node2")
    assert scene.codes_of_refusal()[0] == "daemon-down"
    scene.start_daemon("node2")
    assert (
        "/dev/shm"
        in scene.submit(
            "print", "x", more="container: {image: 'IMAGE', shm_size: 1MiB}\n".replace("IMAGE", containers.IMAGE)
        ).stderr
    )


def test_a_job_whose_hosts_fetch_its_image_shows_how_far_they_are(scene: BoxScene) -> None:
    cluster, image = scene.cluster, "127.0.0.1:5000/site/slow:1"
    registry = f"exec python3 {CODE}/tests/cluster/registry.py /var/gate >/dev/null 2>&1"
    for host in cluster.hosts:
        containers.run(cluster, host, "setsid", "-f", "sh", "-c", registry, check=True)
    job = scene.launch("slow", "print", "ran", more=f"container: {{image: '{image}'}}\n")

    def reason() -> dict[str, Any]:
        waits = [event["values"]["reason"] for event in scene.show(job)["events"] if event["code"] == "waiting"]
        return waits[-1] if waits else {}

    wanted = {"image": image, "present": 2, "known": 4}
    await_that(lambda: reason().get("values") == wanted, lambda: f"{reason()}: each host has one layer of two")
    assert reason()["hosts"] == list(cluster.hosts) and scene.state(job) == "CHECKING"
    for host in cluster.hosts:
        Path(cluster.path(host, "/var/gate")).touch()
    scene.await_state(job, "SUCCEEDED")
    kill([one for host in cluster.hosts for one in cluster.processes(host) if "/var/gate" in one.argv])


def test_the_quick_start_of_the_page_runs_as_printed(scene: BoxScene) -> None:
    page = (CODE / "docs/containers.md").read_text(encoding="utf-8")
    settings, job = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (command,) = re.findall(r"^\$ ascendrun (.*)$", page, re.MULTILINE)
    for host in scene.cluster.hosts:
        containers.run(scene.cluster, host, "docker", "tag", containers.IMAGE, "quay.io/ascend/cann:8.3", check=True)
    mounts = json.dumps(containers.MOUNTS)  # what the image of the tests lacks
    (scene.folder / "ascendrun/config.yaml").write_text(settings.replace('["/data:/data:ro"]', mounts))
    (scene.folder / "ascendrun/lab.hosts").write_text((scene.folder / "hosts").read_text())
    (scene.folder / "job.yaml").write_text(job)
    planned = scene.ascendrun(*command.split(), "--dry-run", env=scene.env)
    assert "quay.io/ascend/cann:8.3" in planned.stdout and "container.image" in planned.stdout, run_text(planned)
    done = scene.ascendrun(*command.split(), env=scene.env)
    assert done.returncode == 0, run_text(done)
    said = b"".join(scene.on_head("j-0001", "rank-*.out.0").values())
    assert all(f"rank {rank} of 4\n".encode() in said for rank in range(4))


@pytest.mark.thorough
def test_files_belong_to_the_user_and_one_outside_the_group_of_docker_is_refused(ascendrun, cluster_of) -> None:
    cluster = cluster_of(2, has_containers=True, users={"ann": "bash"})
    scene = BoxScene(ascendrun.on(cluster), cluster)
    (scene.folder / "hosts").write_text(cluster.hostfile(slots=2, user="ann"))
    assert scene.codes_of_refusal()[0] == "runtime-refused"
    for host in cluster.hosts:
        containers.run(cluster, host, "chgrp", "ann", "/var/run/docker.sock", check=True)
    script = "import os; open('mine', 'w').close(); print('is', os.getuid(), os.environ['HOME'])"
    file = scene.job("mine", command=["python3", "-c", script])
    done = scene.ascendrun("submit", file, "--engine", "docker", env=scene.env)
    assert done.returncode == 0, run_text(done)
    (made, *_) = Path(cluster.path("node1", "/home/ann/.ascendrun")).glob("nodes/*/runs/*/work/mine")
    uid = made.stat().st_uid
    assert uid != 0 and f"is {uid} /tmp\n".encode() in b"".join(scene.on_head("j-0002", "rank-*.out.0").values())
