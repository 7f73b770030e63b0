"""The virtual cluster itself: each fault is shown by its effect, and the checks for leftovers by planted ones."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import leftovers
import pexpect
import pytest
from pexpect import EOF

from ascendrun.sim.vcluster import state as states
from ascendrun.sim.vcluster.cluster import VirtualCluster, clusters, sweep
from ascendrun.sim.vcluster.machines import HostDown
from ascendrun.sim.vcluster.processes import await_true, is_of_the_system
from ascendrun.sim.vcluster.requirements import NotSupported, find_faketime, requirements
from ascendrun.sim.vcluster.spec import root_home

CODE = Path(__file__).resolve().parents[2]
SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=2", "-o", "KexAlgorithms=curve25519-sha256"]
DEADLINE_S = 20.0

DIAL = """
import socket, sys
try:
    peer = socket.create_connection((sys.argv[1], 22), 2)
except socket.timeout:
    sys.exit("no answer")
except OSError as error:
    sys.exit(error.strerror)
peer.settimeout(2)
try:
    print(peer.recv(4).decode())
except socket.timeout:
    print("connected, no banner")
"""


def ssh(cluster, name, command, *, via=None, options=()):
    """Output and errors of one command over ssh, from the head or from host `via`."""
    argv = [*SSH, *options, name, command]
    run = cluster.head_run if via is None else lambda argv, **more: cluster.host_run(via, argv, **more)
    return run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def dial(cluster, name):
    """What a connection from the head to a host's sshd meets."""
    done = cluster.head_run([sys.executable, "-c", DIAL, cluster.address(name)], capture_output=True, text=True)
    return (done.stdout or done.stderr).strip()


