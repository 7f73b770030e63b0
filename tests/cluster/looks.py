"""How the tests of the virtual cluster look at a host: over ssh, by a bare connection, by its processes."""

import os
import subprocess
import sys
from pathlib import Path

DEADLINE_S = 180.0
"""For what must come: a busy machine may be slow to say it."""
SILENCE_S = 2
"""For what must not come: so long nothing was heard."""
SSH = ["ssh", "-o", "BatchMode=yes", "-o", "KexAlgorithms=curve25519-sha256"]

DIAL = """
import socket, sys
try:
    peer = socket.create_connection((sys.argv[1], 22), float(sys.argv[2]))
except socket.timeout:
    sys.exit("no answer")
except OSError as error:
    sys.exit(error.strerror)
try:
    print(peer.recv(4).decode())
except socket.timeout:
    print("connected, no banner")
"""


def ssh(cluster, name, command, *, via=None, options=(), patience_s=DEADLINE_S):
    """Output and errors of one command over ssh, from the head or from host `via`."""
    argv = [*SSH, "-o", f"ConnectTimeout={patience_s:.0f}", *options, name, command]
    run = cluster.head_run if via is None else lambda argv, **more: cluster.host_run(via, argv, **more)
    return run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def dial(cluster, name, *, patience_s=DEADLINE_S):
    """What a connection from the head to a host's sshd meets."""
    argv = [sys.executable, "-c", DIAL, cluster.address(name), str(patience_s)]
    done = cluster.head_run(argv, capture_output=True, text=True)
    return (done.stdout or done.stderr).strip()


def says(cluster, name, command, **options):
    done = ssh(cluster, name, command, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def open_session(cluster, name, options=()):
    """A running ssh, whose remote end has said that it is there, and ends when it is told that its peer has gone."""
    argv = [*SSH, *options, name, "echo here; exec cat"]
    session = cluster.head_popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert session.stdout.readline() == b"here\n"
    return session


def find_processes(cluster, name, command):
    return [process for process in cluster.processes(name) if " ".join(process.argv) == command]


def run_planted(folder, text, **environ):
    """The tests of this text, with the fixtures of this folder, by another pytest."""
    (folder / "conftest.py").symlink_to(Path(__file__).with_name("conftest.py"))
    (folder / "test_planted.py").write_text(text)
    argv = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "--rootdir", folder, folder]
    code = str(Path(__file__).resolve().parents[2])
    environ = {**os.environ, "PYTHONPATH": code, **environ}
    return subprocess.run(argv, env=environ, capture_output=True, text=True, cwd=folder, timeout=200)
