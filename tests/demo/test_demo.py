"""The demo runs real commands to its end, and leaves nothing behind, however it ends."""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Callable

import pexpect
import pytest

from ascendrun.cli.app import ALIASES, BY_NAME
from tests.docs.transcript import find_mismatch, read_block

MARK = "ASCENDRUN_DEMO"
STORY_S, END_S = 500.0, 120.0
DEMO = [sys.executable, "-m", "ascendrun", "demo"]
CHECKOUT = str(Path(__file__).resolve().parents[2])
LINES = 110
"""Fewer than the whole demo prints: at any of them it can still be interrupted."""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """A folder for temporary files of the test's own, so that what is left there is seen."""
    (tmp_path / "tmp").mkdir()
    path = os.pathsep.join([CHECKOUT, os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def start(environ: dict[str, str]) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def popen(*words: str) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [*DEMO, *words],
                env=environ,
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
        return started[-1]

    yield popen
    for one in started:
        one.kill()
        assert one.stdout is not None
        one.stdout.close()
        one.wait()


def folders(environ: dict[str, str]) -> list[Path]:
    return sorted(Path(environ["TMPDIR"]).iterdir())


def processes(environ: dict[str, str]) -> list[str]:
    """All that the demo of this test started and that still runs: its mark names a folder in our own TMPDIR."""
    mark, found = f"{MARK}={environ['TMPDIR']}/".encode(), []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if any(one.startswith(mark) for one in (path / "environ").read_bytes().split(b"\0")):
                found.append(f"{path.name} {(path / 'cmdline').read_bytes()!r}")
        except OSError:
            continue
    return found


def read_lines(demo: subprocess.Popen[str], count: int) -> list[str]:
    assert demo.stdout is not None
    return [line for _, line in zip(range(count), demo.stdout)]


def end(demo: subprocess.Popen[str]) -> str:
    """What it still says until it has ended."""
    return demo.communicate(timeout=END_S)[0]


@pytest.mark.timeout(600)  # half a minute, and what a busy machine makes of that
def test_the_story_is_told_to_its_end_and_nothing_is_left(start: Start, environ: dict[str, str]) -> None:
    demo = start()
    said = demo.communicate(timeout=STORY_S)[0]
    assert demo.returncode == 0, said
    assert (folders(environ), processes(environ)) == ([], [])

    before, after = said.split("ascend clear nodes/npu2")
    assert re.search(r"FAIL .*\n  npu2  .*\[npu-health-alarm\]\n      \| NPU 3 .*health Alarm", before), said
    assert re.findall(r"^(?:npus|driver|cann) +(.*)", before, re.M) == ["4 x 910B3", "24.1.rc2", "8.0.RC3"], said
    assert "npu-health-alarm" not in after, said
    pid = re.search(r"^\$ kill -9 (\d+)$", after, re.M)
    assert pid and re.search(rf"^\| 3 +0 +\| {pid[1]} +\| python", after, re.M), "the table does not show rank 3"
    assert re.search(r"first failure: .*rank 3 on npu2.* signal 9", after), said
    assert "ConnectionError: rank 3 disconnected" in after, said
    assert re.search(r"^evidence$", after, re.M), said
    assert re.search(r"^  (consequence|teardown) +ranks? [0-2]", after, re.M), said
    resumed = re.search(r"resumes after step (\d+)", after)
    assert resumed and int(resumed[1]) >= 30, said
    assert re.search(r"^j-0002 SUCCEEDED .*step 140/140 · loss 0\.0", after, re.M), said
    losses = [float(loss) for loss in re.findall(r"step \d+/140 loss ([\d.]+)", after)]
    assert losses[0] > 10 * losses[-1], losses

    shown = read_block((Path(CHECKOUT) / "README.md").read_text(encoding="utf-8"))
    assert shown and find_mismatch(["...", *shown, "..."], said.splitlines()) is None, said

    verbs = re.findall(r"^\$ ascendrun (\S+)", said, re.M)
    assert {"doctor", "submit", "exec", "ps", "logs", "explain"} <= set(verbs) <= {*BY_NAME, *ALIASES}


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, *[pytest.param(signal.SIGINT, marks=pytest.mark.thorough)] * 3]
)
def test_a_signal_at_any_moment_leaves_nothing(start: Start, environ: dict[str, str], number: signal.Signals) -> None:
    count = random.randrange(1, LINES)
    demo = start()
    lines = read_lines(demo, count)
    with contextlib.suppress(subprocess.TimeoutExpired):
        demo.wait(timeout=random.random() / 2)  # not always just after a line
    demo.send_signal(number)
    said = f"{number.name} after line {count}:\n{''.join(lines)}---\n{end(demo)}"
    assert demo.returncode == 128 + number, said
    assert (folders(environ), processes(environ)) == ([], []), said


def test_impatience_is_no_harm(start: Start, environ: dict[str, str]) -> None:
    demo = start()
    while not any("j-0001 submitted" in line for line in read_lines(demo, 1)):
        assert demo.poll() is None
    for _ in range(5):
        demo.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            demo.wait(timeout=0.1)
    said = end(demo)
    assert demo.returncode == 130, said
    assert (folders(environ), processes(environ)) == ([], []), said


def test_a_reader_that_goes_away_ends_it(start: Start, environ: dict[str, str]) -> None:
    demo = start()
    read_lines(demo, 20)
    assert demo.stdout is not None
    demo.stdout.close()
    assert demo.wait(timeout=END_S) == 141
    assert (folders(environ), processes(environ)) == ([], [])


def test_kept_means_files_only_and_they_can_be_looked_at(start: Start, environ: dict[str, str]) -> None:
    demo = start("--keep")
    while not any("j-0001 submitted" in line for line in read_lines(demo, 1)):
        assert demo.poll() is None
    demo.send_signal(signal.SIGINT)
    said = end(demo)
    assert processes(environ) == [], said
    (folder,) = folders(environ)
    assert f"the directory is kept: {folder}" in said
    ps = subprocess.run(
        [sys.executable, "-m", "ascendrun", "ps", "--all"],
        text=True,
        capture_output=True,
        env={**environ, "ASCENDRUN_STATE_DIR": str(folder / "state")},
        timeout=60,
    )
    assert "demo  STOPPED" in ps.stdout, ps.stdout + ps.stderr
    assert processes(environ) == []


def test_at_a_terminal_enter_goes_on_and_control_c_ends_it(environ: dict[str, str]) -> None:
    child = pexpect.spawn(DEMO[0], DEMO[1:], env=environ, encoding="utf-8", timeout=END_S, dimensions=(40, 120))
    try:
        child.expect("Enter: next step")
        assert "is injected" not in child.before
        child.sendline("")
        child.expect("is injected")
        child.expect("Enter: next step")
        child.sendintr()
        child.expect("was removed")
        child.expect(pexpect.EOF)
    finally:
        child.close(force=True)
    assert child.exitstatus == 130
    assert (folders(environ), processes(environ)) == ([], [])