def says(cluster, name, command, **options):
    done = ssh(cluster, name, command, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# -- what hosts are


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


def test_a_host_reaches_its_fellow_and_the_head_has_their_keys(cluster):
    assert says(cluster, "node2", "hostname", via="node1") == "node2"


def test_the_interpreter_of_this_test_runs_on_a_host(cluster):
    assert (
        says(cluster, "node1", f"{sys.executable} -c 'import cryptography, os; print(os.uname().nodename)'") == "node1"
    )


def test_hosts_see_only_their_own_processes_and_are_seen_from_outside(cluster):
    with cluster.head_popen([*SSH, "node1", "exec sleep 4217"]) as session:
        assert await_true(lambda: _find(cluster, "node1", "sleep 4217"), deadline_s=DEADLINE_S)
        process = _find(cluster, "node1", "sleep 4217")[0]
        assert process.environ["SSH_CONNECTION"].startswith(cluster.address("head"))
        assert Path(f"/proc/{process.ppid}/cmdline").read_bytes().startswith(b"sshd: root")
        assert "4217" not in says(cluster, "node2", "ps -eo args")
        os.kill(process.pid, signal.SIGKILL)
        session.wait(DEADLINE_S)


def _find(cluster, name, command):
    return [process for process in cluster.processes(name) if " ".join(process.argv) == command]


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


def test_fish_is_a_login_shell_that_can_make_noise(cluster_of):
    try:
        cluster = cluster_of(1, shells={"node1": "fish"}, rc_noise={"node1": "blub"})
    except NotSupported as missing:
        pytest.skip(f"{missing.message}; {missing.hint}")
    assert says(cluster, "node1", "echo $FISH_VERSION").splitlines()[0] == "blub"


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


# -- running commands


def test_a_command_on_the_head_ends_as_it_ended_inside(cluster):
    assert cluster.head_run(["sh", "-c", "exit 7"]).returncode == 7
    assert cluster.head_run(["sh", "-c", "kill -SEGV $$"]).returncode == -signal.SIGSEGV
    assert cluster.head_run(["no-such-program"], stderr=subprocess.PIPE).returncode == 127


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_signal_to_a_command_reaches_it_in_the_namespaces(cluster, number):
    with cluster.head_popen(["sleep", "4218"]) as child:
        assert await_true(lambda: _find(cluster, "head", "sleep 4218"), deadline_s=DEADLINE_S)
        child.send_signal(number)
        assert child.wait(DEADLINE_S) == -number
    assert await_true(lambda: not _find(cluster, "head", "sleep 4218"), deadline_s=DEADLINE_S)


def test_a_terminal_reaches_the_command_and_its_interrupt_once(cluster):
    script = "trap 'echo caught' INT; test -t 0 && echo ready; i=0; while [ $i -lt 3 ]; do read line && i=$line; done"
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


# -- faults


def test_cut_ssh_times_out_and_heal_brings_the_host_back(cluster):
    cluster.cut("node1")
    cluster.cut("node1")
    assert dial(cluster, "node1") == "no answer"
    assert dial(cluster, "node2") == "SSH-"
    cluster.heal("node1")
    cluster.heal("node1")
    assert dial(cluster, "node1") == "SSH-"


def test_freeze_tcp_connects_but_no_banner_comes_and_thaw_goes_on(cluster):
    cluster.freeze("node1")
    cluster.freeze("node1")
    assert dial(cluster, "node1") == "connected, no banner"
    cluster.thaw("node1")
    cluster.thaw("node1")
    assert dial(cluster, "node1") == "SSH-"


def test_reboot_gives_a_new_boot_id_and_an_empty_disk_but_the_same_machine(cluster):
    look = "cat /proc/sys/kernel/random/boot_id; cat /etc/machine-id; ls /root/mark"
    says(cluster, "node1", "touch /root/mark")
    before = says(cluster, "node1", look).splitlines()
    cluster.reboot("node1")
    after = ssh(cluster, "node1", look)
    assert "No such file" in after.stderr
    assert after.stdout.splitlines()[0] != before[0]
    assert after.stdout.splitlines()[1] == before[1]


def test_a_reboot_may_keep_the_disk_also_after_a_crash(cluster):
    look = "cat /proc/sys/kernel/random/boot_id; cat /root/mark; ls /run/mark /dev/shm/mark; ps -e | wc -l"
    says(cluster, "node1", "echo kept > /root/mark; touch /run/mark /dev/shm/mark")
    boots = {says(cluster, "node1", "cat /proc/sys/kernel/random/boot_id")}
    for take_down in (cluster.freeze, cluster.crash):
        take_down("node1")
        cluster.reboot("node1", keep_disk=True)
        after = ssh(cluster, "node1", look)
        assert after.stdout.splitlines()[1] == "kept"
        assert after.stderr.count("No such file") == 2
        boots.add(after.stdout.splitlines()[0])
    assert len(boots) == 3
    cluster.reboot("node1")
    assert ssh(cluster, "node1", "cat /root/mark").returncode == 1


def test_kill_the_peer_sees_the_connection_closed_at_once(cluster):
    with _session(cluster, "node1") as session:
        cluster.kill("node1")
        cluster.kill("node1")
        assert session.wait(DEADLINE_S) == 255
    assert not cluster.is_up("node1") and cluster.processes("node1") == []
    with pytest.raises(HostDown):
        cluster.host_run("node1", ["true"])


def test_crash_the_peer_sees_silence_until_its_own_keepalive(cluster):
    options = ["-o", "ServerAliveInterval=1", "-o", "ServerAliveCountMax=2"]
    with _session(cluster, "node1", options) as session, _session(cluster, "node1") as trusting:
        cluster.crash("node1")
        assert session.wait(DEADLINE_S) == 255
        assert trusting.poll() is None, "without keepalive nobody can know"
        trusting.kill()


def _session(cluster, name, options=()):
    """A running ssh, whose remote end has said that it is there, and ends when it is told that its peer has gone."""
    argv = [*SSH, *options, name, "echo here; exec cat"]
    session = cluster.head_popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert session.stdout.readline() == b"here\n"
    return session


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
    assert dial(cluster, "node1") == "no answer"
    cluster.loss("node1", 5)
    options = ["-o", "ConnectTimeout=20"]
    assert says(cluster, "node1", "head -c 300000 /dev/zero | wc -c", options=options) == "300000"
    cluster.loss("node1", 0)
    assert says(cluster, "node1", "hostname") == "node1"


def test_delay_makes_a_round_trip_twice_as_long(cluster):
    cluster.delay("node1", 100)
    delayed_s = _round_trip_s(cluster, "node1")
    assert delayed_s >= 0.2
    assert _round_trip_s(cluster, "node2") < delayed_s / 2
    assert says(cluster, "node1", "head -c 3000000 /dev/zero | wc -c; head -c 3000000 /dev/zero").startswith("3000000")
    cluster.delay("node1", 0)
    assert _round_trip_s(cluster, "node1") < delayed_s / 2


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


def test_rate_slows_what_passes_the_cable(cluster):
    free_s = _fetch_s(cluster, "node1", 2_000_000)
    cluster.rate("node1", 8000)
    slow_s = _fetch_s(cluster, "node1", 2_000_000)
    assert slow_s > 1.9, "two megabytes at one a second"
    cluster.rate("node1", 0)
    assert max(free_s, _fetch_s(cluster, "node1", 2_000_000)) < slow_s


def _fetch_s(cluster, name, size):
    began = time.monotonic()
    done = cluster.head_run([*SSH, name, f"head -c {size} /dev/urandom"], stdout=subprocess.PIPE)
    assert len(done.stdout) == size
    return time.monotonic() - began


def test_isolate_a_does_not_reach_b_while_the_head_sees_both(cluster):
    cluster.isolate("node1", "node2")
    cluster.isolate("node1", "node2")
    assert "timed out" in ssh(cluster, "node2", "true", via="node1").stderr
    assert "timed out" in ssh(cluster, "node1", "true", via="node2").stderr
    assert [says(cluster, name, "hostname") for name in cluster.hosts] == ["node1", "node2"]
    cluster.clean()
    assert says(cluster, "node2", "hostname", via="node1") == "node2"


def test_block_is_one_way_and_stops_a_live_connection(cluster):
    options = ["-o", "ServerAliveInterval=1", "-o", "ServerAliveCountMax=2"]
    with _session(cluster, "node1", options) as session:
        cluster.block("node1", "head")
        assert session.wait(DEADLINE_S) == 255
    received = "awk '/^Ip: [0-9]/ {print $4}' /proc/net/snmp"  # packets that came in
    before = int(cluster.host_run("node1", ["sh", "-c", received], capture_output=True, text=True).stdout)
    assert dial(cluster, "node1") == "no answer"
    after = int(cluster.host_run("node1", ["sh", "-c", received], capture_output=True, text=True).stdout)
    assert after > before, "the other way is open"
    assert says(cluster, "node2", "hostname", via="node1") == "node2"
    cluster.unblock("node1")
    assert dial(cluster, "node1") == "SSH-"


def test_fill_leaves_not_a_byte_and_unfill_gives_it_back(cluster):
    cluster.fill("node1")
    cluster.fill("node1")
    with pytest.raises(OSError) as caught:
        cluster.path("node1", "/root/more").write_bytes(b"x" * 4096)
    assert caught.value.errno == errno.ENOSPC
    assert "No space left" in ssh(cluster, "node1", "echo more > /tmp/more && echo most > /root/more").stderr
    assert says(cluster, "node2", "echo more > /tmp/more; cat /tmp/more") == "more"
    cluster.unfill("node1")
    cluster.unfill("node1")
    assert says(cluster, "node1", "echo more > /root/more; cat /root/more") == "more"


def test_sshd_stop_refuses_newcomers_and_keeps_sessions(cluster):
    with _session(cluster, "node1") as session:
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


def test_sshd_options_change_a_running_host_until_clean(cluster):
    cluster.sshd_options("node1", ["ForceCommand echo forced"])
    assert says(cluster, "node1", "hostname") == "forced"
    cluster.clean("node1")
    assert says(cluster, "node1", "hostname") == "node1"


def test_clock_shifts_the_wall_clock_of_one_host(cluster):
    try:
        find_faketime()
    except NotSupported as missing:
        with pytest.raises(NotSupported, match="libfaketime"):
            cluster.clock("node1", 300)
        pytest.skip(f"{missing.message}; {missing.hint}")
    cluster.clock("node1", 300)
    ahead = [int(says(cluster, name, "date +%s")) - time.time() for name in cluster.hosts]
    assert 250 < ahead[0] < 350 and abs(ahead[1]) < 50
    cluster.clean("node1")
    assert abs(int(says(cluster, "node1", "date +%s")) - time.time()) < 50


# -- nothing is left


def test_a_daemon_left_on_a_host_is_found_named_and_killed(cluster):
    says(cluster, "node1", "setsid sleep 4220 >/dev/null 2>&1 </dev/null & echo started")
    with pytest.raises(leftovers.Leftovers, match=r"(?s)1 processes are left.*node1:.*sleep 4220"):
        leftovers.require_none(cluster, deadline_s=1.0)
    assert await_true(lambda: not leftovers.strangers(cluster), deadline_s=DEADLINE_S)


def test_a_daemon_left_on_the_head_is_found_and_killed(cluster):
    cluster.head_run(["sh", "-c", "setsid sleep 4221 >/dev/null 2>&1 </dev/null &"], check=True)
    with pytest.raises(leftovers.Leftovers, match=r"(?s)head:.*sleep 4221"):
        leftovers.require_none(cluster, deadline_s=1.0)
    assert await_true(lambda: not leftovers.strangers(cluster), deadline_s=DEADLINE_S)


def test_an_open_ssh_session_is_a_leftover_and_the_listening_sshd_is_none(cluster):
    assert leftovers.strangers(cluster) == {}
    assert len([one for one in cluster.processes("node1") if is_of_the_system(one)]) == 2
    with _session(cluster, "node1") as session:
        assert set(leftovers.strangers(cluster)) == {"node1", "head"}
        session.kill()
    leftovers.require_none(cluster)


def test_the_fixture_itself_fails_a_test_that_leaves_a_daemon(tmp_path):
    (tmp_path / "conftest.py").symlink_to(Path(__file__).with_name("conftest.py"))
    (tmp_path / "test_planted.py").write_text(
        "import leftovers\n"
        "leftovers.SETTLE_S = 1.0\n"
        "def test_planted(cluster):\n"
        "    cluster.head_run(['ssh', 'node1', 'setsid sleep 4222 >/dev/null 2>&1 </dev/null &'], check=True)\n"
    )
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path]
    environ = {**os.environ, "PYTHONPATH": str(CODE)}
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, cwd=tmp_path, timeout=100)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 passed, 1 error" in done.stdout and "sleep 4222" in done.stdout


