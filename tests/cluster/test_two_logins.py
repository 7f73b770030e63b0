"""Two users with their real uids on the head, each with a login on real hosts: neither reaches the other's job."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from scenes import await_that

from ascendrun.core.errors import ConflictError
from tests.lib.real_users import User, user_on
from tests.lib.vcluster.cluster import VirtualCluster
from tests.lib.vcluster.processes import Process
from tests.lib.vcluster.provision import FIRST_USER_ID

LOGINS = ("ann", "bob")
JOB = """name: {name}
command: [sh, -c, 'id -un; exec sleep {seconds}']
hostfile: l.hosts
devices: {{type: cpu, per_node: 1}}
env: {{SITE: "{name}"}}
"""
SPEAK = """import socket
for line in open("/proc/net/unix"):
    name = line.split()[-1]
    if not name.startswith(("@", "/")):
        continue
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_UNIX, kind) as client:
            client.settimeout(1.0)
            try:
                client.connect(name.replace("@", chr(0), 1))
                client.sendall(b'{"event": "exit", "rank": 0, "code": 0}' * 8)
                print(name, kind, client.recv(64))
            except OSError:
                pass
"""


@contextmanager
def users_of(cluster: VirtualCluster) -> Iterator[tuple[User, User, User]]:
    """root, who serves the queue of the head, and a user for each of LOGINS, whose key no other login accepts."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        accounts = (("root", "root"), ("daemon", "ann"), ("bin", "bob"))
        root, ann, bob = (user_on(cluster, account, login, folder, slots=2) for account, login in accounts)
        with subprocess.Popen(**root.argv("controller", "run", "--shared", folder / "queue")) as server:
            try:
                yield root, ann, bob
            finally:
                for one in (ann, bob):
                    one.run(one.argv("stop", f"of-{one.name}", "--now"))
                    one.run(one.argv("controller", "stop"))
                server.terminate()


def processes_of(cluster: VirtualCluster, host: str, uid: int) -> list[Process]:
    return [one for one in cluster.processes(host) if os.stat(f"/proc/{one.pid}").st_uid == uid]


@pytest.mark.timeout(1800)
def test_neither_kills_reads_or_forges_the_job_of_the_other(cluster_of: Callable[..., VirtualCluster]) -> None:
    cluster = cluster_of(2, users=dict.fromkeys(LOGINS, "bash"))
    with users_of(cluster) as (root, ann, bob):
        jobs = {one: one.submit(600, JOB) for one in (ann, bob)}
        for one, login in ((ann, "ann"), (bob, "bob")):
            one.await_(jobs[one], state="RUNNING")
            await_that(lambda one=one, login=login: {*one("logs", jobs[one], "--no-prefix").split()} == {login}, login)
        uid = {login: FIRST_USER_ID + number for number, login in enumerate(LOGINS)}

        def as_bob(host: str, *argv: object) -> subprocess.CompletedProcess[str]:
            become = ["setpriv", f"--reuid={uid['bob']}", f"--regid={uid['bob']}", "--clear-groups"]
            return cluster.host_run(host, [*become, *map(str, argv)], capture_output=True, text=True)

        before = {host: processes_of(cluster, host, uid["ann"]) for host in cluster.hosts}
        for host, found in before.items():
            ranks = [one for one in found if one.argv == ("sleep", "600")]
            assert len(ranks) == 1 and ranks[0].environ["SITE"] == "of-daemon"
            for one in found:
                assert as_bob(host, "kill", "-9", one.inner_pid).returncode != 0, one
                for file in ("environ", "mem", "fd", "cwd", "root"):
                    assert as_bob(host, "ls", f"/proc/{one.inner_pid}/{file}/").returncode != 0, (one, file)
                    assert as_bob(host, "head", "-c1", f"/proc/{one.inner_pid}/{file}").returncode != 0, (one, file)
            places = ["/home", "/tmp", "/var/tmp", "/run", "/dev/shm"]
            reached = as_bob(host, "find", *places, "-user", uid["ann"], "(", "-readable", "-o", "-writable", ")")
            assert reached.stdout == "", "a file of hers that he may read or write"
            assert as_bob(host, "touch", "/home/ann/.ascendrun/x").returncode != 0
            assert as_bob(host, "python3", "-c", SPEAK).stdout == "", "a process replied to him"
        (bob.folder / "a.hosts").write_text(cluster.hostfile(user="ann"))
        assert bob.run(bob.argv("exec", "-H", "a.hosts", "--", "true")).returncode != 0, "the login of ann"
        bob("stop", f"daemon/{jobs[ann]}", code=ConflictError.exit_code)
        ann.await_(jobs[ann], state="RUNNING")
        lasting = [one.pid for found in before.values() for one in found if {"supervise", "sleep"} & {*one.argv}]
        now = {one.pid for host in cluster.hosts for one in processes_of(cluster, host, uid["ann"])}
        assert len(lasting) >= 4 and {*lasting} <= now
        bob("stop", jobs[bob])
        bob.await_(jobs[bob], state="STOPPED")
        ann.await_(jobs[ann], state="RUNNING")
        root("stop", f"daemon/{jobs[ann]}")
        ann.await_(jobs[ann], state="STOPPED")
