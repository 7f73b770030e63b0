"""How the tests of the virtual cluster look at a host: over ssh, by a bare connection, by its processes."""

from __future__ import annotations

import subprocess
import sys

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


def open_session(cluster, name, options=()):
    """A running ssh, whose remote end has said that it is there, and ends when it is told that its peer has gone."""
    argv = [*SSH, *options, name, "echo here; exec cat"]
    session = cluster.head_popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert session.stdout.readline() == b"here\n"
    return session


def find_processes(cluster, name, command):
    return [process for process in cluster.processes(name) if " ".join(process.argv) == command]