def test_down_takes_frozen_hosts_and_daemons_with_it_and_leaves_no_trace(cluster_of):
    cluster = cluster_of(2)
    namespaces = leftovers.namespaces_of(cluster)
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
        "import os, signal; from ascendrun.sim.vcluster.cluster import VirtualCluster\n"
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
        argv = [sys.executable, "-m", "ascendrun.sim.vcluster", "down", "--all"]
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


# -- the command, and machines that cannot


def test_the_command_boots_runs_breaks_and_takes_down(tmp_path):
    environ = {**os.environ, states.FOLDER_VARIABLE: str(tmp_path / "clusters")}

    def vcluster(*arguments):
        argv = [str(CODE / "bin" / "vcluster"), *arguments]
        return subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=60)

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
        "import os; from ascendrun.sim.vcluster.cluster import VirtualCluster\n"
        "from ascendrun.sim.vcluster.requirements import NotSupported\n"
        "os.setuid(65534)\n"
        "try: VirtualCluster.up(1)\n"
        "except NotSupported as refused: print(refused.message, '|', refused.hint)\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(CODE), "PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=60)
    assert "missing: ssh, ip, nsenter, root" in done.stdout, done.stderr
    assert "apt-get install -y iproute2 openssh-client util-linux; run it with sudo" in done.stdout


