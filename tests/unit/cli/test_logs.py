"""logs: merging, folding, choosing; and bytes as they were."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from story_cluster import Desk, make_job


@pytest.fixture
def story(desk: Desk) -> Desk:
    desk.cluster.view = make_job(state="SUCCEEDED", attempt=1, ended_at_s=2.0)
    for rank in range(4):
        desk.cluster.write(rank, b"start\n", at_s=100.0 + rank / 100)
        desk.cluster.write(rank, b"step of %d\n" % rank, at_s=110.0 + rank)
    desk.cluster.write(1, b"warning\n", stream="err", at_s=111.5)
    return desk


@pytest.mark.parametrize(
    ("argv", "lines"),
    [
        ([], ["[0-3] start", "[0] step of 0", "[1] step of 1", "[1] warning", "[2] step of 2", "[3] step of 3"]),
        (["--rank", "0,2-3"], ["[0,2-3] start", "[0] step of 0", "[2] step of 2", "[3] step of 3"]),
        (["--node", "n[2-9]"], ["[2-3] start", "[2] step of 2", "[3] step of 3"]),
        (["--tail", "2"], ["[2] step of 2", "[3] step of 3"]),
        (["--tail", "0"], []),
        (["--grep", "st.p of [13]"], ["[1] step of 1", "[3] step of 3"]),
        (["--grep", "step", "--tail", "1"], ["[3] step of 3"]),
        (["--stream", "err"], ["[1] warning"]),
        (["--stream", "err", "--no-prefix"], ["warning"]),
        (["--since", "1970-01-01T00:01:52Z"], ["[2] step of 2", "[3] step of 3"]),
    ],
)
def test_lines_are_chosen(story: Desk, argv: list[str], lines: list[str]) -> None:
    result = story.say("logs", "demo", *argv)
    assert (result.code, result.out.splitlines()) == (0, lines)


def test_timestamps_stand_first(story: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    out = story.say("logs", "demo", "-t", "--tail", "1").out
    assert out.startswith("1970-01-01T") and out.endswith("[3] step of 3\n")


def test_the_newest_attempt_is_shown_and_an_earlier_one_on_demand(story: Desk) -> None:
    story.cluster.view = make_job(state="SUCCEEDED", attempt=2, ended_at_s=2.0)
    story.cluster.write(0, b"again\n", at_s=200.0)
    assert story.say("logs", "demo").out == "[0] again\n"
    assert story.say("logs", "demo", "--attempt", "1", "--rank", "0").out == "[0] start\n[0] step of 0\n"
    assert story.say("logs", "demo", "--attempt", "3").code == 4


def test_raw_writes_every_byte(desk: Desk) -> None:
    data = random.Random(1).randbytes(300_000) + b"\x1b]0;title\x07\r\n\xff"
    desk.cluster.write(2, data)
    assert desk.say("logs", "demo", "--rank", "2", "--raw").raw_out == data


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--raw", "-f"], "--raw"),
        (["-f", "--attempt", "1"], "--attempt"),
        (["--rank", "8-"], "--rank"),
        (["--grep", "("], "--grep"),
        (["--since", "yesterday"], "--since"),
        (["--node", "n[1-"], "--node"),
        (["--tail", "-1"], "--tail"),
    ],
)
def test_a_wrong_choice_names_its_option(story: Desk, argv: list[str], words: str) -> None:
    result = story.say("logs", "demo", *argv)
    assert (result.code, result.out) == (2, "")
    assert words in result.err and "hint: ascendrun logs --help" in result.err


@pytest.mark.parametrize(
    ("argv", "words"),
    [([], "no output yet (QUEUED"), (["--rank", "9"], "its ranks are 0-3"), (["--node", "x"], "it runs on n1, n2")],
)
def test_nothing_to_show_is_explained(desk: Desk, argv: list[str], words: str) -> None:
    result = desk.say("logs", "demo", *argv)
    assert (result.code, result.out) == (0, "")
    assert words in result.err


def test_a_giant_line_is_cut_on_screen(desk: Desk) -> None:
    desk.cluster.write(0, b"x" * 10_000_000 + b"\nend\n")
    lines = desk.say("logs", "demo").out.splitlines()
    assert len(lines[0]) < 70_000 and lines[0].endswith("... (+9.9 MB)")
    assert lines[1] == "[0] end"


def test_memory_does_not_grow_with_the_logs(tmp_path: Path) -> None:
    import subprocess

    code = """if True:
        import resource, sys
        from ascendrun.head.logreader import read_all
        from ascendrun.head.spoolfiles import find_streams
        from ascendrun.core.folding import fold
        from ascendrun.core.loglines import merge
        from pathlib import Path
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = find_streams(Path(sys.argv[1]), 1)
        count = sum(1 for _ in fold(merge(read_all(files) for files in found), window_s=0.3))
        print(count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    (tmp_path / "n1").mkdir()
    for rank in range(4):
        (tmp_path / "n1" / f"rank-{rank}.out.0").write_bytes(b"z\n" * 5000)
        with open(tmp_path / "n1" / f"rank-{rank}.out.0", "ab") as log:
            log.write((b"%d" % rank * 99 + b"\n") * 100_000)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    count, grown_kib = map(int, done.stdout.split())
    assert count > 400_000
    assert grown_kib < 25_000  # of 40 MB of logs
