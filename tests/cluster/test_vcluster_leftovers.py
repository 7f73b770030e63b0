"""Nothing is left: the checks for leftovers are themselves checked, by planted ones."""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import leftovers
import pytest
from looks import DEADLINE_S, open_session, run_planted

from tests.lib.vcluster import state as states
from tests.lib.vcluster.cluster import clusters, sweep
from tests.lib.vcluster.processes import await_true, is_of_the_system

CODE = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("machine", ["node1", "head"])
def test_a_left_daemon_is_found_named_and_killed(cluster, machine):
    run = cluster.head_run if machine == "head" else lambda argv, **more: cluster.host_run(machine, argv, **more)
    run(["sh", "-c", "setsid sleep 4220 >/dev/null 2>&1 </dev/null &"], check=True)
    _await_alone(cluster, "sleep 4220")
    with pytest.raises(leftovers.LeftoversError, match=rf"(?s)1 processes are left.*{machine}:.*sleep 4220"):
        leftovers.require_none(cluster, deadline_s=1.0)
    assert await_true(lambda: not leftovers.strangers(cluster), deadline_s=DEADLINE_S)


def _await_alone(cluster, command):
    """Until nothing but `command` is left: the session that started it has gone, and it is what it will be."""

    def left():
        return [" ".join(one.argv) for processes in leftovers.strangers(cluster).values() for one in processes]

    assert await_true(lambda: left() == [command], deadline_s=DEADLINE_S), left()


def test_an_open_ssh_session_is_a_leftover_and_the_listening_sshd_is_none(cluster):
    assert leftovers.strangers(cluster) == {}
    assert len([one for one in cluster.processes("node1") if is_of_the_system(one)]) == 2
    with open_session(cluster, "node1") as session:
        assert set(leftovers.strangers(cluster)) == {"node1", "head"}
        session.kill()
    leftovers.require_none(cluster)


def test_the_fixture_itself_fails_a_test_that_leaves_a_daemon(tmp_path):
    text = (
        "import leftovers, pytest\n"
        "@pytest.fixture(scope='module', autouse=True)\n"
        "def hasty():\n"
        "    with pytest.MonkeyPatch.context() as patch:\n"
        "        patch.setattr(leftovers, 'SETTLE_S', 1.0)\n"
        "        yield\n"
        "def test_planted(cluster):\n"
        "    cluster.head_run(['ssh', 'node1', 'setsid sleep 4222 >/dev/null 2>&1 </dev/null &'], check=True)\n"
    )
    done = run_planted(tmp_path, text)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 passed, 1 error" in done.stdout and "sleep 4222" in done.stdout


@pytest.fixture
def hold():
    """hold(cluster): its namespaces, held until the test is over."""
    with ExitStack() as held:

        def hold(cluster):
            namespaces = leftovers.hold_namespaces(cluster)
            for descriptor in namespaces:
                held.callback(os.close, descriptor)
            return namespaces

        yield hold


def test_what_runs_in_namespaces_made_later_is_no_trace(cluster_of, hold):
    cluster = cluster_of(2)
    namespaces = hold(cluster)
    cluster.down()
    argv = ["unshare", "--pid", "--fork", "--kill-child", "sh", "-c", "echo up; exec cat"]
    with ExitStack() as later:
        for _ in range(64):
            other = later.enter_context(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            assert other.stdout.readline() == b"up\n"
            later.callback(other.kill)
        assert leftovers.traces([cluster.cluster_id], namespaces) == []


def test_down_takes_frozen_hosts_and_daemons_with_it_and_leaves_no_trace(cluster_of, hold):
    cluster = cluster_of(2)
    namespaces = hold(cluster)
    cluster.head_run(["sh", "-c", "setsid sleep 4223 >/dev/null 2>&1 </dev/null &"], check=True)
    cluster.delay("node2", 10)
    cluster.freeze("node1")
    assert leftovers.traces([cluster.cluster_id], namespaces), "the check sees a live cluster"
    cluster.down()
    cluster.down()
    assert await_true(lambda: not leftovers.traces([cluster.cluster_id], namespaces), deadline_s=DEADLINE_S)
    assert not cluster.folder.exists()


def test_a_cluster_whose_owner_was_killed_is_swept_and_others_stay(tmp_path, monkeypatch):
    monkeypatch.setenv(states.FOLDER_VARIABLE, str(tmp_path / "clusters"))
    maker = (
        "import os, signal; from tests.lib.vcluster.cluster import VirtualCluster\n"
        "kept, lost = VirtualCluster.up(1, is_kept=True), VirtualCluster.up(1)\n"
        "print(kept.cluster_id, lost.cluster_id, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    environ = {**os.environ, "PYTHONPATH": str(CODE)}
    made = subprocess.run([sys.executable, "-c", maker], env=environ, capture_output=True, text=True, timeout=60)
    kept, lost = made.stdout.split()
    base = tmp_path / "clusters"
    (base / "half-written").mkdir()
    try:
        assert sweep(base) == [lost]
        assert [cluster.cluster_id for cluster in clusters(base)] == [kept]
    finally:
        argv = [sys.executable, "-m", "tests.lib.vcluster", "down", "--all"]
        done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=60)
    assert kept in done.stderr and list(base.iterdir()) == []


def test_a_controller_that_its_command_cannot_end_is_ended_by_a_signal(cluster, ascendrun):
    with _false_controller(cluster, ascendrun.environ()) as ours:
        with _false_controller(cluster, {**ascendrun.environ(), "ASCENDRUN_STATE_DIR": "/elsewhere"}) as other:
            ascendrun.end_controller(cluster)
            assert ours.wait(DEADLINE_S) == 3
            assert other.poll() is None, "the controller of another state dir is not ours to end"
            other.kill()


def _false_controller(cluster, environ):
    """Something that looks like a controller from outside, and says 3 when SIGTERM ends it."""
    script = "import signal, sys; signal.signal(15, lambda *_: sys.exit(3)); print('up', flush=True); signal.pause()"
    argv = [sys.executable, "-c", script, "controller"]
    child = cluster.head_popen(argv, env=environ, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "up\n"
    return child
