"""Two users with their real uids, each with a controller, one shared queue, and a host of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ascendrun.core.errors import ConflictError, NotFoundError, UnreachableError
from ascendrun.head.queue.messages import QUEUE_NAME, PrintVisible
from ascendrun.head.queue.visible import OF_ONE_USER, PREFIX, print_visible
from tests.lib.real_users import DEADLINE_S, User

pytestmark = pytest.mark.timeout(1800)
PRINTS = """name: prints
command: [sh, -c, 'echo "the loss is 1.5"; exec sleep {seconds}']
hostfile: l.hosts
devices: {{type: cpu, per_node: 1}}
env: {{SITE: value-of-the-environment}}
visible: {visible}
"""
LISTEN = """import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(chr(0) + sys.argv[1])
listener.listen(8)
print("listens", flush=True)
print(listener.accept()[0].recv(4096), flush=True)
"""


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
            for tried in (["ls", one.folder / "state"], ["cat", one.folder / "state" / "controller.log"]):
                assert two.run(two.process(*tried)).returncode != 0
            environ = {**two.argv()["env"], "ASCENDRUN_STATE_DIR": str(one.folder / "state")}
            foreign = two.run({**two.argv("submit", "job.yaml", "--detach"), "env": environ})
            assert foreign.returncode != 0, "nor is a job submitted as another user"
            root("stop", f"daemon/{first}")
            assert one.await_(first, state="STOPPED")["reason_values"]["by"].startswith("root@")
            two.await_(second, state="SUCCEEDED")
        finally:
            for user in (one, two):
                user("controller", "stop")
            server.terminate()
    assert not (folder / "queue" / QUEUE_NAME).exists()


@pytest.fixture
def users(folder: Path) -> Iterator[tuple[User, User, User]]:
    """root, who serves the queue, and two others; their jobs are stopped at the end."""
    root, one, two = (User(name, folder) for name in ("root", "daemon", "bin"))
    with subprocess.Popen(**root.argv("controller", "run", "--shared", folder / "queue")) as server:
        try:
            yield root, one, two
        finally:
            for user in (one, two):
                user.run(user.argv("stop", "prints", "--now"))
                user.run(user.argv("controller", "stop"))
            server.terminate()


def printing(user: User) -> list[str]:
    """Processes of a user that print for others."""
    found = subprocess.run(["ps", "-U", str(user.uid), "-o", "args"], capture_output=True, text=True, check=False)
    return [line for line in found.stdout.splitlines() if "ascendrun.query.visible" in line or "--color=never" in line]


def await_none(found: Any) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while found():
        assert time.monotonic() < deadline, found()
        time.sleep(0.1)


def print_as(reader: User, owner: User, job: str, command: str, **options: object) -> str:
    """What the controller of `owner` prints for `reader`, whose uid the kernel takes when the socket connects."""
    printed: list[bytes] = []
    request = PrintVisible(job, command, {f"--{name}": value for name, value in options.items()}, "en")
    os.setegid(reader.uid)
    os.seteuid(reader.uid)
    try:
        assert print_visible(owner.name, request, lambda data, is_error: printed.append(data)) == 0
    finally:
        os.seteuid(0)
        os.setegid(0)
    return b"".join(printed).decode()


def test_a_visible_job_is_read_by_others_and_nothing_else_of_its_user(users: tuple[User, User, User]) -> None:
    _, one, two = users
    hidden = one.submit(0, PRINTS, visible="owner")
    one.await_(hidden, state="SUCCEEDED")
    shown = one.submit(600, PRINTS, visible="group")
    one.await_(shown, state="RUNNING")
    line = json.loads(two("logs", f"daemon/{shown}", "--tail", 1, "-o", "jsonl"))
    assert (line["rank"], line["text"]) == (0, "the loss is 1.5")
    with subprocess.Popen(**two.argv("logs", "-f", f"daemon/{shown}"), stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None and "the loss is 1.5" in follower.stdout.readline()
        follower.terminate()
    await_none(lambda: printing(one))
    table = print_as(two, one, shown, "show", output="wide")
    assert "RUNNING" in table and "value-of-the-environment" not in table
    assert json.loads(print_as(two, one, "prints", "explain", output="json"))["state"] == "RUNNING"
    for job in (hidden, "j-9999"):
        with pytest.raises(NotFoundError):
            print_as(two, one, job, "logs")
    for command, options in (("show", {"output": "json"}), ("stop", {}), ("logs", {"state-dir": "/"})):
        with pytest.raises(ConflictError):
            print_as(two, one, shown, command, **options)
    for job in ("bin/j-0001", "nobody-here/j-0001"):
        assert two.run(two.argv("show", job)).returncode in (NotFoundError.exit_code, UnreachableError.exit_code)
    assert two.run(two.argv("fetch", f"daemon/{shown}")).returncode != 0
    one.await_(shown, state="RUNNING")


def test_links_and_false_listeners_give_nothing(users: tuple[User, User, User]) -> None:
    root, one, two = users
    job = one.submit(0, PRINTS, visible="group")
    one.await_(job, state="SUCCEEDED")
    [output] = (one.folder / "state" / "jobs").glob("**/rank-0.out.0")
    (two.folder / "secret").write_text("only of two\n")
    os.chmod(two.folder / "secret", 0o600)
    os.chown(two.folder / "secret", two.uid, -1)
    link = ["ln", "-sf", two.folder / "secret"]
    assert one.run(one.process(*link, output.with_name("rank-0.out.1"))).returncode == 0
    done = two.run(two.argv("logs", f"daemon/{job}"))
    assert "only of two" not in done.stdout + done.stderr, "the controller of one reads it, with the rights of one"
    assert two.run(two.process(*link, output.with_name("rank-0.out.2"))).returncode != 0
    output.with_name("rank-0.out.1").unlink()
    listen = two.python("-c", LISTEN, f"{PREFIX}-{one.uid}-0")
    with subprocess.Popen(**listen, stdout=subprocess.PIPE, text=True) as forger:
        assert forger.stdout is not None and forger.stdout.readline() == "listens\n"
        assert "SUCCEEDED" in print_as(root, one, job, "show")
        assert forger.stdout.readline() == "b''\n", "no request was sent to it"


def test_readers_are_bounded_and_of_the_group(users: tuple[User, User, User], folder: Path) -> None:
    root, one, two = users
    job = one.submit(600, PRINTS, visible="group")
    one.await_(job, state="RUNNING")
    follow = two.argv("logs", "-f", f"daemon/{job}")
    followers = [subprocess.Popen(**follow, stdout=subprocess.PIPE) for _ in range(OF_ONE_USER)]
    try:
        for follower in followers:
            assert follower.stdout is not None and follower.stdout.readline()
        with pytest.raises(ConflictError):
            print_as(two, one, job, "logs")
        assert print_as(root, one, job, "logs"), "another user is served"
    finally:
        for follower in followers:
            follower.kill()
            follower.communicate()
    await_none(lambda: printing(one))
    assert print_as(two, one, job, "logs")
    os.chmod(folder / "queue" / QUEUE_NAME, 0o660)  # as with --group of a group that two is not in
    with pytest.raises(ConflictError):
        print_as(two, one, job, "logs")
