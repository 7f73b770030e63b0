"""Job files that the controller reads for `submit`: the same jobs as the command reads, or none."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from ascendrun.cluster import submitting
from ascendrun.cluster.submitting import StageChoice, read_by_controller, read_jobs
from ascendrun.core.errors import ConflictError, InvalidInputError
from ascendrun.core.settings import Settings
from ascendrun.head.protocol.command_place import reading_place
from ascendrun.head.protocol.control_messages import JobRead, ReadJob
from ascendrun.head.protocol.control_socket import ControlServer
from ascendrun.head.survey.job_reading import read_for_command, read_submissions
from ascendrun.head.waiting import get_within, in_background

COMMAND = "name: j\ncommand: [python3, -c, pass]\ndevices: {type: cpu, per_node: 1}\nhostfile: hosts\n"
PROGRAM = "name: j\nprogram: trajectory\ndevices: {type: cpu, per_node: 1}\nhostfile: hosts\n"
STAGES = COMMAND + "stages: [{name: one}, {name: two}]\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "hosts").write_text("n1 addr=local\nn2 addr=10.0.0.2\n")
    return tmp_path


def request(folder: Path, text: str, **changes: object) -> ReadJob:
    (folder / "job.yaml").write_text(text)
    asked = ReadJob(str(folder / "job.yaml"), "k", place=reading_place(), user="anna", hostfile=str(folder / "hosts"))
    return replace(asked, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", [COMMAND, STAGES, COMMAND + "workdir: {path: .}\n"], ids=["job", "stages", "workdir"])
def test_the_controller_reads_the_same_jobs_as_the_command(folder: Path, text: str) -> None:
    asked = request(folder, text, overrides=("env.A=1",), exclude="n2", priority=3)
    found = read_for_command(asked, folder / "state")
    own = read_submissions(Settings(folder / "state"), asked)
    assert {(one.user, one.priority, one.hosts[0].name, len(one.hosts)) for one in own} == {("anna", 3, "n1", 1)}
    assert list(found.submissions) == [one.to_json() for one in own]
    assert JobRead.from_header(found.to_header()) == found, "the same on the wire"


@pytest.mark.parametrize(
    ("text", "needs"), [(COMMAND, False), (PROGRAM, True), (PROGRAM + "python: /opt/bin/python3\n", False)]
)
def test_packages_are_needed_for_a_bundled_program_on_this_machine_in_its_own_python(
    folder: Path, text: str, needs: bool
) -> None:
    args = "args: {data_path: ships.csv}\n" if "program" in text else ""
    assert read_for_command(request(folder, text + args), folder / "state").needs_stack is needs
    assert read_for_command(request(folder, text + args, only="n2"), folder / "state").needs_stack is False


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        (COMMAND, {"place": ("/opt/other/site-packages", "/home/anna")}),
        (COMMAND + "sweep: {env.A: ['1', '2']}\n", {}),
        (COMMAND.replace("hostfile: hosts", "engine: {type: hosts, hostfile: hosts}"), {"hostfile": None}),
    ],
    ids=["another-python", "sweep", "engine"],
)
def test_what_the_command_may_read_in_another_way_is_refused(
    folder: Path, text: str, changes: dict[str, object]
) -> None:
    with pytest.raises((ConflictError, InvalidInputError)):
        read_for_command(request(folder, text, **changes), folder / "state")


def test_without_a_controller_the_command_reads_the_file_itself(folder: Path) -> None:
    assert read_by_controller(folder / "state", request(folder, COMMAND)) is None
    read = read_jobs(Settings(folder / "state"), request(folder, COMMAND), StageChoice(), engine=None)
    assert [one["spec"]["name"] for one in read.submissions] == ["j"]


def test_files_of_the_process_of_the_command_are_not_read_by_the_controller(folder: Path) -> None:
    """As of `submit <(command)`: the number of a file may be the end of a connection in the controller."""
    source, target = os.pipe()
    os.write(target, b"n1 addr=local\n")
    os.close(target)
    for changes in ({"hostfile": f"/dev/fd/{source}"}, {"file": f"/proc/self/fd/{source}"}):
        with pytest.raises(ConflictError):
            read_for_command(replace(request(folder, COMMAND), **changes), folder / "state")  # type: ignore[arg-type]
    assert os.read(source, 100) == b"n1 addr=local\n", "not a byte was taken"
    os.close(source)


def in_time(call: Callable[[], JobRead]) -> JobRead | InvalidInputError:
    """What a call returns or raises; it fails if that takes longer than any test."""

    def run() -> None:
        try:
            ended.put(call())
        except InvalidInputError as error:
            ended.put(error)

    ended: queue.SimpleQueue[JobRead | InvalidInputError] = queue.SimpleQueue()
    in_background(run, "in time")
    return get_within(ended, 60.0)


def test_a_controller_that_does_not_end_reading_is_not_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submitting, "READ_S", 0.1)
    (folder / "state").mkdir()
    asked: list[str] = []
    server = ControlServer(folder / "state", lambda op, *_: asked.append(op), will_restart=lambda _: False)
    server.start()
    with closing(server):
        wanted = request(folder, COMMAND)
        read = in_time(lambda: read_jobs(Settings(folder / "state"), wanted, StageChoice(), engine=None))
    assert asked == [ReadJob.OP] and isinstance(read, JobRead)
    assert list(read.submissions) == [one.to_json() for one in read_submissions(Settings(folder / "state"), wanted)]


@pytest.mark.parametrize("name", ["job.yaml", "hosts"])
def test_a_fifo_in_place_of_a_file_is_an_error_that_names_it(folder: Path, name: str) -> None:
    asked = request(folder, COMMAND)
    (folder / name).unlink()
    os.mkfifo(folder / name)  # who opens it waits for a writer
    for read in (
        lambda: read_jobs(Settings(folder / "state"), asked, StageChoice(), engine=None),
        lambda: read_for_command(asked, folder / "state"),
    ):
        error = in_time(read)
        assert isinstance(error, InvalidInputError)
        assert [one.file for one in error.problems] == [str(folder / name)] and "fifo" in str(error.problems[0])


def test_a_job_file_and_a_hostfile_of_a_shells_pipe_are_read_once_and_are_valid(folder: Path) -> None:
    """As of `plan -H <(command) <(command)`: what is read from a pipe is gone, and a command makes several calls."""
    pipes = [os.pipe() for _ in range(2)]
    for (_, target), text in zip(pipes, (COMMAND, "n1 addr=local\n")):
        os.write(target, text.encode())
        os.close(target)
    job, hosts = (f"/dev/fd/{source}" for source, _ in pipes)
    for _ in range(2):
        (found,) = read_submissions(Settings(folder / "state"), ReadJob(job, "k", hostfile=hosts))
        assert (found.spec.name, [host.name for host in found.hosts]) == ("j", ["n1"])
    for source, _ in pipes:
        os.close(source)
