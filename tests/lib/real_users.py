"""Users of this machine with their real uids, each with a state directory of his own and one shared queue."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable

import pydantic
import pytest

from tests.lib.vcluster.cluster import VirtualCluster
from tests.lib.vcluster.spec import make_key

CODE = Path(__file__).resolve().parents[2]
PATH = os.pathsep.join((str(CODE), str(Path(pydantic.__file__).parents[1])))
PYTHONS = (sys.executable, f"/usr/bin/python{sys.version_info[0]}.{sys.version_info[1]}")
JOB = "name: {name}\ncommand: [sleep, '{seconds}']\nhostfile: l.hosts\ndevices: {{type: cpu, per_node: 1}}\n"
DEADLINE_S = 600.0


def python_of(uid: int) -> str:
    """A Python that a user without rights may run; of some machines it is below /root."""
    for python in PYTHONS:
        try:
            subprocess.run([python, "-c", "import pydantic"], user=uid, env={"PYTHONPATH": PATH}, cwd="/", check=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return python
    pytest.skip("another user cannot run this Python")


class User:
    """`folder`: his home, in one that all users may enter and that has the queue. `enter`: makes of a command line one
    that runs it elsewhere, on the head of a cluster."""

    def __init__(
        self,
        name: str,
        folder: Path,
        hosts: str = "n1 addr=local slots=1\n",
        enter: Callable[[list[str]], list[str]] = lambda argv: argv,
    ) -> None:
        self.name, self.folder, self.uid = name, folder / name, pwd.getpwnam(name).pw_uid
        self.folder.mkdir()
        os.chown(self.folder, self.uid, -1)
        self._python, self._queue, self._enter = python_of(self.uid), folder / "queue", enter
        (self.folder / "l.hosts").write_text(hosts)

    def process(self, *argv: object) -> dict[str, Any]:
        """What `subprocess` takes to run a command as this user."""
        environ = {"PATH": "/usr/bin:/bin", "HOME": str(self.folder), "PYTHONPATH": PATH, "LANG": "C"}
        environ.update(ASCENDRUN_STATE_DIR=str(self.folder / "state"), ASCENDRUN_QUEUE=str(self._queue))
        become = ["setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups"]
        return {"args": self._enter([*become, *map(str, argv)]), "env": environ, "cwd": self.folder}

    def python(self, *words: object) -> dict[str, Any]:
        return self.process(self._python, *words)

    def argv(self, *words: object) -> dict[str, Any]:
        return self.python("-m", "ascendrun", *words)

    def run(self, process: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(**process, capture_output=True, text=True, timeout=DEADLINE_S, check=False)

    def __call__(self, *words: object, code: int = 0) -> str:
        done = self.run(self.argv(*words))
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def submit(self, seconds: int, job: str = JOB, **values: object) -> str:
        (self.folder / "job.yaml").write_text(job.format(name=f"of-{self.name}", seconds=seconds, **values))
        return str(json.loads(self("submit", "job.yaml", "--detach", "-o", "json"))["id"])

    def await_(self, job: str, **wanted: object) -> dict[str, Any]:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            found: dict[str, Any] = json.loads(self("show", job, "-o", "json"))["job"]
            if {name: found[name] for name in wanted} == wanted:
                return found
            assert time.monotonic() < deadline, found


def user_on(cluster: VirtualCluster, name: str, login: str, folder: Path, *, slots: int) -> User:
    """A user on the head of a cluster, with a login on its hosts whose key no other login accepts."""
    hosts, cwd = cluster.hostfile(slots=slots, user=login), str(folder / name)
    user = User(name, folder, hosts, lambda argv: cluster.head_argv(argv, cwd=cwd))
    if login != "root":
        _give_key(cluster, user, login)
    return user


def _give_key(cluster: VirtualCluster, user: User, login: str) -> None:
    key, folder = make_key(), user.folder / ".ssh"
    folder.mkdir(0o700)
    (folder / "id_ed25519").write_text(key.private)
    (folder / "known_hosts").write_text(cluster.known_hosts())
    for path in (folder, *folder.iterdir()):
        path.chmod(0o700 if path == folder else 0o600)
        os.chown(path, user.uid, user.uid)
    for host in cluster.hosts:
        there = cluster.path(host, f"/home/{login}/.ssh")
        (there / "authorized_keys").write_text(f"{key.public} {login}\n")
        (there / "id_ed25519").unlink()  # that of root
