"""Two users with their real uids, each with a controller, one shared queue, and a host of this machine."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic
import pytest

from ascendrun.core.errors import ConflictError
from ascendrun.head.queue.messages import QUEUE_NAME

CODE = Path(__file__).resolve().parents[2]
PATH = os.pathsep.join((str(CODE), str(Path(pydantic.__file__).parents[1])))
PYTHONS = (sys.executable, f"/usr/bin/python{sys.version_info[0]}.{sys.version_info[1]}")
JOB = "name: {name}\ncommand: [sleep, '{seconds}']\nhostfile: l.hosts\ndevices: {{type: cpu, per_node: 1}}\n"
DEADLINE_S = 120.0


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
    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, self.uid = name, folder / name, pwd.getpwnam(name).pw_uid
        self.folder.mkdir()
        os.chown(self.folder, self.uid, -1)
        self._python, self._queue = python_of(self.uid), folder / "queue"
        (self.folder / "l.hosts").write_text("n1 addr=local slots=1\n")

    def argv(self, *words: object) -> dict[str, Any]:
        environ = {"PATH": "/usr/bin:/bin", "HOME": str(self.folder), "PYTHONPATH": PATH, "LANG": "C"}
        environ.update(ASCENDRUN_STATE_DIR=str(self.folder / "state"), ASCENDRUN_QUEUE=str(self._queue))
        argv = [self._python, "-m", "ascendrun", *map(str, words)]
        return {"args": argv, "user": self.uid, "group": self.uid, "extra_groups": [], "env": environ}

    def __call__(self, *words: object, code: int = 0) -> str:
        done = subprocess.run(
            **self.argv(*words), cwd=self.folder, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def submit(self, seconds: int) -> str:
        (self.folder / "job.yaml").write_text(JOB.format(name=f"of-{self.name}", seconds=seconds))
        return str(json.loads(self("submit", "job.yaml", "--detach", "-o", "json"))["id"])

    def await_(self, job: str, **wanted: object) -> dict[str, Any]:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            found: dict[str, Any] = json.loads(self("show", job, "-o", "json"))["job"]
            if {name: found[name] for name in wanted} == wanted:
                return found
            assert time.monotonic() < deadline, found


@pytest.fixture
def folder() -> Iterator[Path]:
    if os.getuid() != 0:
        pytest.skip("needs root to be several users")
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def test_two_users_share_a_host_and_neither_reaches_the_other(folder: Path) -> None:
    root, one, two = (User(name, folder) for name in ("root", "daemon", "bin"))
    with subprocess.Popen(**root.argv("controller", "run", "--shared", folder / "queue")) as server:
        try:
            first = one.submit(600)
            one.await_(first, state="RUNNING")
            second = two.submit(0)
            waits = two.await_(second, reason_code="nodes-in-use")["reason_values"]
            assert waits == {"job": f"daemon/{first}", "name": "of-daemon"}
            two("stop", f"daemon/{first}", code=ConflictError.exit_code)
            one.await_(first, state="RUNNING")
            as_two = {"user": two.uid, "group": two.uid, "extra_groups": [], "capture_output": True, "check": False}
            for tried in (["ls", one.folder / "state"], ["cat", one.folder / "state" / "controller.log"]):
                assert subprocess.run(tried, **as_two).returncode != 0
            environ = {**two.argv()["env"], "ASCENDRUN_STATE_DIR": str(one.folder / "state")}
            foreign = subprocess.run(**{**two.argv("submit", "job.yaml", "--detach"), "env": environ}, cwd=two.folder)
            assert foreign.returncode != 0, "nor is a job submitted as another user"
            root("stop", f"daemon/{first}")
            assert one.await_(first, state="STOPPED")["reason_values"]["by"].startswith("root@")
            two.await_(second, state="SUCCEEDED")
        finally:
            for user in (one, two):
                user("controller", "stop")
            server.terminate()
    assert not (folder / "queue" / QUEUE_NAME).exists()