@pytest.mark.parametrize(("ci", "outcome"), [("true", "1 error"), ("", "1 skipped")])
def test_a_machine_that_cannot_carry_a_cluster_fails_ci_and_else_skips_with_the_reason(tmp_path, ci, outcome):
    (tmp_path / "conftest.py").symlink_to(Path(__file__).with_name("conftest.py"))
    (tmp_path / "test_planted.py").write_text("def test_planted(cluster):\n    pass\n")
    argv = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path]
    environ = {**os.environ, "PYTHONPATH": str(CODE), "PATH": str(tmp_path), "CI": ci}
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, cwd=tmp_path, timeout=100)
    assert outcome in done.stdout, done.stdout + done.stderr
    assert "missing: ssh, ip, nsenter; apt-get install -y iproute2 openssh-client util-linux" in done.stdout


def test_a_name_that_no_host_has_is_refused_before_anything_starts():
    with pytest.raises(ValueError, match="node7 is no host of this cluster: it has node1 to node2"):
        VirtualCluster.up(2, shells={"node7": "sh"})


def test_two_clusters_at_once_do_not_meet(cluster, cluster_of):
    other = cluster_of(1)
    assert other.address("node1") == cluster.address("node1")
    assert says(other, "node1", "cat /proc/sys/kernel/random/boot_id") != says(
        cluster, "node1", "cat /proc/sys/kernel/random/boot_id"
    )
    other.cut("node1")
    assert dial(other, "node1") == "no answer" and dial(cluster, "node1") == "SSH-"


def test_a_disk_that_the_machine_mounts_below_its_root_is_on_every_host_too_and_private_there():
    script = (
        "from ascendrun.sim.vcluster.cluster import VirtualCluster\n"
        "with VirtualCluster.up(1) as cluster:\n"
        "    cluster.host_run('node1', ['sh', '-c', 'ls /srv && touch /srv/more && ls /srv/more'], check=True)\n"
    )
    mounted = f'mount --bind {CODE}/ascendrun/sim /srv && {sys.executable} -c "$SCRIPT"'
    environ = {**os.environ, "PYTHONPATH": str(CODE), "SCRIPT": script}
    argv = ["unshare", "--mount", "sh", "-c", mounted]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "vcluster" in done.stdout.split() and "/srv/more" in done.stdout.split()
    assert not (CODE / "ascendrun/sim/more").exists()
