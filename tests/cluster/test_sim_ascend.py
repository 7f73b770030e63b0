"""Hosts of the virtual cluster as simulated Ascend nodes, asked over ssh as any user would."""

import subprocess

import pytest

from ascendrun.ascend import hccn, install, npu_smi
from ascendrun.sim.ascend import tree
from ascendrun.sim.ascend.__main__ import main
from tests.lib.ascend_recordings import npu_ids
from tests.lib.vcluster.__main__ import main as vcluster
from tests.lib.vcluster.processes import await_true

SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=60", "-o", "KexAlgorithms=curve25519-sha256"]
DEADLINE_S = 180.0


def ask(cluster, name, command):
    return cluster.head_run([*SSH, name, command], capture_output=True, text=True, stdin=subprocess.DEVNULL)


def info_of(cluster, name):
    return npu_smi.parse_info(ask(cluster, name, "npu-smi info").stdout)


@pytest.fixture
def nodes(cluster_of):
    """node1 is well; on node2 card 3 is off the bus."""
    cluster = cluster_of(2)
    assert vcluster(["--id", cluster.cluster_id, "npus", *cluster.hosts]) == 0  # each gets addresses of its own
    assert main(["fault", str(cluster.path("node2", "/")), "3", "dropped"]) == 0
    return cluster


def test_two_nodes_answer_over_ssh_each_for_itself_and_one_has_lost_a_card(nodes):
    well, ill = info_of(nodes, "node1"), info_of(nodes, "node2")
    assert npu_ids(well) == (0, 1, 2, 3, 4, 5, 6, 7)
    assert npu_ids(ill) == (0, 1, 2, 4, 5, 6, 7)
    assert {chip.health for chip in (*well.chips, *ill.chips)} == {"OK"}
    refused = ask(nodes, "node2", "npu-smi info -t board -i 3")
    assert refused.returncode and "Invalid card id." in refused.stdout
    for name, start in (("node1", "29.1.2."), ("node2", "29.1.3.")):
        address = hccn.parse_ip(ask(nodes, name, "/usr/local/Ascend/driver/tools/hccn_tool -i 0 -ip -g").stdout).address
        conf = install.parse_hccn_conf(ask(nodes, name, "cat /etc/hccn.conf").stdout)
        assert address == conf.ports[0].address and address.startswith(start)

    # a process of a host holds its card there and nowhere else; its pid is the host's own
    rank = "ASCENDRUN_SIM_NPU=auto ASCEND_RT_VISIBLE_DEVICES=5 LOCAL_RANK=0 exec sleep 4218"
    with nodes.head_popen([*SSH, "node1", rank]) as session:
        assert await_true(lambda: info_of(nodes, "node1").processes, deadline_s=DEADLINE_S)
        shown = info_of(nodes, "node1").processes[0]
        assert (shown.npu_id, shown.name) == (5, "sleep")
        assert "sleep" in ask(nodes, "node1", f"cat /proc/{shown.pid}/comm").stdout
        assert info_of(nodes, "node2").processes == ()
        ask(nodes, "node1", f"kill {shown.pid}")
        session.wait(DEADLINE_S)
    assert info_of(nodes, "node1").processes == ()

    # faults are switched from outside while the host runs
    tree.set_fault(nodes.path("node1", "/"), 0, "health_alarm")
    assert info_of(nodes, "node1").chips[0].health == "Alarm" and info_of(nodes, "node2").chips[0].health == "OK"

    assert main(["fault", str(nodes.path("node1", "/")), "0", "link_down"]) == 0
    assert hccn.parse_link(ask(nodes, "node1", "hccn_tool -i 0 -link -g").stdout).is_up is False

    # device nodes lie in a /dev of the host's own, where terminals still work
    listed = ask(nodes, "node1", "ls -l /dev/davinci0 /dev/davinci7 /dev/davinci_manager /dev/null").stdout.splitlines()
    assert len(listed) == 4 and all(line.startswith("c") for line in listed)
    assert (
        nodes.host_run("node1", ["script", "-qec", "tty", "/dev/null"], capture_output=True, text=True).returncode == 0
    )
    assert ask(nodes, "node2", "ls /dev/davinci0").returncode == 0
    assert subprocess.run(["ls", "/dev/davinci0"], capture_output=True).returncode != 0
