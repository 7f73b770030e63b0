"""Bad days of the head itself, on local hosts: a full disk, a locked store, clients that hang, sleep."""

import fcntl
import getpass
import json
import os
import signal
import sqlite3
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from test_controller_crashes import DEADLINE_S, Head, await_that, head

from ascendrun.core.hosts import Host
from ascendrun.head.loop.daemon import is_running
from ascendrun.head.protocol.control_messages import Exec
from ascendrun.head.protocol.control_socket import ControlClient
from ascendrun.head.spool.collector import allocated_bytes

__all__ = ["head"]

TALK = """
import os, sys, time
folder = sys.argv[1]
print("x" * 40000, flush=True)
while not os.path.exists(os.path.join(folder, "go")):
    time.sleep(0.05)
print("y" * 40000, flush=True)
"""
SPARSE = """
import os
with open(os.environ["TORCHELASTIC_ERROR_FILE"], "wb") as file:
    file.truncate(900 << 20)
"""
HANG = "import signal, sys\nprint('ready', flush=True)\nsignal.pause()\n"


def await_state(head: Head, job: str, state: str) -> None:
    try:
        await_that(lambda: head.show(job)["job"]["state"] == state)
    except AssertionError:
        raise AssertionError(json.dumps(head.show(job)["events"], indent=1)) from None


def test_a_client_that_stops_reading_holds_up_nobody(head: Head) -> None:
    head.submit()
    hosts = tuple(Host(name, slots=2, addr="local") for name in "ab")
    request = Exec(hosts, (sys.executable, "-c", "print('x' * 900_000)"), 30)
    with ControlClient(head.state_dir) as client:
        next(client.stream(request, timeout_s=DEADLINE_S))  # the other host's answer is never read
        status = head.run("controller", "status")
    assert status.returncode == 0, status.stderr


def test_twenty_submits_at_once_make_twenty_jobs_and_one_controller(head: Head) -> None:
    with ThreadPoolExecutor(20) as pool:
        jobs = list(pool.map(lambda _: head.submit(), range(20)))
    assert len(set(jobs)) == 20
    assert sorted(head.states()) == sorted(jobs)
    head.run("stop", "--now", *jobs)


def test_looking_whether_a_controller_runs_never_keeps_one_from_starting(head: Head) -> None:
    head.state_dir.mkdir(mode=0o700)
    (head.state_dir / "controller.lock").touch()
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            is_running(head.state_dir)

    watchers = [threading.Thread(target=look) for _ in range(3)]
    for watcher in watchers:
        watcher.start()
    try:
        for _ in range(3):
            assert head.run("ps", "-a").returncode == 0
            head.submit()
            head.run("controller", "stop")
    finally:
        over.set()


def long_job(head: Head) -> str:
    (head.folder / "rank.py").write_text(HANG)
    job = head.submit()
    await_state(head, job, "RUNNING")
    return job


def test_a_store_that_another_program_holds_for_a_while_delays_and_breaks_nothing(head: Head) -> None:
    job = long_job(head)
    with sqlite3.connect(head.state_dir / "state.db", isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        try:
            for verb in (["show", job], ["logs", job]):
                assert head.run(*verb).returncode == 0, verb
            with ThreadPoolExecutor(1) as pool:
                stopping = pool.submit(head.run, "stop", "--now", job)
                assert head.run("ps").returncode == 0  # takes about as long as the stop needs to come to the lock
                other.execute("COMMIT")
                assert stopping.result().returncode == 0, stopping.result().stderr
        finally:
            if other.in_transaction:
                other.execute("ROLLBACK")
    await_state(head, job, "STOPPED")


def test_a_sparse_error_file_of_900_mib_leaves_a_few_blocks_here_and_is_reported(head: Head) -> None:
    (head.folder / "rank.py").write_text(SPARSE)
    job = head.submit()
    assert head.run("wait", job).returncode == 0
    await_that(lambda: (head.state_dir / "jobs" / job / "attempt-1" / "complete").exists())
    copies = list((head.state_dir / "jobs" / job).glob("attempt-1/*/rank-*.error.0"))
    assert copies and all(copy.stat().st_size == 16 << 20 for copy in copies)
    assert allocated_bytes(head.state_dir) < 4 << 20
    limited = [event for event in head.show(job)["events"] if event["code"] == "file-limited"]
    assert limited and {event["values"]["size"] for event in limited} == {900 << 20}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m,mode=700", "none", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"this machine lets nobody mount: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    path = folder / "filler"
    with open(path, "ab", buffering=0) as file:
        for size in (65536, 4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return path


def test_a_head_whose_disk_is_full_says_so_and_goes_on_when_there_is_room(tmp_path: Path, small_disk: Path) -> None:
    """Its nodes' folders lie elsewhere: only the head's own disk is full, and the ranks write when it is."""
    head = Head(tmp_path)
    head.state_dir = small_disk / "state"
    head.state_dir.mkdir(mode=0o700)
    (tmp_path / "local").mkdir(mode=0o700)
    (head.state_dir / "local").symlink_to(tmp_path / "local")
    (head.folder / "rank.py").write_text(TALK)
    job = head.submit()
    await_state(head, job, "RUNNING")
    filler = fill(small_disk)
    try:
        (head.folder / "more").write_bytes(os.urandom(200_000))
        for file in (
            "job.yaml",
            str(Path(__file__).parents[2] / "jobs/quickstart.yaml"),
        ):  # a directory, and a bundled program
            refused = head.run("submit", file, "--detach", code=8)
            assert "No space left" in refused.stderr and "free disk space" in refused.stderr
            assert len(refused.stderr.splitlines()) == 2, refused.stderr
        (head.folder / "more").unlink()
        refused = head.run("submit", "job.yaml", "--detach", code=8)
        assert "free disk space" in refused.stderr
        assert head.run("ps").returncode == 0
        assert head.show(job)["job"]["state"] == "RUNNING"
        (head.folder / "go").touch()
        nodes = list((tmp_path / "local").glob("*/nodes/*/runs/*/attempt-1"))
        assert len(nodes) == 2
        await_that(lambda: all((path / "ended.json").exists() for path in nodes))
        stopping = head.run("stop", "--now", "--no-wait", job)
        assert stopping.returncode in (0, 8), stopping.stderr
        filler.unlink()
        await_that(lambda: head.show(job)["job"]["ended_at"] is not None)
        spool = head.state_dir / "jobs" / job / "attempt-1"
        await_that(lambda: (spool / "complete").exists())
        for node in nodes:
            for path in node.glob("rank-*.out.0"):
                assert (spool / node.parents[4].name / path.name).read_bytes() == path.read_bytes()
    finally:
        filler.unlink(missing_ok=True)
        head.run("stop", "--now", job)
        head.run("controller", "stop")


def test_an_idle_controller_ends_and_the_next_verb_that_needs_one_starts_one(head: Head) -> None:
    os.environ["ASCENDRUN_CONTROLLER_IDLE_S"] = "0.5"
    try:
        first = head.submit()
        assert head.run("wait", first).returncode == 0
        await_that(lambda: not is_running(head.state_dir))
        second = head.submit()
        assert head.run("wait", second).returncode == 0
        await_that(lambda: not is_running(head.state_dir))
        head.run("doctor", "job.yaml", "--quick")
        await_that(lambda: not is_running(head.state_dir))  # an ended survey keeps nobody busy
    finally:
        del os.environ["ASCENDRUN_CONTROLLER_IDLE_S"]


def test_a_terminal_that_closes_in_mid_follow_ends_the_command_and_nothing_else(head: Head) -> None:
    job = long_job(head)
    us, them = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "ascendrun", "logs", "-f", job],
        stdin=them,
        stdout=them,
        stderr=them,
        env=head.environ(),
        cwd=head.folder,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    ) as follow:
        os.close(them)
        assert os.read(us, 1)
        os.close(us)
        follow.wait(timeout=DEADLINE_S)
    assert head.show(job)["job"]["state"] == "RUNNING"
    assert head.run("controller", "status").returncode == 0


