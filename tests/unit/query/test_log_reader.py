"""What the head reads from its spool is what the ranks wrote, whenever the bytes arrive."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from ascendrun.core.logs.log_lines import LogLine
from ascendrun.head.spool.clocks import HostClock, Reading
from ascendrun.head.spool.spool_files import StreamFiles, find_streams, is_complete, read_bytes, tail_position
from ascendrun.query.log_reader import (
    Budget,
    StreamReader,
    batch_lines_for,
    budget_for,
    cut_lines,
    last_arrival_s,
    read_tail,
)


class Spool:
    """Writes one stream as the collector would."""

    def __init__(self, root: Path, *, host: str = "n1", rank: int = 3, stream: str = "out") -> None:
        (root / host).mkdir(parents=True, exist_ok=True)
        self.files = StreamFiles(root / host, host, rank, stream, 1)

    def data(self, data: bytes, *, generation: int = 0) -> None:
        with open(self.files.path(generation), "ab") as opened:
            opened.write(data)

    def time(self, at_s: float, *, generation: int = 0) -> None:
        """All bytes so far that have no time yet came at `at_s`."""
        end = self.files.path(generation).stat().st_size
        with open(self.files.times_path(generation), "ab") as opened:
            opened.write(struct.pack(">QQ", end, round(at_s * 1e9)))

    def write(self, data: bytes, at_s: float, *, generation: int = 0) -> None:
        self.data(data, generation=generation)
        self.time(at_s, generation=generation)


def read_all(files: StreamFiles, **options: Any) -> Iterator[LogLine]:
    return chain.from_iterable(StreamReader(files, **options).batches(final=True))


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path)


def shown(lines: list[LogLine]) -> list[tuple[float | None, str]]:
    return [(line.at_s, line.text) for line in lines]


def test_each_line_has_the_time_at_which_its_newline_came(spool: Spool) -> None:
    spool.write(b"one\ntwo\nthr", 10.0)
    spool.write(b"ee\nlast", 20.5)
    lines = list(read_all(spool.files))
    assert shown(lines) == [(10.0, "one"), (10.0, "two"), (20.5, "three"), (20.5, "last")]
    assert {(line.host, line.rank, line.stream, line.attempt) for line in lines} == {("n1", 3, "out", 1)}


def test_a_growing_file_gives_each_line_once(spool: Spool) -> None:
    reader = StreamReader(spool.files)
    assert reader.read() == []
    spool.write(b"one\ntw", 1.0)
    assert shown(reader.read()) == [(1.0, "one")]
    assert reader.read() == []
    spool.write(b"o\n", 2.0)
    assert shown(reader.read()) == [(2.0, "two")]
    assert reader.finish() == []


def test_bytes_wait_for_their_arrival_times(spool: Spool) -> None:
    reader = StreamReader(spool.files)
    spool.data(b"one\n")
    assert reader.read() == []
    spool.time(7.0)
    assert shown(reader.read()) == [(7.0, "one")]


def test_bytes_without_times_are_shown_when_nothing_more_will_come(spool: Spool) -> None:
    spool.write(b"one\n", 1.0)
    spool.data(b"two\n")
    reader = StreamReader(spool.files)
    assert shown(reader.read()) == [(1.0, "one")]
    assert reader.read() == []
    assert shown(reader.read(final=True)) == [(None, "two")]


def test_half_a_record_of_time_is_waited_for(spool: Spool) -> None:
    spool.write(b"one\n", 1.0)
    record = spool.files.times_path(0).read_bytes()
    spool.files.times_path(0).write_bytes(record[:9])
    reader = StreamReader(spool.files)
    assert reader.read() == []
    spool.files.times_path(0).write_bytes(record)
    assert shown(reader.read()) == [(1.0, "one")]


def test_a_line_that_spans_a_rotation_stays_one_line(spool: Spool) -> None:
    spool.write(b"one\nhal", 1.0)
    reader = StreamReader(spool.files)
    assert shown(reader.read()) == [(1.0, "one")]
    spool.write(b"f\nnext\n", 2.0, generation=1)
    assert shown(reader.read()) == [(2.0, "half"), (2.0, "next")]


def test_rotated_generations_are_read_in_order_from_the_first_that_is_left(spool: Spool) -> None:
    for generation in (9, 10, 11):
        spool.write(f"line of {generation}\n".encode(), float(generation), generation=generation)
    assert [line.text for line in read_all(spool.files)] == ["line of 9", "line of 10", "line of 11"]
    assert b"".join(read_bytes(spool.files)) == b"line of 9\nline of 10\nline of 11\n"


@pytest.mark.parametrize("count", [0, 1, 2, 7, 5000, 20_001, 30_000])
@pytest.mark.parametrize("end", ["\n", ""])
def test_the_tail_is_the_end_of_the_whole(spool: Spool, count: int, end: str) -> None:
    shuffle = random.Random(count)
    lines = [f"line {number} {'x' * shuffle.randrange(30)}" for number in range(20_000)]
    half = len(lines) // 2
    spool.write(("\n".join(lines[:half]) + "\nsplit ").encode(), 1.0)
    spool.write(("over files\n" + "\n".join(lines[half:]) + end).encode(), 2.0, generation=1)
    whole = [line.text for line in read_all(spool.files)]
    assert [line.text for line in read_all(spool.files, tail=count)] == (whole[-count:] if count else [])


def test_the_tail_of_a_huge_file_is_read_from_its_end(spool: Spool) -> None:
    size = 1 << 40
    with open(spool.files.path(0), "wb") as opened:
        opened.truncate(size)
        opened.seek(size)
        opened.write(b"\nlast but one\nlast\n")
    assert tail_position(spool.files, 2) == (0, size + 1)
    assert [line.text for line in read_all(spool.files, tail=2)] == ["last but one", "last"]


def test_many_small_records_time_every_line_also_of_the_tail(spool: Spool) -> None:
    with open(spool.files.path(0), "wb") as log, open(spool.files.times_path(0), "wb") as times:
        for number in range(50_000):
            log.write(b"%05d\n" % number)
            times.write(struct.pack(">QQ", 6 * (number + 1), number * 10**9))
    assert [line.at_s for line in read_all(spool.files)] == [float(number) for number in range(50_000)]
    assert shown(list(read_all(spool.files, tail=2))) == [(49998.0, "49998"), (49999.0, "49999")]


def test_streams_are_found_by_rank_host_and_kind(tmp_path: Path) -> None:
    for host, rank in (("n1", 0), ("n1", 1), ("n2", 2), ("n2", 10)):
        for stream in ("out", "err"):
            Spool(tmp_path, host=host, rank=rank, stream=stream).write(b"x\n", 1.0)
    (tmp_path / "n1" / "events.0").write_bytes(b"{}\n")
    (tmp_path / "complete").touch()

    def found(**wanted: Any) -> list[tuple[str, int, str]]:
        return [(one.host, one.rank, one.stream) for one in find_streams(tmp_path, 1, **wanted)]

    assert found(streams=["out"]) == [("n1", 0, "out"), ("n1", 1, "out"), ("n2", 2, "out"), ("n2", 10, "out")]
    assert found(ranks={10}) == [("n2", 10, "out"), ("n2", 10, "err")]
    assert found(hosts=["n1"], streams=["err"]) == [("n1", 0, "err"), ("n1", 1, "err")]
    assert is_complete(tmp_path) and not is_complete(tmp_path / "n1")


def test_times_are_the_heads(spool: Spool) -> None:
    spool.write(b"one\n", 100.0)
    spool.write(b"two\rlast\n", 101.0)
    clock = HostClock([Reading(at_s=5.0, offset_s=90.0, error_s=0.001)])
    assert shown(list(read_all(spool.files, clock=clock))) == [(10.0, "one"), (11.0, "last")]


def test_lines_in_any_mixture_read_alike_on_both_ways(spool: Spool) -> None:
    """The quick way for plain lines and the splitter's: whole lines, bars, giants, NULs, cuts at any chunk."""
    shuffle = random.Random(5)
    pieces = [
        b"plain\n",
        b"\n",
        b"bar 1\rbar 2\n",
        b"\x00nul\n",
        b"x" * 70_000 + b"\n",
        b"\xff\xfe\n",
        b"half",
        "汉\n".encode(),
    ]
    data = b"".join(shuffle.choice(pieces) for _ in range(3000))
    for start in range(0, len(data), 5000):
        spool.write(data[start : start + 5000], float(start))
    from ascendrun.core.logs.log_lines import LineSplitter

    splitter = LineSplitter()
    whole = [*splitter.feed(data), *filter(None, [splitter.finish()])]
    lines = list(read_all(spool.files))
    assert [line.text for line in lines] == whole
    times = [line.at_s for line in lines]
    assert times == sorted(times) and None not in times


