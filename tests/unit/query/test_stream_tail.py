"""The end of a stream and what looks like an error before it: whole lines, true offsets and times, bounded."""

from __future__ import annotations

import struct
from pathlib import Path

from ascendrun.head.spool.spool_files import StreamFiles
from ascendrun.query.stream_tail import Budget, budget_for, last_arrival_s, read_tail


def make_stream(folder: Path, data: bytes, *, generation: int = 0, every: int = 0) -> StreamFiles:
    (folder / "n1").mkdir(exist_ok=True)
    (folder / "n1" / f"rank-0.err.{generation}").write_bytes(data)
    if every:
        ends = [*range(every, len(data), every), len(data)]
        records = b"".join(struct.pack(">QQ", end, (1000 + number) * 10**9) for number, end in enumerate(ends))
        (folder / "n1" / f"rank-0.err.times.{generation}").write_bytes(records)
    return StreamFiles(folder / "n1", "n1", 0, "err", 1)


def test_every_line_stands_where_it_says(tmp_path: Path) -> None:
    data = b"first\nsecond \xe6\x95\xb0\n\rbar 1\rbar 2\nlast without end"
    lines = read_tail(make_stream(tmp_path, data), tmp_path, Budget())
    assert [line.text for line in lines] == ["first", "second 数", "bar 2", "last without end"]
    assert {line.file for line in lines} == {"n1/rank-0.err.0"}
    for line in lines:
        assert line.offset is not None and line.text.encode() in data[line.offset :].split(b"\n")[0]


def test_a_line_came_when_its_end_came(tmp_path: Path) -> None:
    files = make_stream(tmp_path, b"aaaa\nbbbb\ncccc\n", every=5)
    assert [line.at_s for line in read_tail(files, tmp_path, Budget())] == [1000.0, 1001.0, 1002.0]
    assert last_arrival_s(files) == 1002.0


def test_of_a_large_file_the_end_and_what_looks_like_an_error_are_read(tmp_path: Path) -> None:
    noise = b"".join(b"step %07d loss 1.0\n" % number for number in range(60_000))
    data = noise[: 22 * 30_000] + b"ValueError: the only one\n" + noise[22 * 30_000 :]
    files = make_stream(tmp_path, data)
    lines = read_tail(files, tmp_path, Budget(tail_bytes=10_000, search_bytes=10 << 20))
    texts = [line.text for line in lines]
    assert "ValueError: the only one" in texts and texts[-1] == "step 0059999 loss 1.0"
    assert sum(len(text) for text in texts) < 60_000
    assert all(text.startswith("step ") and len(text) == 21 or "only one" in text or not text for text in texts), (
        "a piece begins with a whole line"
    )


def test_generations_are_one_stream(tmp_path: Path) -> None:
    make_stream(tmp_path, b"old 1\nold 2\n", generation=3)
    files = make_stream(tmp_path, b"new 1\n", generation=4)
    assert [line.text for line in read_tail(files, tmp_path, Budget())] == ["old 1", "old 2", "new 1"]
    short = read_tail(files, tmp_path, Budget(tail_bytes=12, search_bytes=0))
    assert [line.text for line in short] == ["old 2", "new 1"]


def test_many_ranks_get_no_more_together_than_few() -> None:
    assert budget_for(2).tail_bytes == 1 << 20
    assert 128 * budget_for(128).tail_bytes <= 12 << 20
    assert budget_for(100_000).tail_bytes == 16 << 10


def test_a_stream_that_is_not_there_has_no_lines(tmp_path: Path) -> None:
    assert read_tail(StreamFiles(tmp_path / "none", "none", 0, "out", 1), tmp_path, Budget()) == ()