def test_a_frozen_controller_is_unknown_and_makes_no_verb_hang_and_a_killed_one_is_replaced(head: Head) -> None:
    def state() -> tuple[str, str]:
        job = head.show("j-0001")["job"]
        return job["state"], job["last_state"]

    long_job(head)
    pid = int((head.state_dir / "controller.lock").read_text())
    pulse = head.state_dir / "pulse.json"
    os.kill(pid, signal.SIGSTOP)
    try:
        for verb in (["ps"], ["show", "j-0001"], ["logs", "j-0001"]):
            head.run(*verb, code=0)
        old = json.loads(pulse.read_text())
        pulse.write_text(json.dumps({**old, "boot_s": old["boot_s"] - 60, "at_s": old["at_s"] - 60}))
        assert state() == ("UNKNOWN", "RUNNING")
    finally:
        os.kill(pid, signal.SIGCONT)
    await_that(lambda: state() == ("RUNNING", "RUNNING"))
    os.kill(pid, signal.SIGKILL)
    await_that(
        lambda: state() == ("RUNNING", "RUNNING") and int((head.state_dir / "controller.lock").read_text()) != pid
    )


def test_commands_that_change_jobs_and_hosts_print_for_programs_what_they_changed(head: Head) -> None:
    job = long_job(head)
    waits = head.submit()

    def job_of(*argv: str) -> dict[str, Any]:
        [found] = head.ask(*argv)["jobs"]
        return dict(found)

    def machine_of(*argv: str) -> dict[str, Any]:
        [found] = head.ask(*argv)["machines"]
        assert found["names"] == ["a"]
        return dict(found)

    assert (job_of("hold", waits)["id"], job_of("hold", waits)["held_by"]) == (waits, getpass.getuser())
    assert job_of("unhold", waits)["held_by"] is None
    before_s = time.time()
    planned = machine_of("drain", "a", "--at", "2h", "--for", "4h", "--reason", "optics")
    assert planned["since_s"] - before_s == pytest.approx(2 * 3600, abs=600) and planned["state"] != "draining"
    assert planned["until_s"] - planned["since_s"] == 4 * 3600 and planned["by"] == getpass.getuser()
    assert head.run("drain", "a", "--at", "2h", "--now").returncode == 2
    machine_of("undrain", "a", "--no-check")
    assert machine_of("drain", "a")["state"] == "draining", "the job runs there"
    assert machine_of("undrain", "a", "--no-check")["reason"] is None
    assert job_of("stop", waits)["state"] == "STOPPED" and job_of("stop", job, "--now")["state"] == "STOPPED"
    assert job_of("retry", waits)["id"] == waits
    reasons = [event["values"].get("reason") or {} for event in head.show(waits)["events"]]
    assert [one["values"]["by"].partition("@")[0] for one in reasons if one.get("code") == "retried-by-user"] == [
        getpass.getuser()
    ]
    assert job_of("stop", waits, "--now")["state"] == "STOPPED"
    [removed] = head.ask("rm", waits, "--force")["hosts"][-1:]
    assert (removed["host"], removed["refused"]) == (None, None)
    released = head.run("release", "a", "-o", "json")
    assert (released.returncode, json.loads(released.stdout)["machines"][0]["names"]) == (4, ["a"])
    assert machine_of("lost", "a", "--force", "--reason", "rack")["state"] == "drained"
    machine_of("undrain", "a", "--no-check")