def test_a_batch_is_no_longer_than_was_asked_for(spool: Spool) -> None:
    spool.data(b"\n" * 100_000)
    batches = list(StreamReader(spool.files, batch_lines=batch_lines_for(1 << 20)).batches(final=True))
    assert sum(map(len, batches)) == 100_000 and max(map(len, batches)) == 32


@pytest.mark.parametrize(
    ("data", "most", "cut"),
    [
        (b"a\nb\nc\n", 2, b"a\nb\n"),
        (b"a\nb", 5, b"a\nb"),
        (b"", 1, b""),
        (b"a\nb\nrest", 2, b"a\nb\nrest"),
        (b"\n\n\n", 1, b"\n"),
    ],
)
def test_lines_are_cut_after_a_newline(data: bytes, most: int, cut: bytes) -> None:
    assert cut_lines(data, most) == cut


@pytest.mark.parametrize("since_s", [0.0, 1000.0, 1050.0, 1099.5, 1500.0, 2050.0, 9999.0])
def test_lines_since_a_moment_are_found_without_reading_what_is_older(spool: Spool, since_s: float) -> None:
    for generation in range(3):
        for at in range(100):
            spool.write(f"line {generation} {at}\nhalf of ".encode(), 1000.0 * generation + at, generation=generation)
    whole = list(read_all(spool.files))
    lines = list(read_all(spool.files, since_s=since_s))
    wanted = [line for line in whole if line.at_s is not None and line.at_s >= since_s]
    assert lines == whole[len(whole) - len(lines) :]  # whole lines, to the end
    assert len(wanted) <= len(lines) <= len(wanted) + 6  # all that are wanted, and hardly more


