"""Wrong uses around outputs, ranks and progress, with real agents on this machine: one error each, and what to do."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_controller_crashes import Head, await_that

WRITES = "open('model.bin', 'w').write('x' * 200_000)\n"
LIVES = "import os, time\nif os.environ['RANK'] != '1': time.sleep(600)\n"
FILES = {
    "plain.log": "the loss of the next step is not known\n",
    "steps.log": "iter 1: loss 2.5\n",
    "never.yaml": "name: x\ncommand: [python3, -m, rank]\nprogress: {pattern: 'round (?P<step>[0-9]+) of'}\n",
    "regex.yaml": "name: x\ncommand: [python3, -m, rank]\nprogress: {pattern: '(?P<step>'}\n",
    "group.yaml": "name: x\ncommand: [python3, -m, rank]\nprogress: {pattern: 'round ([0-9]+)'}\n",
    "home.yaml": "name: x\ncommand: [python3, -m, rank]\noutputs: ['~/out']\n",
    "parent.yaml": "name: x\ncommand: [python3, -m, rank]\noutputs: [../out]\n",
    "disk.yaml": "name: x\ncommand: [python3, -m, rank]\noutputs: [/]\n",
    "inner.yaml": "name: x\ncommand: [accelerate, launch, rank.py]\n",
    "fabric.yaml": "name: x\ncommand: [fabric, run, rank.py]\n",
}
SOME_FAILED = 6
USES: list[tuple[str, int, str]] = [
    ("fetch nosuch", 4, "nosuch"),
    ("fetch ENDED nosuch.bin", 4, "nosuch.bin"),
    ("fetch ENDED *.nothing", 4, "*.nothing"),
    ("fetch ENDED ../up", 2, "../up"),
    ("fetch ENDED ~/x", 2, "~"),
    ("fetch ENDED", 4, "ascendrun fetch ENDED PATH"),
    ("fetch ENDED model.bin -O plain.log", 2, "plain.log"),
    ("fetch ENDED model.bin -O full", 6, "disk"),
    ("cp nosuch:a .", 6, "not reachable"),
    ("cp ENDED:nosuch .", 4, "nosuch"),
    ("cp plain.log other", 2, "JOB:PATH"),
    ("cp ENDED:model.bin ENDED:copy", 2, "JOB:PATH"),
    ("cp missing.txt ENDED:copy", 2, "missing.txt"),
    ("cp ENDED:model.bin plain.log", 2, "plain.log"),
    ("rm LIVE", 7, "LIVE"),
    ("rm nosuch", 4, "nosuch"),
    ("shell ENDED --rank 0", 7, "ENDED"),
    ("shell LIVE --rank 9", 4, "9"),
    ("shell LIVE --rank x", 2, "x"),
    ("shell LIVE --rank 1 -- true", 7, "1"),
    ("logs ENDED --rank 9", 4, "9"),
    ("validate --sample missing.log", 2, "missing.log"),
    ("validate --sample plain.log", 2, "progress.pattern"),
    ("validate never.yaml --sample steps.log", 2, "progress.pattern"),
    ("validate regex.yaml", 2, "regex.yaml:3"),
    ("validate group.yaml", 2, "step"),
    ("validate home.yaml", 2, "~"),
    ("validate parent.yaml", 2, ".."),
    ("validate disk.yaml", 2, "whole disk"),
    ("validate inner.yaml", 2, "launch"),
    ("validate fabric.yaml", 2, "fabric"),
    ("history --since soon", 2, "soon"),
    ("prune --older soon", 2, "soon"),
    ("init nosuch", 4, "nosuch"),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Head, dict[str, str]]]:
    head = Head(tmp_path_factory.mktemp("wrong"))
    full = head.folder / "full"
    full.mkdir()
    is_full = os.geteuid() == 0 and not subprocess.call(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", full])
    jobs = {}
    for name, text in FILES.items():
        (head.folder / name).write_text(text)
    for name, script, state in (("ENDED", WRITES, "SUCCEEDED"), ("LIVE", LIVES, "RUNNING")):
        (head.folder / "rank.py").write_text(script)
        jobs[name] = head.submit()
        await_that(lambda name=name, state=state: head.show(jobs[name])["job"]["state"] == state)
    await_that(lambda: head.show(jobs["LIVE"])["ranks"][1]["exit_code"] == 0)
    jobs["full"] = "yes" if is_full else ""
    yield head, jobs
    head.run("stop", "--now", jobs["LIVE"])
    head.run("controller", "stop")
    if is_full:
        subprocess.call(["umount", full])


def test_there_are_at_least_25() -> None:
    assert len({use for use, _, _ in USES}) >= 25


@pytest.mark.parametrize(("use", "code", "words"), USES, ids=[use for use, _, _ in USES])
def test_a_wrong_use_has_one_clear_message(world: tuple[Head, dict[str, str]], use: str, code: int, words: str) -> None:
    head, jobs = world
    if "full" in use and not jobs["full"]:
        pytest.skip("requires root, to mount a full disk")
    for name in ("ENDED", "LIVE"):
        use, words = use.replace(name, jobs[name]), words.replace(name, jobs[name])
    done = head.run(*use.split())
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    if code == SOME_FAILED:  # the column ERROR of the host has it
        header, *errors = done.stdout.splitlines()
        assert "ERROR" in header and words in errors[0], done.stdout
    else:
        assert words in done.stderr, done.stderr
    assert len(errors) == 1, (done.stdout, done.stderr)
    assert "Traceback" not in done.stdout + done.stderr


def test_a_full_disk_leaves_no_file_that_looks_whole(world: tuple[Head, dict[str, str]]) -> None:
    head, _ = world
    assert not list(Path(head.folder, "full").rglob("model.bin"))
