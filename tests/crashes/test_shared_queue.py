"""Two users with their real uids, each with a controller, one shared queue, and a host of this machine."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Callable

import pytest

from ascendrun.core.errors import ConflictError, InvalidInputError, NotFoundError, UnreachableError
from ascendrun.head.queue.messages import QUEUE_NAME, RunForOther
from ascendrun.head.queue.others import OF_ONE_USER, PREFIX, run_at
from tests.lib.real_users import DEADLINE_S, JOB, User

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
WRITES = """name: writes
command: [sh, -c, 'echo "what the job wrote" >left; exec sleep {seconds}']
hostfile: l.hosts
devices: {{type: cpu, per_node: 1}}
"""
SERVES = r"""name: prints
command: [python3, -u, -c, "import socket\n\
  s = socket.create_server(('127.0.0.1', 0))\nprint('serves', s.getsockname()[1])\n\
  while s:\n c = s.accept()[0]\n c.sendall(b'secret')\n c.close()"]
hostfile: l.hosts
devices: {{type: cpu, per_node: 1}}
"""
FLOODS = """name: floods
checks: {{skip: [disk-space]}}
command: [sh, -c, 'yes a line of a log that floods | head -c 64000000; exec sleep 600']
hostfile: l.hosts
devices: {{type: cpu, per_node: 1}}
"""
ASK = """import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as peer:
    try: print(peer.recv(100))
    except ConnectionError: print(b"")
