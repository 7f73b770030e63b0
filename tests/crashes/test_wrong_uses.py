"""Wrong uses of outputs, fetch, cp, rm and shell: each has its exit code and one message; nothing is harmed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_controller_crashes import Head, await_that, head
from test_head_bad_days import await_state

from ascendrun.cli import main

__all__ = ["head"]

WORK = """
import os, signal, sys
os.makedirs("out", exist_ok=True)
open("out/model.bin", "w").write("trained")
with open("out/huge", "wb") as file:
    file.truncate(8 << 40)  # without a byte on disk: more than any disk of a test has
print("ready", flush=True)
if sys.argv[1] == "hang":
    signal.pause()
"""
JOBS = {  # name: (more of its file, its state)
    "done": ("command: [{python}, {script}, end]\noutputs: [out/model.bin]\noutputs_from: all\n", "SUCCEEDED"),
    "bare": ("command: [{python}, {script}, end]\n", "SUCCEEDED"),
    "never": ("command: [no-such-program]\noutputs: [out]\n", "FAILED"),
    "pipe": ("stages: [{{name: one, command: [{python}, {script}, end]}}]\n", "SUCCEEDED"),
    "live": ("command: [{python}, {script}, hang]\n", "RUNNING"),
}
WRONG = [  # (command line, exit code, what the message names)
    ("fetch nothing", 4, "nothing"),
    ("fetch done none*.csv", 4, "none*.csv"),
    ("fetch done out/none out/model.bin", 4, "out/none"),
    ("fetch done ../x", 2, "../x"),
    ("fetch done ~/x", 2, "~/x"),
    ("fetch done ''", 2, "PATH"),
    ("fetch bare", 4, "declares no outputs"),
    ("fetch never", 7, "was not started"),
    ("fetch live out/huge", 6, "disk"),
    ("fetch done -O a.file", 2, "a.file"),
    ("cp a.file folder", 2, "JOB:PATH"),
    ("cp done:out live:out", 2, "JOB:PATH"),
    ("cp a.file done:out .", 2, "JOB:PATH"),
    ("cp done:out a.file", 2, "a.file"),
    ("cp none.bin done:", 2, "none.bin"),
    ("cp j-0099:out .", 4, "j-0099"),
    ("cp done:none .", 4, "none"),
    ("cp done:../x .", 2, "../x"),
    ("cp done: .", 2, "PATH"),
    ("cp done:out . --rank 99", 4, "99"),
    ("cp a.file done:/proc/none", 6, "/proc/none"),
    ("cp never:out .", 7, "was not started"),
    ("cp a.file never:", 7, "was not started"),
    ("cp @racks:/x .", 2, "racks"),
    ("rm nothing", 4, "nothing"),
    ("rm live", 7, "RUNNING"),
    ("rm PIPE-1", 7, "PIPE"),
    ("rm done --froce", 2, "--froce"),
    ("shell nothing", 4, "nothing"),
    ("shell live --rank 99", 4, "99"),
    ("shell live --rank x", 2, "--rank"),
    ("shell done", 7, "rank 0"),
    ("shell never", 7, "FAILED"),
]


def start(head: Head, *names: str) -> dict[str, str]:
    """Submit jobs; return their ids when each is in its state."""
    (head.folder / "work.py").write_text(WORK)
    ids: dict[str, str] = {}
    for name in names:
        more = JOBS[name][0].format(python=json.dumps(sys.executable), script=json.dumps(str(head.folder / "work.py")))
        path = head.folder / f"{name}.yaml"
        path.write_text(f"name: {name}\nhostfile: two.hosts\ndevices: {{type: cpu, per_node: 1}}\n{more}")
        done = head.run("submit", path.name, "--detach", "-o", "json")
        assert done.returncode == 0, done.stderr
        ids[name] = str(json.loads(done.stdout)["id"])
    for name in names:
        await_state(head, ids[name], JOBS[name][1])
    return ids


def remove(head: Head, name: str, code: int) -> str:
    """Remove a job; return the messages of the command that ended so. Before its logs are here it is refused with 7."""
    last: list[str] = []

    def has_ended_so() -> bool:
        done = head.run("rm", name)
        last[:] = [done.stderr]
        return done.returncode == code

    await_that(has_ended_so)
    return last[0]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Head, dict[str, str]]]:
    """Jobs by name, each in its state."""
    head = Head(tmp_path_factory.mktemp("wrong"))
    (head.folder / "a.file").write_text("")
    (head.folder / "folder").mkdir()
    ids = start(head, *JOBS)
    await_that(lambda: head.run("logs", ids["live"]).stdout.count("ready") > 0)
    assert head.run("fetch", "done").returncode == 0
    yield head, ids
    head.run("stop", "--now", ids["live"])
    head.run("controller", "stop")


@pytest.mark.slow
@pytest.mark.parametrize(("line", "code", "named"), WRONG, ids=[line for line, _, _ in WRONG])
def test_a_wrong_use_has_one_message(
    world: tuple[Head, dict[str, str]],
    line: str,
    code: int,
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    head, ids = world
    monkeypatch.setenv("ASCENDRUN_STATE_DIR", str(head.state_dir))
    monkeypatch.setenv("LANG", "C.UTF-8")
    monkeypatch.chdir(head.folder)
    before = sorted(path for path in head.state_dir.rglob("outputs/*"))
    argv = ["" if word == "''" else word.replace("PIPE", ids["pipe"]) for word in line.split()]
    assert main(argv) == code
    printed = capfd.readouterr()
    assert printed.err.count("error: ") <= 1 and "Traceback" not in printed.err, printed.err
    text = printed.err + printed.out
    assert named.replace("PIPE", ids["pipe"]) in text, text
    assert sorted(path for path in head.state_dir.rglob("outputs/*")) == before
    assert not list(Path().glob("[!a-z]*")), "nothing is written beside"


@pytest.mark.slow
def test_rm_removes_every_stage_of_a_pipeline_and_keeps_a_job_with_a_silent_host(head: Head) -> None:
    ids = start(head, "done", "pipe")
    assert head.run("fetch", "done").returncode == 0
    remove(head, "pipe", 0)
    assert head.run("show", "pipe").returncode == 4
    local, jobs = head.state_dir / "local", head.state_dir / "jobs"
    assert not [*local.glob(f"*/nodes/*/runs/*{ids['pipe']}*"), *jobs.glob(f"{ids['pipe']}*")]
    assert head.run("controller", "stop").returncode == 0
    (local / "b").rename(local / "aside")
    (local / "b").write_text("")  # no agent can be started there
    assert "b: " in remove(head, "done", 6)
    outputs = head.state_dir / "outputs" / ids["done"]
    assert head.show("done")["job"]["state"] == "SUCCEEDED" and outputs.is_dir()
    assert head.run("controller", "stop").returncode == 0
    (local / "b").unlink()
    (local / "aside").rename(local / "b")
    remove(head, "done", 0)
    assert not list(local.glob(f"*/nodes/*/runs/*{ids['done']}")) and not outputs.exists()
