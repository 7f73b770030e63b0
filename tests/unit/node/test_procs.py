"""A number that the kernel gives to another process: no signal reaches that one."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROUNDS = """
import json, os, signal, sys, time
sys.path.insert(0, sys.argv[1])
from ascendrun.node import procs

def start():
    pid = os.fork()
    if pid == 0:
        while True:
            signal.pause()
    return pid, procs.read_stat(pid).start

def end(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)

reused = signalled = 0
for _ in range(1000):
    pid, began = start()
    while time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK") < began + 1:
        pass  # times have a resolution of a tick
    end(pid)
    with open("/proc/sys/kernel/ns_last_pid", "w") as last:
        last.write(str(pid - 1))
    other, _ = start()
    reused += other == pid
    signalled += procs.send_signal(pid, began, signal.SIGKILL)
    signalled += os.waitpid(other, os.WNOHANG)[0] != 0
    end(other)
print(json.dumps([reused, signalled]))
"""


@pytest.mark.slow
def test_in_1000_rounds_no_signal_reaches_a_process_that_got_the_number_of_another() -> None:
    apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("no pid namespace can be made here")
    argv = [*apart, sys.executable, "-c", ROUNDS, str(Path(__file__).resolve().parents[3])]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    reused, signalled = json.loads(done.stdout)
    assert reused > 900 and signalled == 0
