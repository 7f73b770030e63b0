"""The commands that start containers: one golden file, by runtime, user and devices; and what runtimes write."""

from __future__ import annotations

import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ascendrun.ascend.containers import with_npus
from ascendrun.node import layout
from ascendrun.node.agent import containers
from tests.lib.vcluster.processes import await_true

GOLDEN = Path(__file__).with_name("container_commands.txt")
BOX = {
    "image": "site/cann:8.3",
    "runtime": "docker",
    "mounts": ["/data:/data:ro"],
    "shm_size": None,
    "options": ["--cap-add=SYS_PTRACE"],
    "python": "python3",
    "devices": None,
    "paths": ["/ckpt/a b"],
}
NPUS = {"type": "npu", "ids": [2, 3]}
VENDOR = with_npus({**BOX, "devices": NPUS})["vendor"]
ROOT = containers.Node(0, 0, (), "root", frozenset({containers.MACHINE_ID}))
USER = containers.Node(1000, 1000, (1001, 1002), "ann", frozenset({containers.MACHINE_ID, *VENDOR["files"]}))
ASCEND = USER._replace(files=USER.files | {VENDOR["runtime"]["path"]})
CASES = {
    "docker, root, no devices": (BOX, ROOT),
    "docker, a user with NPUs": ({**BOX, "devices": NPUS, "shm_size": "64GiB"}, USER),
    "docker, the runtime of Ascend": ({**BOX, "devices": NPUS}, ASCEND),
    "docker, GPUs": ({**BOX, "devices": {**NPUS, "type": "cuda"}}, USER),
    "podman, rootless with NPUs": ({**BOX, "runtime": "podman", "devices": NPUS}, ASCEND),
    "podman, root, no machine id": ({**BOX, "runtime": "podman"}, ROOT._replace(files=frozenset())),
    "apptainer, a user with NPUs": ({**BOX, "runtime": "apptainer", "image": "cann.sif", "devices": NPUS}, USER),
}


def test_the_command_of_each_runtime_is_as_reviewed(update_golden: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getuid", lambda: 0)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    found = "".join(
        f"# {name}\n{shlex.join(containers.run_argv(box, node, ['-I', 'a.pyz'], root='/r', name='n', tag='t.1'))}\n"
        for name, (box, node) in ((name, (with_npus(box), node)) for name, (box, node) in CASES.items())
    )
    if update_golden:
        GOLDEN.write_text(found, encoding="utf-8")
    assert found == GOLDEN.read_text(encoding="utf-8")


def test_two_nodes_of_one_machine_name_their_containers_differently() -> None:
    names = {containers.container_name(root, "h-j-0001.1") for root in ("/a", "/b")}
    assert len(names) == 2 and all(name.startswith("ascendrun-h-j-0001.1-") for name in names)
    assert all(len(f"/tmp/ascendrun-hold-{2**31}/{name}") < 108 for name in names), "the path of a socket"
    assert layout.split_tag("h-j-0001.1")


@pytest.mark.parametrize(
    ("code", "text", "problem"),
    [
        (None, "[Errno 2] No such file or directory: 'docker'", "runtime-missing"),
        (1, "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is it up?", "daemon-down"),
        (1, "permission denied while trying to connect to the Docker daemon socket", "runtime-refused"),
        (1, "Error: No such image: a", "image-missing"),
        (125, "Error: inspecting object: a: image not known", "image-missing"),
        (125, "something else", "container-failed"),
    ],
)
def test_what_a_runtime_writes_is_a_finding(code: int | None, text: str, problem: str) -> None:
    assert containers.problem(code, text)["problem"] == problem


def test_a_pull_counts_its_layers_and_ends_at_its_deadline(tmp_path: Path) -> None:
    runtime = tmp_path / "docker"
    seen = "a1: Pulling fs layer\nb2: Pulling fs layer\nc3: Already exists\na1: Pull complete\n"
    runtime.write_text(f"#!/bin/sh\nprintf '{seen}'; [ $2 = whole ] || exec sleep 60\n")
    runtime.chmod(0o755)
    assert containers.pull(str(runtime), "whole", 60.0) == (0, seen) and containers.pulls() == {"pulls": {}}
    with ThreadPoolExecutor(1) as pool:
        stuck = pool.submit(containers.pull, str(runtime), "stuck", 3.0)
        assert await_true(lambda: containers.pulls()["pulls"] == {"stuck": [2, 3]}, deadline_s=3.0)
        assert stuck.result()[0] is None
    assert containers.pulls() == {"pulls": {}}
