"""The virtual cluster as a whole: its command, ascendrun on its head, machines that cannot carry it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from looks import SILENCE_S, dial, run_planted, says
from pexpect import EOF

from tests.lib.vcluster import network
from tests.lib.vcluster import state as states
from tests.lib.vcluster.cluster import VirtualCluster
from tests.lib.vcluster.machines import BootError
from tests.lib.vcluster.requirements import requirements

CODE = Path(__file__).resolve().parents[2]


def test_ascendrun_runs_on_the_head_with_and_without_a_terminal(ascendrun):
    plain = ascendrun("--version")
    assert plain.returncode == 0 and "ascendrun" in plain.stdout
    terminal = ascendrun.pty("--version")
    terminal.expect("ascendrun")
    terminal.expect(EOF)
    terminal.close()
    assert terminal.exitstatus == 0
    with ascendrun.popen("--version", stdout=subprocess.PIPE, text=True) as child:
        assert child.communicate()[0] == plain.stdout


def test_the_command_boots_runs_breaks_and_takes_down(tmp_path):
    environ = {**os.environ, states.FOLDER_VARIABLE: str(tmp_path / "clusters")}

    def vcluster(*arguments):
        argv = [str(CODE / "bin" / "vcluster"), *arguments]
        return subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=200)

    assert "no virtual cluster is up" in vcluster("list", "x").stderr + vcluster("exec", "head", "true").stderr
    try:
        assert vcluster("up", "2").returncode == 0
        assert vcluster("exec", "head", "--", "ssh", "node1", "hostname").stdout == "node1\n"
        assert vcluster("exec", "node2", "sh", "-c", "hostname; exit 3").returncode == 3
        assert vcluster("kill", "node2").returncode == 0
        assert "node2      off" in vcluster("list").stdout
        assert vcluster("hostfile").stdout == "node1\nnode2\n"
        assert vcluster("cut", "node9").returncode == 2
    finally:
        assert vcluster("down").returncode == 0
    assert vcluster("list").stdout == ""


def test_what_is_missing_is_said_with_its_way_out(tmp_path):
    assert requirements() == []
    script = (
        "import os; from tests.lib.vcluster.cluster import VirtualCluster\n"
        "from tests.lib.vcluster.requirements import NotSupportedError\n"
        "os.setuid(65534)\n"
        "try: VirtualCluster.up(1)\n"
        "except NotSupportedError as refused: print(refused.message, '|', refused.hint)\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(CODE), "PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=200)
    assert "missing: ssh, ip, nsenter, root" in done.stdout, done.stderr
    assert "apt-get install -y iproute2 openssh-client util-linux; run it with sudo" in done.stdout


@pytest.mark.parametrize(("ci", "outcome"), [("true", "1 error"), ("", "1 skipped")])
def test_a_machine_that_cannot_carry_a_cluster_fails_ci_and_else_skips_with_the_reason(tmp_path, ci, outcome):
    text = "def test_planted(cluster):\n    pass\n"
    done = run_planted(tmp_path, text, PATH=str(tmp_path), CI=ci)
    assert outcome in done.stdout, done.stdout + done.stderr
    assert "missing: ssh, ip, nsenter; apt-get install -y iproute2 openssh-client util-linux" in done.stdout


def test_a_name_that_no_host_has_is_refused_before_anything_starts():
    with pytest.raises(ValueError, match="node7: unknown host; expected node1 to node2"):
        VirtualCluster.up(2, shells={"node7": "sh"})


def test_two_clusters_at_once_do_not_meet(cluster, cluster_of):
    other = cluster_of(1)
    assert other.address("node1") == cluster.address("node1")
    assert says(other, "node1", "cat /proc/sys/kernel/random/boot_id") != says(
        cluster, "node1", "cat /proc/sys/kernel/random/boot_id"
    )
    other.cut("node1")
    assert dial(other, "node1", patience_s=SILENCE_S) == "no answer" and dial(cluster, "node1") == "SSH-"


def test_a_disk_that_the_machine_mounts_below_its_root_is_on_every_host_too_and_private_there():
    script = (
        "from tests.lib.vcluster.cluster import VirtualCluster\n"
        "with VirtualCluster.up(1) as cluster:\n"
        "    cluster.host_run('node1', ['sh', '-c', 'ls /srv && touch /srv/more && ls /srv/more'], check=True)\n"
    )
    done = _run_mounted(f"{CODE}/tests/lib /srv", script)
    assert done.returncode == 0, done.stderr
    assert "vcluster" in done.stdout.split() and "/srv/more" in done.stdout.split()
    assert not (CODE / "tests/lib/more").exists()


def test_an_sshd_that_ends_is_told_at_once_with_its_last_line():
    with pytest.raises(BootError, match="sshd ended: node1: .*bad configuration options"):
        VirtualCluster.up(1, sshd_options=["Nonsense yes"])


def test_a_null_device_that_is_a_file_is_named_before_anything_starts(tmp_path):
    script = "from tests.lib.vcluster.requirements import requirements; print(*requirements())"
    (tmp_path / "null").touch()
    done = _run_mounted(f"{tmp_path}/null /dev/null", script)
    assert "/dev/null as a device" in done.stdout, done.stderr


def _run_mounted(mount, script):
    """The script where something is mounted over something else."""
    argv = ["unshare", "--mount", "sh", "-c", f'mount --bind {mount} && {sys.executable} -c "$SCRIPT"']
    environ = {**os.environ, "PYTHONPATH": str(CODE), "SCRIPT": script}
    return subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize(
    ("hosts", "before", "after"),
    [
        (8, [128, 512, 1024], [128, 512, 1024]),
        (256, [128, 512, 1024], [16384, 16384, 16384]),
        (256, [1, 2, 99999], [16384, 16384, 99999]),
    ],
)
def test_many_hosts_raise_the_limits_of_the_table_of_neighbours(tmp_path, hosts, before, after):
    paths = [tmp_path / f"gc_thresh{number}" for number in (1, 2, 3)]
    for path, value in zip(paths, before):
        path.write_text(f"{value}\n")
    network.admit_neighbours(hosts, tmp_path)
    assert [int(path.read_text()) for path in paths] == after