def test_a_clock_that_was_set_leaves_nothing_out(spool: Spool) -> None:
    spool.write(b"late\n", 5000.0)
    spool.write(b"after the clock went back\n", 100.0)
    clock = HostClock([Reading(0.0, 5000.0, 0.001), Reading(60.0, 0.0, 0.001)])
    reader = StreamReader(spool.files, since_s=50.0, clock=clock)
    assert [line.text for line in reader.read(final=True)] == ["late", "after the clock went back"]


def test_every_line_stands_where_it_says(spool: Spool, tmp_path: Path) -> None:
    data = b"first\nsecond \xe6\x95\xb0\n\rbar 1\rbar 2\nlast without end"
    spool.data(data)
    lines = read_tail(spool.files, tmp_path, Budget())
    assert [line.text for line in lines] == ["first", "second 数", "bar 2", "last without end"]
    assert {line.file for line in lines} == {"n1/rank-3.out.0"}
    for line in lines:
        assert line.offset is not None and line.text.encode() in data[line.offset :].split(b"\n")[0]


def test_a_line_came_when_its_end_came(spool: Spool, tmp_path: Path) -> None:
    for number, data in enumerate((b"aaaa\n", b"bbbb\n", b"cccc\n")):
        spool.write(data, 1000.0 + number)
    assert [line.at_s for line in read_tail(spool.files, tmp_path, Budget())] == [1000.0, 1001.0, 1002.0]
    assert last_arrival_s(spool.files) == 1002.0


def test_of_a_large_file_the_end_and_what_looks_like_an_error_are_read(spool: Spool, tmp_path: Path) -> None:
    noise = b"".join(b"step %07d loss 1.0\n" % number for number in range(60_000))
    spool.data(noise[: 22 * 30_000] + b"ValueError: the only one\n" + noise[22 * 30_000 :])
    lines = read_tail(spool.files, tmp_path, Budget(tail_bytes=10_000, search_bytes=10 << 20))
    texts = [line.text for line in lines]
    assert "ValueError: the only one" in texts and texts[-1] == "step 0059999 loss 1.0"
    assert sum(len(text) for text in texts) < 60_000
    assert all(text.startswith("step ") and len(text) == 21 or "only one" in text or not text for text in texts), (
        "a piece begins with a whole line"
    )


def test_generations_are_one_stream(spool: Spool, tmp_path: Path) -> None:
    spool.data(b"old 1\nold 2\n", generation=3)
    spool.data(b"new 1\n", generation=4)
    assert [line.text for line in read_tail(spool.files, tmp_path, Budget())] == ["old 1", "old 2", "new 1"]
    short = read_tail(spool.files, tmp_path, Budget(tail_bytes=12, search_bytes=0))
    assert [line.text for line in short] == ["old 2", "new 1"]


def test_many_ranks_get_no_more_together_than_few() -> None:
    assert budget_for(2).tail_bytes == 1 << 20
    assert 128 * budget_for(128).tail_bytes <= 12 << 20
    assert budget_for(100_000).tail_bytes == 16 << 10


def test_a_stream_that_is_not_there_has_no_lines(tmp_path: Path) -> None:
    assert read_tail(StreamFiles(tmp_path / "none", "none", 0, "out", 1), tmp_path, Budget()) == ()
