"""doctor over real sshd: what is planted on a host is found there, and the gate lets nothing unfit start."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Callable

import pytest
from scenes import Scene, run_text

Ascendrun = Any
CLOCK_S = 120.0


def other_python() -> str:
    """An interpreter of another minor version than this one."""
    folder = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    ours = "%d.%d." % sys.version_info[:2]
    found = [path for path in sorted(folder.glob("3.*/bin/python")) if not path.parents[1].name.startswith(ours)]
    if not found:
        pytest.skip("no second Python at hand (pyenv)")
    return str(found[-1])


def examine(ascendrun: Ascendrun, *arguments: object, code: int | None = None) -> dict[str, list[dict[str, Any]]]:
    """The findings of a doctor run by code."""
    done = ascendrun("doctor", *arguments, "-o", "json", "--lang", "en")
    assert done.stdout, run_text(done)
    assert code is None or done.returncode == code, run_text(done)
    found: dict[str, list[dict[str, Any]]] = {}
    for finding in json.loads(done.stdout)["findings"]:
        found.setdefault(finding["code"], []).append(finding)
    return found


def hosts_of(found: dict[str, list[dict[str, Any]]], code: str) -> list[str]:
    return sorted(host for finding in found.get(code, []) for host in finding["hosts"])


def hostfile(scene: Scene) -> Path:
    path: Path = scene.folder / "all.hosts"
    path.write_text(scene.cluster.hostfile(slots=2))
    return path


# --- healthy ---


def test_a_healthy_pair_is_fit_and_shown_on_one_screen_in_both_languages(scene: Scene) -> None:
    hosts = hostfile(scene)
    done = scene.ascendrun("doctor", "-H", hosts, "--lang", "en", code=0)
    assert "FAIL" not in done.stdout and "WARN" not in done.stdout
    assert "2 hosts" in done.stdout and len(done.stdout.splitlines()) < 40
    assert "effective training time" not in done.stdout
    chinese = scene.ascendrun("doctor", "-H", hosts, "--quick", "--forecast", env={"LC_ALL": "zh_CN.UTF-8"})
    assert chinese.returncode == 0 and "2 个节点" in chinese.stdout and "有效训练" in chinese.stdout


# --- planted faults ---


def test_each_planted_fault_is_found_on_its_host_and_nowhere_else(scene_of: Callable[..., Scene]) -> None:
    scene = scene_of(7, pythons={"node6": other_python()}, rc_noise={"node3": "Welcome to node3"})
    cluster, on, hosts = scene.cluster, scene.ascendrun, hostfile(scene)
    for host in cluster.hosts:
        data = cluster.path(host, "/data/train")
        data.mkdir(parents=True)
        (data / "part-0").write_bytes(b"x" * (500 if host == "node7" else 1000))
    assert on("nodes", "-H", hosts).returncode == 0  # the agents are there: the full disk below has no room for one
    cluster.fill("node2")
    rc = cluster.path("node4", "/root/.bashrc")
    rc.write_text("sleep 3\n" + (rc.read_text() if rc.exists() else ""))
    cluster.sshd_options("node5", ("MaxStartups 2:50:10", "MaxSessions 1"))
    (cluster.path("node3", "/data/train/part-0")).unlink()
    cluster.path("node3", "/data/train").rmdir()
    cluster.clock("node7", CLOCK_S)
    cluster.isolate("node6", "node7")  # the head sees both
    on.end_controller(cluster)  # new logins: they read the startup files
    found = examine(on, "-H", hosts, "--check-path", "/data/train", "--quick", code=3)
    assert hosts_of(found, "disk-full") == ["node2"]
    assert hosts_of(found, "login-noise") == ["node3"]
    assert hosts_of(found, "path-not-found") == ["node3"]
    slow = {host: float(one["values"]["seconds"]) for one in found["login-slow"] for host in one["hosts"]}
    assert max(slow, key=slow.__getitem__) == "node4", slow  # a busy machine lets the others wait as well
    assert hosts_of(found, "sshd-startups") == hosts_of(found, "sshd-sessions") == ["node5"]
    assert hosts_of(found, "python-differs") == ["node6"]
    assert hosts_of(found, "path-differs") == hosts_of(found, "clock-skew") == ["node7"]
    assert abs(float(found["clock-skew"][0]["values"]["seconds"]) - CLOCK_S) < 5
    assert {one["severity"] for one in found["clock-skew"]} == {"WARN"}
    told = {(finding["nodes"], finding["values"]["peers"][0]) for finding in found["peer-timeout"]}
    assert told == {("node6", "node7"), ("node7", "node6")}
    assert set(found) <= {
        "disk-full",
        "login-noise",
        "path-not-found",
        "login-slow",
        "sshd-startups",
        "sshd-sessions",
        "python-differs",
        "path-differs",
        "package-differs",
        "clock-skew",
        "peer-timeout",
    }, found


# --- as a job would find it ---


def test_a_job_is_examined_in_its_own_shell(scene: Scene) -> None:
    more = "setup: export HCCL_CONNECT_TIMEOUT=600; test $(hostname) = node1\nenv: {GLOO_SOCKET_IFNAME: eth77}\n"
    found = examine(scene.ascendrun, scene.job("shell", "print", "x", more=more), "--quick", code=3)
    assert hosts_of(found, "setup-failed") == ["node2"]
    assert "node1" in hosts_of(found, "interface-missing")


def test_torch_is_imported_by_the_full_look_only(scene: Scene) -> None:
    job_file = scene.job("torchless", "print", "x")
    assert "torch-import" not in examine(scene.ascendrun, job_file, "--quick", code=0)
    assert hosts_of(examine(scene.ascendrun, job_file, code=3), "torch-import") == ["node1", "node2"]


# --- the gate ---


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("setup: test $(hostname) = node1\n", ["[setup-failed]", "node2", "bash -c"]),
        ("checks: {require: [torch]}\n", ["[torch-import]"]),
    ],
)
def test_what_is_not_fit_is_not_started_and_the_reason_has_code_nodes_and_way_out(
    scene: Scene, more: str, words: list[str]
) -> None:
    done = scene.ascendrun("submit", scene.job("unfit", "touch", "/tmp/started", more=more))
    assert done.returncode == 1 and all(word in done.stderr for word in words), run_text(done)
    assert not any(scene.cluster.path(host, "/tmp/started").exists() for host in scene.cluster.hosts)


def test_hosts_that_do_not_reach_each_other_start_nothing_instead_of_waiting_for_a_time_out(scene: Scene) -> None:
    scene.cluster.isolate("node1", "node2")
    done = scene.ascendrun("submit", scene.job("parted", "touch", "/tmp/started"))
    assert done.returncode == 1 and "[peer-timeout]" in done.stderr, run_text(done)
    assert not any(scene.cluster.path(host, "/tmp/started").exists() for host in scene.cluster.hosts)


def test_the_gates_shell_has_the_jobs_secrets_and_no_word_of_them_is_kept(scene: Scene) -> None:
    (scene.folder / "secrets.env").write_text("HF_TOKEN=hunter2hunter2\n")
    more = "env_file: [secrets.env]\nsetup: %s\n"
    scene.ascendrun("submit", scene.job("secret", "print", "x", more=more % 'test -n "$HF_TOKEN"'), code=0)
    leaky = scene.ascendrun("submit", scene.job("leaky", "print", "x", more=more % "echo $HF_TOKEN >&2; false"))
    assert leaky.returncode == 1 and "(secret)" in leaky.stderr, run_text(leaky)
    shown = scene.ascendrun("env", scene.job("shown", "print", "x", more=more % "export X=1"))
    assert "HF_TOKEN=(secret" in shown.stdout, run_text(shown)
    kept = b"".join(path.read_bytes() for path in scene.ascendrun.state_dir.rglob("*") if path.is_file())
    assert b"hunter2" not in kept and b"hunter2" not in (leaky.stderr + leaky.stdout + shown.stdout).encode()


def test_a_warning_stands_in_the_jobs_story_and_the_job_runs(scene: Scene) -> None:
    job = scene.start(scene.job("warned", "print", "x", more="env: {OMP_NUM_THREADS: 4000}\n"))
    scene.await_state(job, "SUCCEEDED")
    assert any("[threads-many]" in event["message"] for event in scene.show(job)["events"])


# --- env ---


def test_env_shows_what_a_rank_sees_and_keeps_secrets(scene: Scene) -> None:
    scene.cluster.path("node2", "/root/.bashrc").write_text("export ONLY_HERE=1\nexport HF_TOKEN=hunter2\n")
    try:
        more = "setup: export FROM_SETUP=$(hostname)\nenv: {OF_THE_JOB: same}\n"
        done = scene.ascendrun("env", scene.job("seen", "print", "x", more=more), "-o", "json")
        assert done.returncode == 0 and "hunter2" not in done.stdout, run_text(done)
        rows = {row["name"]: row["groups"] for row in json.loads(done.stdout)["rows"]}
        assert rows["OF_THE_JOB"] == [{"value": "same", "hosts": ["node1", "node2"]}]
        assert {group["value"] for group in rows["FROM_SETUP"]} == {"node1", "node2"}
        assert rows["WORLD_SIZE"][0]["value"] == "4" and "ASCENDRUN_EXEC" not in rows
        diff = scene.ascendrun("env", scene.job("diff", "print", "x", more=more), "--diff")
        assert "FROM_SETUP" in diff.stdout and "OF_THE_JOB" not in diff.stdout
        written = scene.ascendrun("env", scene.job("write", "print", "x", more=more), "--write", "-")
        assert "export OF_THE_JOB=same" in written.stdout and "ASCENDRUN_RUN_ID" not in written.stdout
    finally:
        scene.cluster.path("node2", "/root/.bashrc").unlink()
