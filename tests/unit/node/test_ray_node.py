"""A node of a Ray cluster: the logs of its workers, and what it and the head agree on."""

import shutil
import subprocess
from pathlib import Path

import pytest

from ascendrun.ascend.containers import RAY_NAMES
from ascendrun.core.jobfile import launchers
from ascendrun.health.diagnosis.lines.exits import RAY_ENDS
from ascendrun.node import join, layout, ray_node
from tests.lib.launch_plans import job, plan

WORKER = "worker-abfdbcbddba99470ec2886fe9e7b7d04de2eb45328cd0445609a4543-01000000-{pid}.{stream}"


def test_lines_of_workers_are_printed_with_their_source_byte_for_byte(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    logs = ray_node.WorkerLogs(str(tmp_path / "logs"))
    logs.print_new()  # there is no directory yet
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "raylet.out").write_bytes(b"thousands of lines\n")
    (tmp_path / "logs" / "raylet.err").write_bytes(b"SIGSEGV\n")
    with open(tmp_path / "logs" / WORKER.format(pid=7, stream="out"), "wb", buffering=0) as out:
        out.write(b":job_id:01\none\r\n\xff\0 two\npar")
        (tmp_path / "logs" / WORKER.format(pid=8, stream="err")).write_bytes(b"failed")
        logs.print_new()
        out.write(b"t\n" + b"x" * (ray_node.LINE_BYTES + 5))
        logs.print_new(last=True)
    seen, errors = capfdbinary.readouterr()
    source = b"(worker abfdbcbd, pid 7) "
    expected = [b"one\r", b"\xff\0 two", b"part", b"x" * ray_node.LINE_BYTES, b"x" * 5]
    assert seen == b"".join(source + line + b"\n" for line in expected)
    assert errors == b"(ray) SIGSEGV\n(worker abfdbcbd, pid 8) failed\n"


def test_a_worker_that_has_the_name_of_its_raylet_is_not_watched(tmp_path: Path) -> None:
    shutil.copy(shutil.which("bash") or "", tmp_path / "raylet")
    fork = "(echo forked; read -r _; true); true"  # a subshell, which has the name of its parent
    argv = [tmp_path / "raylet", "-c", fork]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as raylet:
        assert raylet.stdin is not None and raylet.stdout is not None
        assert raylet.stdout.readline() == b"forked\n"
        node = ray_node.RayNode.__new__(ray_node.RayNode)
        node._watched = {}
        assert node._has_started() and node._watched["raylet"][0] == raylet.pid
        raylet.stdin.close()


def test_the_head_knows_the_exit_codes_and_the_token() -> None:
    codes = (ray_node.GCS_DIED, ray_node.RAYLET_DIED, ray_node.RAY_ENDED, ray_node.RAY_LATE)
    assert tuple(RAY_ENDS) == codes
    assert launchers.AGENT_TOKEN == join.AGENT_TOKEN


def test_the_directory_of_a_cluster_leaves_room_for_the_sockets_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 2**32 - 1)
    folder = layout.short_dir(layout.attempt_dir("/home/someone/.ascendrun", "f00-j-0001.12"))
    session = "/session_2026-11-24_18-14-51_542269_4194304/sockets/plasma_store.9"
    assert len(folder) == 38 and len(folder + session) <= 107


def test_the_first_node_has_the_command_and_the_others_serve() -> None:
    spec = job(launcher="ray", devices={"type": "npu", "per_node": 2}, env={"NNODES": "own"})
    made = plan(spec, "a slots=2\nb slots=2\nc slots=2\n", ray_names=RAY_NAMES)
    assert [node.ends_job for node in made.nodes] == [True, False, False]
    assert [[rank.rank for rank in node.ranks] for node in made.nodes] == [[0], [], []] and made.world_size == 1
    first, second, _ = (node.launcher for node in made.nodes)
    assert first is not None and second is not None
    assert (first.command, second.command) == (("python", "train.py"), ())
    assert second.plain[:2] == ("ray", "start") and "--head" not in second.plain and "--head" in first.plain[2]
    assert first.env["RAY_ADDRESS"].startswith(f"{made.master_address}:") and first.env["NNODES"] == "own"
    assert first.env["ASCEND_RT_VISIBLE_DEVICES"] == "0,1" and '"NPU": 2' in " ".join(first.argv)
    assert not any(name.startswith("RAY_EXPERIMENTAL") for name in first.env)  # each worker sees its own devices
