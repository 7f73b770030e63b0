"""The controller dies at every step that it takes, on real agents and ranks of this machine; the job never notices.

A few deaths run always; `--every-crash` sweeps over all steps of a job's life.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ascendrun.core.hosts import Host
from ascendrun.head.loop.controller import RESTING_TICK_S
from ascendrun.head.loop.watch import STALL_S
from ascendrun.head.protocol.control_messages import ChangeMachines, ReadJob
from ascendrun.head.protocol.control_socket import ControlClient
from ascendrun.node import wire
from tests.lib.vcluster.processes import await_that

CODE = Path(__file__).resolve().parents[2]
DEADLINE_S = 150.0

RANK = """
import os, sys, time
with open(os.path.join(sys.argv[1], "starts"), "a") as file:
    file.write("%s.%s\\n" % (os.environ["RANK"], os.environ["ASCENDRUN_ATTEMPT"]))
for number in range(20):
    print("line", number, "of rank", os.environ["RANK"], flush=True)
    time.sleep(0.05)
"""


class Head:
    """The command line with a state dir of its own; local hosts, so that only ascendrun itself is in play."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state_dir = folder / "state"
        (folder / "rank.py").write_text(RANK)
        (folder / "two.hosts").write_text("a slots=2 addr=local\nb slots=2 addr=local\n")
        command = [sys.executable, str(folder / "rank.py"), str(folder)]
        (folder / "job.yaml").write_text(f"name: crashing\ncommand: {json.dumps(command)}\nhostfile: two.hosts\n")

    def environ(self, failpoint: str = "") -> dict[str, str]:
        more = {"ASCENDRUN_FAILPOINT": failpoint, "ASCENDRUN_CONTROLLER_GUARD": "test"} if failpoint else {}
        return {**os.environ, "PYTHONPATH": str(CODE), "ASCENDRUN_STATE_DIR": str(self.state_dir), **more}

    def run(self, *argv: str, code: int | None = None) -> subprocess.CompletedProcess[str]:
        """Without a traceback, whatever happened; `code`: the exit code that it must have."""
        done = subprocess.run(
            [sys.executable, "-m", "ascendrun", *argv],
            env=self.environ(),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert code in (None, done.returncode) and "Traceback" not in done.stderr, (
            f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done

    def doomed_controller(self, failpoint: str) -> subprocess.Popen[bytes]:
        """A controller that will die at the failpoint; returns when it answers or has died."""
        process = subprocess.Popen(
            [sys.executable, "-m", "ascendrun", "controller", "run"],
            cwd=self.folder,
            env=self.environ(failpoint),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        await_that(lambda: process.poll() is not None or self.run("controller", "status").returncode == 0)
        return process

    def ask(self, *argv: str) -> Any:
        return json.loads(self.run(*argv, "-o", "json", code=0).stdout)

    def submit(self, file: str = "job.yaml", *options: str) -> str:
        return str(self.ask("submit", file, "--detach", *options)["id"])

    def states(self) -> dict[str, str]:
        """By job."""
        return {job["id"]: job["state"] for job in self.ask("ps", "-a")["jobs"]}

    def show(self, job: str) -> dict[str, Any]:
        return dict(self.ask("show", job))

    def story(self, job: str, doomed: subprocess.Popen[bytes]) -> str:
        """What a controller did, for a failure: its log, the events of the job, and the files that it has of it."""
        log, files = self.state_dir / "controller.log", sorted((self.state_dir / "jobs" / job).rglob("*"))
        events = json.dumps(self.show(job)["events"], indent=1)
        running = self.run("controller", "status").stdout
        told = log.read_text() if log.exists() else ""
        return f"first controller: {doomed.poll()}\n{running}\n{told}\n{events}\n" + "\n".join(map(str, files))

    def starts(self) -> list[str]:
        return sorted((self.folder / "starts").read_text().split())


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    head = Head(tmp_path)
    yield head
    listed = head.run("ps", "-o", "json")  # those that have not ended
    known = [job["id"] for job in json.loads(listed.stdout)["jobs"]] if listed.returncode == 0 else None
    for job in sorted(path.name for path in (head.state_dir / "jobs").glob("j-*")) if known is None else known:
        head.run("stop", "--now", job)
    head.run("controller", "stop")


ALWAYS = [
    "submit.before_txn",
    "submit.after_commit_before_ack",
    "controller.before_save:1",
    "controller.before_save:2",
    "controller.after_save:2",
    "controller.after_save:4",
    "controller.after_save:6",
    "controller.before_save:7",
    "spool.before_complete",  # the job has ended; only who looks at it starts the next controller
]
STEPS_AT_LEAST = 7
"""So many times a job's record is stored at the least; what comes together is stored together, so it may be more."""
EVERY = [f"controller.{name}:{count}" for count in range(1, 21) for name in ("before_save", "after_save")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "failpoint" in metafunc.fixturenames:
        chosen = [*ALWAYS, *EVERY] if metafunc.config.getoption("--every-crash") else ALWAYS
        metafunc.parametrize("failpoint", chosen)


def test_a_job_survives_the_death_of_the_controller_at(head: Head, failpoint: str) -> None:
    doomed = head.doomed_controller(f"{failpoint}=kill")
    job = head.submit()
    waited = head.run("wait", job)
    assert waited.returncode == 0, f"{waited.stderr}\n{json.dumps(head.show(job)['events'], indent=1)}"
    detail = head.show(job)
    attempt = detail["job"]["attempt"]
    assert [*head.states()] == [job]
    assert head.starts() == [f"{rank}.{attempt}" for rank in range(4)], "each rank starts exactly once"
    spool = head.state_dir / "jobs" / job / f"attempt-{attempt}"
    await_that(lambda: (spool / "complete").exists(), lambda: head.story(job, doomed))
    for rank in range(4):
        copies = list(spool.glob(f"*/rank-{rank}.out.0"))
        assert [copy.read_text() for copy in copies] == ["".join(f"line {n} of rank {rank}\n" for n in range(20))]
    if doomed.poll() is None:  # the job had fewer steps than that: then nothing was tested
        doomed.terminate()
        doomed.wait()
        assert int(failpoint.partition(":")[2] or 1) > STEPS_AT_LEAST, f"{failpoint} was never reached"


class DeathBehindReading:
    """Stands before the socket of a controller, and kills it when it has read a job file, before the command knows."""

    def __init__(self, head: Head, controller: subprocess.Popen[bytes]) -> None:
        self._controller, self._behind = controller, head.folder / "behind"
        self.seen: list[tuple[str, bool]] = []
        """The requests that arrived before its death, and whether the replies were no errors."""
        self._folder = os.open(head.state_dir, os.O_RDONLY)  # the path of a socket must be short
        self._path = Path(f"/proc/self/fd/{self._folder}/{ControlClient.NAME}")
        self._path.rename(self._behind)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._path))
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while self._controller.poll() is None:
            command, _ = self._listener.accept()
            with command, socket.socket(socket.AF_UNIX) as controller:
                controller.connect(str(self._behind))
                self._pass_on(command, controller)

    def _pass_on(self, command: socket.socket, controller: socket.socket) -> None:
        requests, replies = wire.FrameReader(), wire.FrameReader()
        while data := command.recv(1 << 16):
            controller.sendall(data)
            for request, _ in requests.feed(data):
                reply = b""
                header: dict[str, Any] = {}
                while not header.get("last"):
                    reply += (chunk := controller.recv(1 << 16))
                    for header, _ in replies.feed(chunk):  # noqa: B007
                        pass
                self.seen.append((request["op"], header["ok"]))
                if request["op"] == ReadJob.OP:
                    self._controller.kill()
                    self._controller.wait(timeout=DEADLINE_S)
                    self._listener.close()
                    self._path.unlink()
                    os.close(self._folder)
                command.sendall(reply)


def test_a_controller_killed_between_reading_and_submission_costs_nothing(head: Head) -> None:
    death = DeathBehindReading(head, head.doomed_controller("never=kill"))
    job = head.submit()
    assert death.seen == [(ReadJob.OP, True)]
    assert head.run("wait", job).returncode == 0
    assert [*head.states()] == [job]
    assert head.starts() == [f"{rank}.1" for rank in range(4)], "each rank starts exactly once"


def test_a_drain_that_was_acknowledged_holds_after_the_controller_is_killed_at_once(head: Head) -> None:
    doomed = head.doomed_controller("never=kill")
    with ControlClient(head.state_dir) as client:
        client.call(ChangeMachines((Host("a", addr="local"),), "drain", "wang"), timeout_s=DEADLINE_S)
        doomed.kill()
    doomed.wait(timeout=DEADLINE_S)
    [machine] = head.ask("nodes", "--all")["machines"]
    assert (machine["names"], machine["state"], machine["by"]) == (["a"], "drained", "wang")


def test_a_second_controller_of_one_state_folder_refuses_and_harms_nothing(head: Head) -> None:
    first = head.doomed_controller("never=kill")
    head.run("controller", "run", code=7)
    assert head.run("controller", "status").returncode == 0
    head.run("controller", "stop")
    first.wait(timeout=DEADLINE_S)


def test_status_and_metrics_show_for_how_long_the_loop_was_held(head: Head) -> None:
    process = head.doomed_controller("")
    pid = int(head.ask("controller", "status")["pid"])

    def hold() -> Any:
        os.kill(pid, signal.SIGSTOP)
        until = time.monotonic() + RESTING_TICK_S + 2 * STALL_S  # beyond the next beat
        while time.monotonic() < until:
            head.run("schema")
        os.kill(pid, signal.SIGCONT)
        return head.ask("controller", "status")["pulse"]["stall"]

    def gauge() -> float:
        text = head.run("metrics", "--once").stdout
        return float(re.findall(r"^ascendrun_controller_loop_stall_seconds (\S+)$", text, re.MULTILINE)[0])

    await_that(lambda: hold() is not None)
    assert hold()["seconds"] >= STALL_S
    await_that(lambda: gauge() >= STALL_S)  # of the pulse, which is written at intervals
    head.run("controller", "stop", code=0)
    process.wait()