"""


def has_turn(holder: socket.socket) -> bool:
    """Controllers are found by names that hold for the whole machine: of two runs of these tests one waits."""
    try:
        holder.bind("\0ascendrun-tests-of-several-users")
    except OSError:
        return False
    return True


@pytest.fixture
def folder() -> Iterator[Path]:
    if os.getuid() != 0:
        pytest.skip("needs root to be several users")
    with socket.socket(socket.AF_UNIX) as turn, tempfile.TemporaryDirectory() as name:
        await_none(lambda: not has_turn(turn))
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
            state = one.folder / "state"
            for tried in (["ls", state], ["cat", state / "controller.log"], ["touch", state / "jobs" / first / "x"]):
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


def test_a_broken_job_file_a_log_flood_and_a_full_disk_of_one_user_touch_no_other(folder: Path) -> None:
    root, one, two = (User(name, folder, "n1 addr=local slots=2\n") for name in ("root", "daemon", "bin"))
    state = one.folder / "state"
    state.mkdir()
    options = f"size=192m,mode=700,uid={one.uid},gid={one.uid}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", state], check=True)
    with subprocess.Popen(**root.argv("controller", "run", "--shared", folder / "queue")) as server:
        try:
            flood = one.submit(0, FLOODS)
            one.await_(flood, state="RUNNING")
            (one.folder / "broken.yaml").write_text("name: [\n")
            assert one.run(one.argv("submit", "broken.yaml")).returncode == InvalidInputError.exit_code
            filler = one.process("dd", "if=/dev/zero", f"of={state}/filler", "oflag=append", "conv=notrunc")
            await_none(lambda: one.run(filler).returncode == 0 or os.statvfs(state).f_bavail)  # a file may be replaced
            assert one.run(one.argv("submit", "job.yaml", "--detach")).returncode != 0, "it stores nothing"
            two.await_(two.submit(0), state="SUCCEEDED")

            def rows() -> dict[str, str]:
                return {row["user"]: row["state"] for row in json.loads(two("ps", "--all-users", "-o", "json"))["jobs"]}

            await_equal(rows, {"daemon": "RUNNING"})
        finally:
            subprocess.run(["mount", "-o", "remount,size=1g", state], check=True)
            one.run(one.argv("stop", "floods", "--now"))
            for user in (one, two):
                user.run(user.argv("controller", "stop"))
            server.terminate()
            subprocess.run(["umount", "-l", state], check=True)


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
    return [
        line for line in found.stdout.splitlines() if "ascendrun.query.for_others" in line or "--color=never" in line
    ]


def await_none(found: Any) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while found():
        assert time.monotonic() < deadline, found()
        time.sleep(0.1)


def await_equal(found: Callable[[], object], wanted: object) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while (now := found()) != wanted:
        assert time.monotonic() < deadline, now
        time.sleep(0.1)


def print_as(reader: User, owner: User, job: str, command: str, **options: object) -> str:
    """What the controller of `owner` prints for `reader`: the kernel takes the uid when the socket connects."""
    printed: list[bytes] = []
    request = RunForOther(command, (job,), {f"--{name}": value for name, value in options.items()})
    os.setegid(reader.uid)
    os.seteuid(reader.uid)
    try:
        assert run_at(owner.name, request, lambda data, is_error: printed.append(data)) == 0
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
    await_none(lambda: "the loss" not in one("logs", shown))
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
    for command, options in (
        ("show", {"output": "json"}),
        ("stop", {}),
        ("hold", {}),
        ("fetch", {}),
        ("logs", {"state-dir": "/"}),
    ):
        with pytest.raises(ConflictError):
            print_as(two, one, shown, command, **options)
    for job in ("bin/j-0001", "nobody-here/j-0001"):
        assert two.run(two.argv("show", job)).returncode in (NotFoundError.exit_code, UnreachableError.exit_code)
    assert two.run(two.argv("fetch", f"daemon/{shown}")).returncode != 0
    one.await_(shown, state="RUNNING")


OF_ANOTHER_QUEUE = """
import pathlib, secrets, time
secrets.token_hex = lambda count: "0" * 2 * count  # it is asked first
from ascendrun.head.queue.others import OtherUsers
OtherUsers(pathlib.Path("/nowhere"), pathlib.Path("state"))
print("listens", flush=True)
time.sleep(600)
"""


def test_a_controller_of_another_queue_hides_no_job_of_its_user(users: tuple[User, User, User]) -> None:
    _, one, two = users
    shown = one.submit(600, PRINTS, visible="group")
    one.await_(shown, state="RUNNING")
    with subprocess.Popen(**one.python("-c", OF_ANOTHER_QUEUE), stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "listens\n"
        assert "RUNNING" in two("show", f"daemon/{shown}")
        other.kill()


def test_a_port_of_a_job_is_closed_to_other_users(users: tuple[User, User, User]) -> None:
    _, one, two = users
    job = one.submit(600, SERVES)
    one.await_(job, state="RUNNING")
    printed: list[str] = []
    await_none(lambda: printed.extend(re.findall(r"serves (\d+)", one("logs", job))) or not printed)
    remote = printed[0]
    process = one.argv("port", job, f"0:{remote}")
    with subprocess.Popen(**process, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as forwarder:
        assert forwarder.stdout is not None
        local = forwarder.stdout.readline().partition(" leads to")[0].rpartition(":")[2]
        replies = [user.run(user.python("-c", ASK, local)).stdout for user in (one, two, one)]
        forwarder.terminate()
    assert replies == ["b'secret'\n", "b''\n", "b'secret'\n"]


def test_an_administrator_changes_and_fetches_what_a_user_has(folder: Path) -> None:
    root, one, two, admin = (User(name, folder) for name in ("root", "daemon", "bin", "sys"))
    serve = root.argv("controller", "run", "--shared", folder / "queue", "--admin", "sys")
    with subprocess.Popen(**serve) as server:
        try:
            running = one.submit(600, WRITES)
            one.await_(running, state="RUNNING")
            waits = one.submit(0)
            one.await_(waits, reason_code="nodes-in-use")
            for command in ("hold", "stop", "retry", "fetch", "show", "events", "rm"):
                done = two.run(two.argv(command, f"daemon/{running}"))
                assert done.returncode in (ConflictError.exit_code, NotFoundError.exit_code)
            [held] = json.loads(admin("hold", f"daemon/{waits}", "-o", "json"))["jobs"]
            assert held["held_by"] == "sys"
            one.await_(waits, reason_code="held-by-user", reason_values={"user": "sys"})
            for command in ("hold", "unhold"):
                refused = one.run(one.argv(command, waits))
                assert refused.returncode == ConflictError.exit_code and f"unhold daemon/{waits}" in refused.stderr
            one.await_(waits, held_by="sys")
            admin("unhold", f"daemon/{waits}")
            one("hold", waits)
            one("unhold", waits)
            events = json.loads(one("show", waits, "-o", "json"))["events"]
            ended, _ = (event for event in events if event["code"] == "hold-ended")
            assert ended["values"] == {"by": "sys", "ended_by": "sys"}
            assert json.loads(admin("show", f"daemon/{running}", "-o", "json"))["job"]["state"] == "RUNNING"
            assert "hold-started" in admin("events", f"daemon/{waits}")
            table = admin("fetch", f"daemon/{running}", "left", "-O", admin.folder / "got")
            assert str(admin.folder / "got") in table
            [left] = (admin.folder / "got").rglob("left")
            assert (left.read_text(), left.stat().st_uid) == ("what the job wrote\n", admin.uid)
            assert not list((one.folder / "state").glob("fetch-*"))
            admin("stop", f"daemon/{running}", "of-daemon", code=2)
            [stopped] = json.loads(admin("stop", f"daemon/{running}", "--now", "-o", "json"))["jobs"]
            assert (stopped["state"], stopped["reason_values"]["by"].partition("@")[0]) == ("STOPPED", "sys")
            admin("retry", f"daemon/{running}")
            assert "sys@" in one("show", running), "the events of the job"
            for refused in (["rm", f"daemon/{waits}"], ["shell", f"daemon/{running}"], ["stop", f"root/{waits}"]):
                assert admin.run(admin.argv(*refused)).returncode != 0
            server.terminate()
            server.wait()
            assert admin.run(admin.argv("stop", f"daemon/{running}")).returncode != 0, "the server is away"
            root("stop", f"daemon/{running}", "--now")
        finally:
            one.run(one.argv("stop", "writes", "of-daemon", "--now"))
            one.run(one.argv("controller", "stop"))
            server.terminate()


def test_a_job_that_two_controllers_of_a_user_have_is_not_changed(users: tuple[User, User, User]) -> None:
    root, one, _ = users
    ended = one.submit(0)
    one.await_(ended, state="SUCCEEDED")
    failed = one.submit(0, JOB.replace("sleep", "false"))
    one.await_(failed, state="FAILED")
    only = one.submit(0)
    one.await_(only, state="SUCCEEDED")
    other = {**one.argv()["env"], "ASCENDRUN_STATE_DIR": str(one.folder / "other")}

    def at_other(*words: object) -> str:
        done = one.run({**one.argv(*words), "env": other})
        assert done.returncode == 0, done.stderr
        return done.stdout

    try:
        for name in ("prints", "later"):
            (one.folder / "job.yaml").write_text(JOB.format(name=name, seconds=600))
            at_other("submit", "job.yaml", "--detach")
        for command, job in (("retry", failed), ("stop", ended), ("hold", ended)):
            refused = root.run(root.argv(command, f"daemon/{job}"))
            assert refused.returncode == ConflictError.exit_code and job in refused.stderr, refused
        one.await_(failed, state="FAILED", attempt=1)
        (one.folder / "job.yaml").write_text(JOB.format(name="prints", seconds=600))
        one("submit", "job.yaml", "--detach")
        assert root.run(root.argv("stop", "daemon/prints")).returncode == ConflictError.exit_code, "nor by its name"
        root("stop", "daemon/later", "--now")
        assert [row["state"] for row in json.loads(at_other("ps", "-a", "-o", "json"))["jobs"]].count("STOPPED") == 1
        assert root.run(root.argv("retry", f"daemon/{only}")).returncode == ConflictError.exit_code, "it has succeeded"
        assert "RUNNING" in at_other("show", "prints")
    finally:
        at_other("stop", "prints", "--now")
        at_other("controller", "stop")


def test_a_host_that_an_administrator_drains_starts_no_job_of_any_user(folder: Path) -> None:
    root, one, two, admin = (User(name, folder) for name in ("root", "daemon", "bin", "sys"))
    serve = root.argv("controller", "run", "--shared", folder / "queue", "--admin", "sys")
    server = subprocess.Popen(**serve)
    try:
        running = one.submit(600)
        one.await_(running, state="RUNNING")
        admin.await_(admin.submit(0), reason_code="nodes-in-use")  # it knows the host
        admin("stop", "of-sys")
        admin("drain", "n1", "--reason", "optics")
        waits = two.submit(0)

        def machines(user: User) -> list[tuple[str, str]]:
            found = json.loads(user("nodes", "--all", "-o", "json"))["machines"]
            return [(machine["state"], machine["by"]) for machine in found]

        for user, state in ((one, "draining"), (two, "drained"), (admin, "drained")):
            await_equal(partial(machines, user), [(state, "sys")])
        one("stop", running, "--now")
        found = two.await_(waits, reason_code="too-few-hosts")
        assert "drained by sys: optics" in two("show", waits), found
        assert "drained by sys: optics" in one("ps", "--all-users"), "for every user"
        server.terminate()
        server.wait()
        server = subprocess.Popen(**serve)
        await_none(lambda: two.run(two.argv("ps", "--all-users")).returncode)
        refused = two.run(two.argv("undrain", "n1", "--no-check"))
        assert refused.returncode == ConflictError.exit_code and "sys" in refused.stderr
        two("drain", "n1", "--reason", "mine")
        admin("undrain", "n1", "--no-check")
        await_none(lambda: "drained by bin: mine" not in two("show", waits))
        two("undrain", "n1", "--no-check")
        two.await_(waits, state="SUCCEEDED")
        running = one.submit(600)
        one.await_(running, state="RUNNING")
        admin("lost", "n1", "--force")
        await_none(lambda: "reported as lost" not in one("nodes", "--all"))
        one.await_(running, state="RUNNING")
        server.terminate()
        server.wait()
        assert two.run(two.argv("drain", "n1")).returncode == UnreachableError.exit_code
        two("lost", "n1", "--force")
        assert machines(two) == [("drained", "bin")], "own jobs on it end without the server too"
    finally:
        one.run(one.argv("stop", "of-daemon", "--now"))
        for user in (one, two, admin):
            user.run(user.argv("controller", "stop"))
        server.terminate()


def test_links_and_false_listeners_give_nothing(users: tuple[User, User, User]) -> None:
    root, one, two = users
    job = one.submit(0, PRINTS, visible="group")
    one.await_(job, state="SUCCEEDED")
    await_none(lambda: not list((one.folder / "state" / "jobs").glob("*/attempt-1/complete")))
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

    def is_refused() -> bool:  # until the controller has seen the end of one of its processes
        with suppress(ConflictError):
            return not print_as(two, one, job, "logs")
        return True

    await_none(is_refused)
    os.chmod(folder / "queue" / QUEUE_NAME, 0o660)  # as with --group of a group that two is not in
    with pytest.raises(ConflictError):
        print_as(two, one, job, "logs")
