"""The virtual cluster's faults, each shown by its effect, and by its end."""

import errno
import os
import sys

import pytest
from looks import DEADLINE_S, SILENCE_S, dial, open_session, says, ssh

from tests.lib.vcluster.machines import HostDownError
from tests.lib.vcluster.processes import await_true


def test_cut_ssh_times_out_and_heal_brings_the_host_back(cluster):
    cluster.cut("node1")
    cluster.cut("node1")
    assert dial(cluster, "node1", patience_s=SILENCE_S) == "no answer"
    assert dial(cluster, "node2") == "SSH-"
    cluster.heal("node1")
    cluster.heal("node1")
    assert dial(cluster, "node1") == "SSH-"


def test_a_reboot_gives_a_new_boot_id_to_the_same_machine_and_may_keep_the_disk_also_after_a_crash(cluster):
    look = "cat /proc/sys/kernel/random/boot_id; cat /root/mark; ls /run/mark /dev/shm/mark; ps -e | wc -l"
    says(cluster, "node1", "echo kept > /root/mark; touch /run/mark /dev/shm/mark; mount --bind /run/mark /run/mark")
    boots = {says(cluster, "node1", "cat /proc/sys/kernel/random/boot_id")}
    machine = says(cluster, "node1", "cat /etc/machine-id")
    for take_down in (cluster.freeze, cluster.crash):
        take_down("node1")
        cluster.reboot("node1", keep_disk=True)
        after = ssh(cluster, "node1", look)
        assert after.stdout.splitlines()[1] == "kept"
        assert after.stderr.count("No such file") == 2
        boots.add(after.stdout.splitlines()[0])
    assert len(boots) == 3
    cluster.reboot("node1")
    after = ssh(cluster, "node1", "cat /etc/machine-id /root/mark")
    assert after.stdout.strip() == machine and "/root/mark: No such file" in after.stderr


def test_kill_the_peer_sees_the_connection_closed_at_once(cluster):
    with open_session(cluster, "node1") as session:
        cluster.kill("node1")
        cluster.kill("node1")
        assert session.wait(DEADLINE_S) == 255
    assert not cluster.is_up("node1") and cluster.processes("node1") == []
    with pytest.raises(HostDownError):
        cluster.host_run("node1", ["true"])


def test_crash_the_peer_sees_silence_until_its_own_keepalive(cluster):
    options = ["-o", "ServerAliveInterval=1", "-o", "ServerAliveCountMax=2"]
    with open_session(cluster, "node1", options) as session, open_session(cluster, "node1") as trusting:
        cluster.crash("node1")
        assert session.wait(DEADLINE_S) == 255
        assert trusting.poll() is None, "without keepalive nobody can know"
        trusting.kill()


def test_clean_undoes_everything_and_boots_what_was_off(cluster):
    cluster.crash("node1")
    cluster.freeze("node2")
    cluster.block("node2", "head")
    cluster.fill("node2")
    cluster.loss("node2", 50)
    cluster.clean()
    cluster.clean()
    for name in cluster.hosts:
        assert says(cluster, name, "echo x > /root/x && hostname") == name
    assert cluster._state.faults.get("node1", []) == [] and cluster._state.faults.get("node2", []) == []


def test_loss_of_everything_is_silence_and_of_a_little_is_survived(cluster):
    cluster.loss("node1", 100)
    assert dial(cluster, "node1", patience_s=SILENCE_S) == "no answer"
    cluster.loss("node1", 5)
    assert says(cluster, "node1", "head -c 300000 /dev/zero | wc -c") == "300000"
    cluster.loss("node1", 0)
    assert says(cluster, "node1", "hostname") == "node1"


def test_delay_makes_a_round_trip_twice_as_long(cluster):
    cluster.delay("node1", 100)
    delayed_s = _round_trip_s(cluster, "node1")
    assert delayed_s >= 0.2
    assert await_true(lambda: _round_trip_s(cluster, "node2") < delayed_s / 2, deadline_s=DEADLINE_S)
    assert says(cluster, "node1", "head -c 3000000 /dev/zero | wc -c; head -c 3000000 /dev/zero").startswith("3000000")
    cluster.delay("node1", 0)
    assert await_true(lambda: _round_trip_s(cluster, "node1") < delayed_s / 2, deadline_s=DEADLINE_S)


ROUND_TRIP = """
import socket, sys, time
best = 9.0
for _ in range(5):
    began = time.monotonic()
    socket.create_connection((sys.argv[1], 22), 5).close()
    best = min(best, time.monotonic() - began)
print(best)
"""


def _round_trip_s(cluster, name):
    argv = [sys.executable, "-c", ROUND_TRIP, cluster.address(name)]
    return float(cluster.head_run(argv, capture_output=True, text=True, check=True).stdout)


def test_block_is_one_way_and_stops_a_live_connection(cluster):
    options = ["-o", "ServerAliveInterval=1", "-o", "ServerAliveCountMax=2"]
    with open_session(cluster, "node1", options) as session:
        cluster.block("node1", "head")
        assert session.wait(DEADLINE_S) == 255
    received = "awk '/^Ip: [0-9]/ {print $4}' /proc/net/snmp"  # packets that came in
    before = int(cluster.host_run("node1", ["sh", "-c", received], capture_output=True, text=True).stdout)
    assert dial(cluster, "node1", patience_s=SILENCE_S) == "no answer"
    after = int(cluster.host_run("node1", ["sh", "-c", received], capture_output=True, text=True).stdout)
    assert after > before, "the other way is open"
    assert says(cluster, "node2", "hostname", via="node1") == "node2"
    cluster.unblock("node1")
    assert dial(cluster, "node1") == "SSH-"


def test_sshd_stop_refuses_newcomers_and_keeps_sessions(cluster):
    with open_session(cluster, "node1") as session:
        cluster.sshd_stop("node1")
        cluster.sshd_stop("node1")
        assert dial(cluster, "node1") == os.strerror(errno.ECONNREFUSED)
        assert session.poll() is None
        cluster.sshd_start("node1")
        cluster.sshd_start("node1")
        assert dial(cluster, "node1") == "SSH-"
        cluster.sshd_restart("node1")
        assert session.poll() is None
        session.stdin.close()
        assert session.wait(DEADLINE_S) == 0
