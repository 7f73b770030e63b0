"""A rank's log on its node: cut, removed, rotated, given up. What comes after is kept, what is lost is counted."""

import os
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascendrun.node import layout
from ascendrun.node.agent.prune import release
from ascendrun.node.supervisor.spool import Spool, split_at_limit
from tests.unit.node.test_records import content

TAG = "head-job.1"


@pytest.mark.parametrize("size", [0, 10, 99])
def test_a_file_that_is_truncated_ends_there_and_the_stream_goes_on_in_the_next(tmp_path: Path, size: int) -> None:
    spool = Spool(str(tmp_path), "rank-0.out")
    spool.write(b"a" * 100, 1)
    os.truncate(tmp_path / "rank-0.out.0", size)
    spool.write(b"after\n", 2)
    spool.write(b"that\n", 3)
    spool.close()
    assert content(tmp_path) == {0: b"a" * size, 1: b"after\nthat\n"}
    assert spool.cuts == [(0, 100)]
    times = list(struct.iter_unpack("!QQ", (tmp_path / "rank-0.out.times.1").read_bytes()))
    assert times == [(6, 2), (11, 3)]


def test_a_file_that_is_removed_costs_nothing_of_what_follows(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path), "rank-0.out")
    spool.write(b"before\n", 1)
    (tmp_path / "rank-0.out.0").unlink()
    spool.check_truncated()
    spool.write(b"after\n", 2)
    spool.close()
    assert content(tmp_path) == {1: b"after\n"} and spool.cuts == [(0, 7)]


def test_a_file_that_nobody_touches_is_not_taken_for_cut(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path), "rank-0.out", limit=50)
    for number in range(100):
        spool.check_truncated()
        spool.write(b"line %d\n" % number, number)
    spool.close()
    assert spool.cuts == []
    parts = content(tmp_path)
    assert b"".join(parts[at] for at in sorted(parts)) == b"".join(b"line %d\n" % number for number in range(100))


def fds_of(folder: Path) -> list[int]:
    links = {int(name): f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")}
    return [fd for fd, link in links.items() if os.path.islink(link) and os.readlink(link).startswith(str(folder))]


def test_a_file_that_even_refuses_a_look_is_opened_again(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path), "rank-0.out")
    spool.write(b"before\n", 1)
    for fd in fds_of(tmp_path):
        os.close(fd)  # every call for it fails now, as for a file on a server that has forgotten it
    spool.check_truncated()
    spool.write(b"after\n", 2)
    spool.close()
    assert spool.dropped_bytes == 0 and spool.total_bytes == 13 and content(tmp_path) == {0: b"before\nafter\n"}


def test_a_log_whose_times_cannot_be_written_leaks_no_descriptor(tmp_path: Path) -> None:
    (tmp_path / "rank-0.out.times.0").mkdir()
    spool = Spool(str(tmp_path), "rank-0.out")
    for _ in range(20):
        spool.write(b"x", 1)
    spool.close()
    assert spool.dropped_bytes == 20 and fds_of(tmp_path) == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five generations of one log and three of another, the older ones older."""
    folder = Path(layout.attempt_dir(str(tmp_path), TAG))
    folder.mkdir(parents=True)
    for name, count in (("rank-0.out", 5), ("rank-1.err", 3)):
        for generation in range(count):
            for part, size in (("", 1000), (".times", 16)):
                path = folder / f"{name}{part}.{generation}"
                path.write_bytes(b"x" * size)
                os.utime(path, (generation, generation))
    (folder / "events.0").write_bytes(b"e" * 5000)
    return folder


def held(**counts: int) -> dict[str, dict[str, int]]:
    """Of `rank_0_out=4` the generations 0 to 3 are whole at the head, with their times."""
    logs = {name.replace("_", "-", 1).replace("_", "."): range(count) for name, count in counts.items()}
    return {
        f"{log}{part}": {str(one): size for one in there}
        for log, there in logs.items()
        for part, size in (("", 1000), (".times", 16))
    }


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if ".times" not in path.name and path.name != "events.0")


def test_nothing_goes_while_there_is_room(folder: Path, tmp_path: Path) -> None:
    answer = release(str(tmp_path), {"tag": TAG, "have": held(rank_0_out=4, rank_1_err=2), "keep_bytes": 10_000})
    assert answer["freed_bytes"] == 0 and len(left(folder)) == 8


def test_the_oldest_that_the_head_holds_go_until_there_is_room(folder: Path, tmp_path: Path) -> None:
    answer = release(str(tmp_path), {"tag": TAG, "have": held(rank_0_out=4), "keep_bytes": 6500})
    assert left(folder) == [*(f"rank-0.out.{at}" for at in (2, 3, 4)), *(f"rank-1.err.{at}" for at in (0, 1, 2))]
    assert answer == {"freed_bytes": 2032, "kept_bytes": 6096}
    assert not (folder / "rank-0.out.times.0").exists() and (folder / "events.0").exists()


def test_what_the_head_does_not_hold_and_the_newest_stay_whatever_is_asked(folder: Path, tmp_path: Path) -> None:
    have = {**held(rank_0_out=99, rank_7_out=9), "../x": {"0": 9}}
    release(str(tmp_path), {"tag": TAG, "have": have, "keep_bytes": 0})
    assert left(folder) == ["rank-0.out.4", "rank-1.err.0", "rank-1.err.1", "rank-1.err.2"]


@pytest.mark.parametrize("part", ["rank-0.out", "rank-0.out.times"])
def test_a_generation_of_which_the_head_lacks_one_byte_stays(folder: Path, tmp_path: Path, part: str) -> None:
    have = held(rank_0_out=4)
    have[part]["1"] -= 1
    release(str(tmp_path), {"tag": TAG, "have": have, "keep_bytes": 0})
    assert "rank-0.out.1" in left(folder) and (folder / "rank-0.out.times.1").exists()
    assert "rank-0.out.0" not in left(folder) and "rank-0.out.2" not in left(folder)


def test_an_attempt_that_is_not_here_frees_nothing(tmp_path: Path) -> None:
    assert release(str(tmp_path), {"tag": TAG, "have": {}, "keep_bytes": 0}) == {"freed_bytes": 0, "kept_bytes": 0}


@given(st.lists(st.binary(max_size=60), max_size=30), st.integers(1, 50), st.integers(0, 20))
def test_rotation_loses_and_reorders_nothing_and_keeps_to_its_bounds(chunks, limit, slack):
    generations = [b""]
    for chunk in chunks:
        while chunk:
            mine, chunk = split_at_limit(chunk, len(generations[-1]), limit=limit, slack=slack)
            generations[-1] += mine
            if chunk:
                generations.append(b"")
    assert b"".join(generations) == b"".join(chunks)
    assert all(len(data) <= limit + slack for data in generations)


def test_a_generation_ends_with_a_whole_line_where_one_ends():
    assert split_at_limit(b"aa\nbb\ncc", 0, limit=7, slack=5) == (b"aa\nbb\n", b"cc")
    assert split_at_limit(b"bb\ncc\n", 9, limit=10, slack=5) == (b"bb\n", b"cc\n")
    assert split_at_limit(b"xxxxxxxxxx", 9, limit=10, slack=5) == (b"xxxxxx", b"xxxx")
