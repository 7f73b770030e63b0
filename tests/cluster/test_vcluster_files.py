"""Faults of a host's files: errors, silence and stuck calls of a faulty file system, shared and vanished homes."""

import errno
import os
import signal
import subprocess
import sys

import leftovers
import pytest
from looks import DEADLINE_S, find_processes, says

from tests.lib.vcluster.faultfs import FaultFsError
from tests.lib.vcluster.folders import NODE_FOLDER
from tests.lib.vcluster.fuse_server import ERRORS
from tests.lib.vcluster.processes import await_true

ERRNO = """
import sys
try:
    print(len(open(sys.argv[1], sys.argv[2]).read()))
except OSError as error:
    print(error.errno)
"""
EVERYTHING = """
import os, socket
os.mkdir("folder")
with open("folder/file", "w") as file:
    file.write("x" * 300_000)
with open("folder/file", "a") as file:
    file.write("end")
os.symlink("file", "folder/link")
os.link("folder/file", "folder/other")
assert os.stat("folder/link").st_size == os.stat("folder/other").st_size == 300_003
os.rename("folder", "renamed")
assert sorted(os.listdir("renamed")) == ["file", "link", "other"] and os.readlink("renamed/link") == "file"
os.truncate("renamed/file", 2)
os.chmod("renamed/file", 0o640)
os.utime("renamed/file", (5, 7))
status = os.stat("renamed/other")
assert (status.st_size, status.st_mode & 0o777, status.st_mtime, status.st_nlink) == (2, 0o640, 7, 2)
os.unlink("renamed/other")
server, peer = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
server.bind("renamed/socket")
server.listen()
peer.connect("renamed/socket")
os.mkfifo("renamed/fifo")
for number in range(300):
    open("renamed/%d" % number, "w").close()
assert len(os.listdir("renamed")) == 304
open_file = open("renamed/file")
os.unlink("renamed/file")
assert open_file.read() == "xx"
"""


@pytest.fixture
def fs(cluster):
    return cluster.node_fs("node1")


def _python(cluster, program, *words, host="node1"):
    done = cluster.host_run(host, ["python3", "-c", program, *words], cwd="/root/.ascendrun", capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


def test_a_sound_one_is_a_file_system_like_any_other(cluster, fs):
    _python(cluster, EVERYTHING)
    assert says(cluster, "node1", "cp /bin/ls .ascendrun/ls && .ascendrun/ls .ascendrun/renamed | wc -l") == "303"
    assert cluster.node_fs("node1") == fs, "mounted once"
    assert not list(cluster.path("node2", NODE_FOLDER).iterdir())


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_is_the_answer_until_it_is_healed(cluster, fs, name):
    (fs.below / "file").write_text("text")
    fs.fail(name)
    wanted = str(getattr(errno, name))
    reads = "4" if ERRORS[name] else wanted
    assert _try(cluster, "file", "r") == reads
    assert _try(cluster, "new", "x+") == wanted
    fs.heal()
    assert _try(cluster, "file", "r") == "4" and _try(cluster, "new", "x+") == "0"
    (fs.below / "new").unlink()


def _try(cluster, name, mode):
    done = cluster.host_run("node1", ["python3", "-c", ERRNO, f"{NODE_FOLDER}/{name}", mode], capture_output=True)
    return done.stdout.decode().strip()


def test_a_fault_with_a_duration_ends_by_itself(cluster, fs):
    fs.fail("EIO", seconds=0.1)
    assert await_true(lambda: fs.status()["fault"] == "", deadline_s=DEADLINE_S)
    fs.hang(seconds=0.1)
    says(cluster, "node1", "ls .ascendrun")
    with pytest.raises(ValueError):
        fs.fail("EPERM")


def test_who_hangs_can_be_killed_and_goes_on_when_it_is_healed(cluster, fs):
    fs.hang()
    patient, killed = (cluster.host_popen("node1", ["ls", NODE_FOLDER], stdout=subprocess.PIPE) for _ in range(2))
    assert await_true(lambda: len(find_processes(cluster, "node1", f"ls {NODE_FOLDER}")) == 2, deadline_s=DEADLINE_S)
    killed.kill()
    assert killed.wait(DEADLINE_S) == -signal.SIGKILL
    fs.heal()
    patient.communicate(timeout=DEADLINE_S)
    assert patient.returncode == 0


def _stuck(cluster, fs):
    """A process on node1 that was killed and is in state D."""
    fs.stick()
    child = cluster.host_popen("node1", ["setsid", "-f", "ls", NODE_FOLDER], stdin=subprocess.DEVNULL)
    child.wait(DEADLINE_S)
    look = lambda: find_processes(cluster, "node1", f"ls {NODE_FOLDER}")  # noqa: E731
    assert await_true(lambda: bool(look()) and fs.status()["stuck"] > 0, deadline_s=DEADLINE_S)
    os.kill(look()[0].pid, signal.SIGKILL)
    assert await_true(lambda: [one.state for one in look()] == ["D"], deadline_s=DEADLINE_S)


def test_a_stuck_call_keeps_no_host_from_going_down(cluster_of):
    cluster = cluster_of(2)
    for host in cluster.hosts:
        cluster.node_fs(host)
    _stuck(cluster, cluster.node_fs("node1"))
    cluster.reboot("node1", keep_disk=True)
    assert says(cluster, "node1", "ls .ascendrun; echo up") == "up"
    _stuck(cluster, cluster.node_fs("node1"))
    cluster.down()
    assert not leftovers.file_systems([cluster.cluster_id])


def test_when_its_process_dies_each_call_comes_back_with_an_error(cluster_of):
    cluster = cluster_of(1)
    fs = cluster.node_fs("node1")
    _stuck(cluster, fs)
    os.kill(fs.pid, signal.SIGKILL)
    assert await_true(lambda: not find_processes(cluster, "node1", f"ls {NODE_FOLDER}"), deadline_s=DEADLINE_S)
    with pytest.raises(FaultFsError):
        fs.heal()
    cluster.clean()
    assert says(cluster, "node1", "ls .ascendrun; df --output=fstype .ascendrun").split()[-1] == "tmpfs"
    cluster.node_fs("node1").heal()


def test_the_command_sets_and_clean_undoes_it(cluster, fs):
    command = [sys.executable, "-m", "tests.lib.vcluster", "--id", cluster.cluster_id]
    environ = {**os.environ, "PYTHONPATH": str(leftovers.CODE)}
    subprocess.run([*command, "fs", "ESTALE", "node1"], env=environ, check=True)
    assert fs.status()["fault"] == "ESTALE"
    cluster.clean()
    assert fs.status()["fault"] == ""
    refused = subprocess.run([*command, "fs", "heal", "nobody"], env=environ, capture_output=True, text=True)
    assert refused.returncode and "nobody" in refused.stderr


def test_a_shared_home_is_one_folder_for_all_hosts_and_outlives_each(cluster_of):
    cluster = cluster_of(2, shared_home=True, users={"wang": "sh"})
    says(cluster, "node1", "echo one > .ascendrun/file; echo hers > /home/wang/file")
    assert says(cluster, "node2", "cat .ascendrun/file /home/wang/file").split() == ["one", "hers"]
    cluster.reboot("node1")
    assert says(cluster, "node1", "cat .ascendrun/file").strip() == "one"
    cluster.node_fs("node2").fail("EIO")
    assert says(cluster, "node1", "cat .ascendrun/file").strip() == "one"
