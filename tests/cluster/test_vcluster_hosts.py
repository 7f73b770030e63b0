"""What a host of the virtual cluster is: a machine of its own, seen from the head, its fellows and outside."""

import os
import signal
import subprocess
from pathlib import Path

import leftovers
import pexpect
import pytest
from looks import DEADLINE_S, SSH, find_processes, says, ssh
from pexpect import EOF

from tests.lib.vcluster.processes import await_true
from tests.lib.vcluster.spec import root_home


def test_each_host_has_a_name_an_address_and_identities_of_its_own(cluster):
    command = "hostname; cat /etc/machine-id /proc/sys/kernel/random/boot_id; ip -o -4 addr show eth0"
    first, second = (says(cluster, name, command).splitlines() for name in cluster.hosts)
    assert first[0] == "node1" and second[0] == "node2"
    assert cluster.address("node1") in first[3] and cluster.address("node2") in second[3]
    machine = Path("/etc/machine-id").read_text().strip() if Path("/etc/machine-id").exists() else ""
    assert len({first[1], second[1], machine}) == 3
    assert len({first[2], second[2], Path("/proc/sys/kernel/random/boot_id").read_text().strip()}) == 3


def test_what_a_host_writes_no_other_machine_sees(cluster):
    paths = ("/tmp/mark", "/root/mark", "/etc/mark", "/usr/local/bin/mark", "/dev/shm/mark", "/root/.ascendrun/mark")
    says(cluster, "node1", f"touch {' '.join(paths)}")
    for path in paths:
        assert cluster.path("node1", path).exists()
        assert not cluster.path("node2", path).exists()
        assert not os.path.exists(path)


def test_hosts_see_only_their_own_processes_and_are_seen_from_outside(cluster):
    with cluster.head_popen([*SSH, "node1", "exec sleep 4217"]) as session:
        assert await_true(lambda: find_processes(cluster, "node1", "sleep 4217"), deadline_s=DEADLINE_S)
        process = find_processes(cluster, "node1", "sleep 4217")[0]
        assert process.environ["SSH_CONNECTION"].startswith(cluster.address("head"))
        assert Path(f"/proc/{process.ppid}/cmdline").read_bytes().startswith(b"sshd: root")
        assert "4217" not in says(cluster, "node2", "ps -eo args")
        os.kill(process.pid, signal.SIGKILL)
        session.wait(DEADLINE_S)


def test_the_machine_gets_no_interface_route_or_mount(cluster):
    assert not [name for name in os.listdir("/sys/class/net") if leftovers.OUR_INTERFACE.match(name)]
    assert str(cluster.folder) not in Path("/proc/self/mountinfo").read_text()
    assert "4D0A" not in Path("/proc/net/route").read_text()  # 10.77 as the kernel writes it


def test_cpu_time_is_counted_for_head_and_hosts_apart(cluster):
    before = cluster.cpu_seconds("head"), cluster.cpu_seconds("hosts")
    burn = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done"
    says(cluster, "node1", burn)
    head, hosts = cluster.cpu_seconds("head") - before[0], cluster.cpu_seconds("hosts") - before[1]
    assert 0 < head < hosts


def test_login_shells_noise_accounts_and_sshd_options_are_as_asked(cluster_of):
    options = {"shells": {"node1": "sh", "node2": "bash"}, "rc_noise": {"node2": "it's Monday"}, "users": {"ann": "sh"}}
    cluster = cluster_of(2, sshd_options=["MaxSessions 1"], pythons={"node1": "/bin/echo"}, **options)
    assert says(cluster, "node1", "python3 is what was asked for") == "is what was asked for"
    assert says(cluster, "node1", "echo $0").endswith("sh") and "bash" not in says(cluster, "node1", "echo $0")
    assert says(cluster, "node2", "echo fine").splitlines() == ["it's Monday", "fine"]
    assert says(cluster, "ann@node1", "id -un; pwd").splitlines() == ["ann", "/home/ann"]
    assert "MaxSessions 1" in cluster.path("node1", "/etc/ssh/vcluster_sshd_config").read_text()


def test_an_untrusted_cluster_shows_keys_that_the_head_does_not_know(cluster_of):
    cluster = cluster_of(1, is_trusted=False)
    refused = ssh(cluster, "node1", "true", options=["-o", "StrictHostKeyChecking=yes"])
    assert refused.returncode == 255 and "Host key verification failed" in refused.stderr
    cluster.path("head", f"{root_home()}/.ssh/known_hosts").write_text(cluster.known_hosts())
    assert says(cluster, "node1", "hostname") == "node1"


def test_a_hostfile_lists_the_hosts_as_asked(cluster):
    assert cluster.hostfile() == "node1\nnode2\n"
    assert cluster.hostfile(slots=2, names=["node2"], user="ann") == "node2 slots=2 user=ann\n"


def test_a_shared_folder_is_the_same_on_every_host(cluster_of, tmp_path):
    cluster = cluster_of(2, shares={str(tmp_path): "/mnt/shared"})
    says(cluster, "node1", "echo hello > /mnt/shared/note")
    assert says(cluster, "node2", "cat /mnt/shared/note") == "hello"
    assert (tmp_path / "note").read_text() == "hello\n"


# -- running commands on it


def test_a_command_on_the_head_ends_as_it_ended_inside(cluster):
    assert cluster.head_run(["sh", "-c", "exit 7"]).returncode == 7
    assert cluster.head_run(["sh", "-c", "kill -SEGV $$"]).returncode == -signal.SIGSEGV
    assert cluster.head_run(["no-such-program"], stderr=subprocess.PIPE).returncode == 127


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_signal_to_a_command_reaches_it_in_the_namespaces(cluster, number):
    with cluster.head_popen(["sleep", "4218"]) as child:
        assert await_true(lambda: find_processes(cluster, "head", "sleep 4218"), deadline_s=DEADLINE_S)
        child.send_signal(number)
        assert child.wait(DEADLINE_S) == -number
    assert await_true(lambda: not find_processes(cluster, "head", "sleep 4218"), deadline_s=DEADLINE_S)


def test_a_terminal_reaches_the_command_and_its_interrupt_once(cluster):
    # `read -t`: an interrupt that comes just before a read begins would else be told after the next line only
    script = "trap 'echo caught' INT; test -t 0 && echo ready; i=0; while [ $i -lt 3 ]; do read -t 1 i || i=0; done"
    argv = cluster.head_argv(["bash", "-c", script])
    child = pexpect.spawn(argv[0], argv[1:], encoding="utf-8", timeout=DEADLINE_S)
    child.expect("ready")
    child.sendintr()
    child.expect("caught")
    child.sendline("3")
    child.expect(EOF)
    assert "caught" not in child.before
    child.close()
    assert child.exitstatus == 0
