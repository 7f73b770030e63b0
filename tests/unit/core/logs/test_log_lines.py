"""Splitting and merging never lose, invent or reorder a rank's lines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascendrun.core.logs.log_lines import LineSplitter, LogLine, merge, parse_ranks
from ascendrun.text.format import fold_numbers, format_bytes
from tests.unit.core.logs.test_folding import by_rank


def line(rank: int, text: str, at_s: float | None = 0.0, *, stream: str = "out", attempt: int = 1) -> LogLine:
    return LogLine(at_s=at_s, host=f"n{rank}", rank=rank, stream=stream, text=text, attempt=attempt)


def split(*pieces: bytes, limit_bytes: int = 64 * 1024) -> list[str]:
    splitter = LineSplitter(limit_bytes=limit_bytes)
    lines = [text for piece in pieces for text in splitter.feed(piece)]
    last = splitter.finish()
    return lines if last is None else [*lines, last]


LINES = st.lists(
    st.builds(
        line,
        st.integers(0, 3),
        st.sampled_from(["a", "b", "c"]),
        st.one_of(st.none(), st.floats(0, 5)),
        stream=st.sampled_from(["out", "err"]),
        attempt=st.integers(1, 2),
    ),
    max_size=60,
)


@given(LINES)
def test_merging_keeps_every_stream_in_its_own_order(lines: list[LogLine]) -> None:
    merged = list(merge(by_rank(lines).values()))
    assert by_rank(merged) == by_rank(lines)


@given(LINES)
def test_merged_streams_that_are_in_order_come_out_in_order(lines: list[LogLine]) -> None:
    timed = [one for one in lines if one.at_s is not None]
    streams = [sorted(one, key=lambda x: x.at_s or 0.0) for one in by_rank(timed).values()]
    times = [one.at_s or 0.0 for one in merge(streams)]
    assert times == sorted(times)


@given(st.binary(max_size=400), st.lists(st.integers(0, 400), max_size=8))
def test_splitting_does_not_depend_on_where_the_bytes_were_cut(data: bytes, cuts: list[int]) -> None:
    ends = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
    pieces = [data[start:end] for start, end in zip([0, *ends], ends)]
    assert split(*pieces) == split(data)
    assert split(*pieces, limit_bytes=5) == split(data, limit_bytes=5)


@given(st.lists(st.text(alphabet=st.characters(exclude_characters="\r\n", exclude_categories=["Cs"])), max_size=9))
def test_plain_text_splits_as_it_was_written(lines: list[str]) -> None:
    assert split("".join(f"{text}\n" for text in lines).encode()) == lines


def test_a_line_without_time_stays_where_it_was_written() -> None:
    streams = [[line(0, "start", 5.0), line(0, "lost", None), line(0, "end", 7.0)], [line(1, "other", 6.0)]]
    assert [one.text for one in merge(streams)] == ["start", "lost", "other", "end"]


def test_a_progress_bar_leaves_its_last_state() -> None:
    assert split(b"\r 10%\r 50%\r100%\nnext\n") == ["100%", "next"]
    assert split(b" 10%\r", b" 20%\r", b" 30%") == [" 30%"]


def test_a_long_line_is_cut_and_says_how_much_is_missing() -> None:
    assert split(b"x" * 10_000_000 + b"\nnext\n", limit_bytes=100_000) == ["x" * 100_000 + "... (+9.4 MiB)", "next"]


def test_a_cut_never_falls_inside_a_character() -> None:
    text = "损失值" * 10
    assert split(text.encode(), limit_bytes=10)[0].startswith("损失值... (+")


def test_a_line_of_gbk_is_read_as_chinese_and_binary_is_not() -> None:
    text = "设备 3 的温度过高,请检查风扇"
    assert split(text.encode("gbk") + b"\n" + text.encode() + b"\n") == [text, text]
    assert "\\x" in split(bytes(range(128, 256)) + b"\n")[0]
    assert split(b"half " + "设".encode("gbk")[:1] + b"\n") == ["half \\xc9"]


def test_a_bar_of_megabytes_without_a_newline_takes_no_memory() -> None:
    splitter = LineSplitter()
    for percent in range(20_000):
        assert splitter.feed(b"\r%5d of 20000" % percent + b"." * 100) == []
    assert len(splitter._kept) < 1000


@pytest.mark.parametrize(
    ("text", "ranks"), [("3", {3}), ("0,8-10", {0, 8, 9, 10}), (" 1 , 2 ", {1, 2}), ("4-4", {4}), ("0-2,1", {0, 1, 2})]
)
def test_ranks_are_read_as_people_write_them(text: str, ranks: set[int]) -> None:
    assert parse_ranks(text) == ranks


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-1", "1,,2", "0-99999999", "٣", "1 2"])
def test_what_is_no_rank_is_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match=r"rank|range"):
        parse_ranks(text)


@given(st.sets(st.integers(0, 300)))
def test_folded_ranks_read_back(ranks: set[int]) -> None:
    if ranks:
        assert parse_ranks(fold_numbers(ranks)) == ranks


def test_sizes_are_written_for_people() -> None:
    sizes = [format_bytes(count) for count in (0, 999, 1024, 9_934_465, 120_000_000, 5_000_000_000_000)]
    assert sizes == ["0 B", "999 B", "1.0 KiB", "9.5 MiB", "114 MiB", "4.5 TiB"]
