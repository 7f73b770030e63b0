"""Folding never loses, invents or reorders a rank's lines, and never calls two things one."""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascendrun.core.logs.folding import FoldedLine, Folder, describe_spread, find_outliers, fold, unfold
from ascendrun.core.logs.line_patterns import Shape, Templates
from ascendrun.core.logs.log_lines import LogLine, merge


def find(text, rank):
    return Templates().find_all([text], [rank])[0]


def line(rank: int, text: str, at_s: float | None = 0.0, *, stream: str = "out", attempt: int = 1) -> LogLine:
    return LogLine(at_s=at_s, host=f"n{rank}", rank=rank, stream=stream, text=text, attempt=attempt)


def by_rank(lines: list[LogLine]) -> dict[int, list[LogLine]]:
    ranks: dict[int, list[LogLine]] = {}
    for one in lines:
        ranks.setdefault(one.rank, []).append(one)
    return ranks


def shown(texts: dict[int, str] | list[str]) -> list[tuple[tuple[int, ...], str]]:
    """What is shown of lines that ranks say at once."""
    said = dict(enumerate(texts)) if isinstance(texts, list) else texts
    return [(one.ranks, one.text) for one in fold([line(rank, text) for rank, text in said.items()], window_s=1)]


LINES = st.lists(
    st.builds(
        line,
        st.integers(0, 3),
        st.sampled_from(["a", "b", "loss 1.5", "loss 1.25", "loss nan", "rank 0", "rank 1", "step 1 took 3 ms", "x\0"]),
        st.one_of(st.none(), st.floats(0, 5)),
        stream=st.sampled_from(["out", "err"]),
        attempt=st.integers(1, 2),
    ),
    max_size=60,
)


@given(LINES, st.floats(0, 2))
def test_unfolding_gives_every_line_back_in_its_ranks_order(lines: list[LogLine], window_s: float) -> None:
    back = list(unfold(fold(lines, window_s=window_s)))
    assert by_rank(back) == by_rank(lines)


@given(LINES, st.floats(0, 2))
def test_a_folded_line_holds_each_rank_once_and_one_template(lines: list[LogLine], window_s: float) -> None:
    for one in fold(lines, window_s=window_s):
        assert len(set(one.ranks)) == len(one.lines)
        said = {(find(member.text, member.rank)[0], member.stream, member.attempt) for member in one.lines}
        assert len(said) == 1


@given(LINES, st.floats(0, 2))
def test_lines_fold_only_within_the_window(lines: list[LogLine], window_s: float) -> None:
    timed = sorted((one for one in lines if one.at_s is not None), key=lambda one: one.at_s or 0.0)
    for one in fold(timed, window_s=window_s):
        times = [member.at_s for member in one.lines if member.at_s is not None]
        assert max(times) - min(times) <= window_s


def test_identical_lines_of_all_ranks_become_one_even_when_interleaved() -> None:
    lines = [line(rank, text, at / 100) for at, text in enumerate("ab") for rank in range(4)]
    assert [(one.ranks, one.text) for one in fold(lines, window_s=0.3)] == [((0, 1, 2, 3), "a"), ((0, 1, 2, 3), "b")]


def test_a_rank_that_says_the_same_twice_is_shown_twice() -> None:
    assert [one.ranks for one in fold([line(0, "x"), line(0, "x"), line(1, "x")], window_s=1)] == [(0, 1), (0,)]


def test_a_line_never_overtakes_another_of_its_rank() -> None:
    lines = [line(0, "a"), line(1, "b"), line(1, "a"), line(0, "b")]
    shown = [(one.ranks, one.text) for one in fold(lines, window_s=1)]
    assert shown == [((0,), "a"), ((0, 1), "b"), ((1,), "a")]


def test_standard_error_does_not_fold_with_standard_output() -> None:
    assert len(list(fold([line(0, "x"), line(1, "x", stream="err")], window_s=1))) == 2


def test_a_late_twin_stands_alone() -> None:
    assert [one.ranks for one in fold([line(0, "x", 0.0), line(1, "x", 9.0)], window_s=0.3)] == [(0,), (1,)]


def test_the_folder_holds_a_line_no_longer_than_its_window() -> None:
    folder = Folder(window_s=0.3)
    folder.add([line(0, "x")], now_s=10.0)
    assert folder.take(now_s=10.2) == []
    assert folder.take(now_s=10.4) == [FoldedLine((line(0, "x"),), "x")]
    assert folder.finish() == []


def test_a_line_that_all_ranks_have_said_waits_no_longer() -> None:
    folder = Folder(window_s=10.0, ranks=2)
    folder.add([line(0, "x")], now_s=1.0)
    assert folder.take(now_s=1.0) == []
    folder.add([line(1, "x")], now_s=1.0)
    folder.add([line(1, "y")], now_s=1.0)
    assert [one.ranks for one in folder.take(now_s=1.0)] == [(0, 1)]
    assert [one.text for one in folder.finish()] == ["y"]


def cost_s(work: Callable[[], object], *, tries: int = 3) -> float:
    """CPU seconds of the quickest try."""
    costs = []
    for _ in range(tries):
        started = time.process_time()
        work()
        costs.append(time.process_time() - started)
    return min(costs)


@pytest.mark.parametrize("text", ["step {step}", "step {step} loss 2.{rank:02d}{step} lr 1.5e-05 took {rank}.25 s"])
def test_merging_and_folding_64_ranks_costs_little_more_than_sorting_and_counting_their_lines(text: str) -> None:
    """The simplest thing that any reader of 64 logs must do is the measure: no machine is too slow for this test."""
    shuffle = random.Random(1)
    streams = [
        [line(rank, text.format(step=step, rank=rank), step * 0.5 + shuffle.random() * 0.2) for step in range(200)]
        for rank in range(64)
    ]

    def simple() -> int:
        every = sorted((one for stream in streams for one in stream), key=lambda one: one.at_s or 0.0)
        return len(Counter((re.sub(r"[0-9]+[.][0-9]+", "", one.text), one.stream, one.attempt) for one in every))

    assert len(list(fold(merge(streams), window_s=0.3))) == simple() == 200
    assert cost_s(lambda: list(fold(merge(streams), window_s=0.3))) < 8 * cost_s(simple)


def test_a_rank_that_pours_out_one_line_does_not_slow_the_folding_down() -> None:
    def pour(count: int) -> float:
        lines = [line(at % 2, "x", 1.0) for at in range(0, 2 * count, 2)] + [line(1, "x", 1.0) for _ in range(count)]
        return cost_s(lambda: list(fold(lines, window_s=1.0)))

    assert pour(8_000) < 16 * pour(2_000)


def test_a_number_that_differs_is_shown_as_mean_and_spread() -> None:
    said = ["step 120 loss 2.33 lr 1.0e-05", "step 120 loss 2.29 lr 1.0e-05", "step 120 loss 2.31 lr 1.0e-05"]
    assert shown(said) == [((0, 1, 2), "step 120 loss 2.31±0.02 lr 1.0e-05")]


def test_a_rank_that_lags_by_a_step_is_never_shown_at_the_step_of_the_others() -> None:
    said = {0: "step 120 loss 2.31", 1: "step 119 loss 2.31", 2: "step 120 loss 2.33", 3: "step 119 loss 2.35"}
    assert shown(said) == [((0, 2), "step 120 loss 2.32±0.01"), ((1, 3), "step 119 loss 2.33±0.02")]
    assert len(shown(["{'loss': 2.31, 'epoch': 0.13}", "{'loss': 2.31, 'epoch': 0.14}"])) == 2
    assert len(shown([" 12%|#   | 12/100 [00:35<01:30, 1.2it/s]", " 13%|#   | 13/100 [00:36<01:30, 1.2it/s]"])) == 2


def test_a_rank_that_stands_out_has_its_own_line_behind_the_others() -> None:
    said = [f"loss 2.3{rank}" for rank in range(8)]
    said[5] = "loss 9.75"
    assert shown(said) == [((0, 1, 2, 3, 4, 6, 7), "loss 2.33±0.04"), ((5,), "loss 9.75")]


def test_a_nan_among_numbers_stands_alone_and_all_nan_are_one() -> None:
    assert shown(["loss 2.30", "loss nan", "loss 2.31", "loss 2.32", "loss 2.31"]) == [
        ((0, 2, 3, 4), "loss 2.31±0.01"),
        ((1,), "loss nan"),
    ]
    assert shown(["loss nan"] * 4) == [((0, 1, 2, 3), "loss nan")]
    assert shown(["loss nan", "loss nan", "loss 2.5", "loss nan"]) == [((0, 1, 3), "loss nan"), ((2,), "loss 2.5")]
    assert shown(["loss nan", "loss 2.25", "loss 2.75", "loss nan"]) == [
        ((0, 3), "loss nan"),
        ((1, 2), "loss 2.50±0.25"),
    ]


def test_of_two_ranks_nobody_knows_which_is_the_odd_one() -> None:
    assert shown(["loss 1.0", "loss 9.0"]) == [((0, 1), "loss 5.0±4.0")]


@pytest.mark.parametrize(
    "texts",
    [
        ["torch 2.13.0", "torch 2.14.0"],
        ["port 29500", "port 29501"],
        ["10.0.0.3:80", "10.0.0.4:80"],
        ["rank 3 of 8", "rank 4 of 8"],
        ["model-0.1.bin", "model-0.2.bin"],
        ["v1.5", "v1.6"],
        ["index 7", "index 8"],
        ["line 10", "line 11"],
        ["file_1.25.log", "file_1.26.log"],
        ["2.5.1", "2.5.2"],
        ["exit code 1", "exit code 2"],
        ["loss nano", "loss info"],
        ["epoch 1.5", "epoch 1.6"],
        ["GPU 1", "GPU 2"],
        ["version 1.2", "version 1.3"],
    ],
)
def test_what_names_a_thing_is_never_averaged(texts: list[str]) -> None:
    assert [text for _ranks, text in shown(texts)] == texts


@pytest.mark.parametrize(
    ("texts", "text"),
    [
        (["took 35 ms", "took 37 ms"], "took 36±1 ms"),
        (["tokens/s 15230", "tokens/s 15250"], "tokens/s 15240±10"),
        (["mem 30.2GB", "mem 30.4GB"], "mem 30.3±0.1GB"),
        (["mfu 41.2%", "mfu 41.4%"], "mfu 41.3±0.1%"),
        (["lr 1.00e-05", "lr 3.00e-05"], "lr 2.00e-05±1e-05"),
        (["x -1.5", "x 1.5"], "x 0.0±1.5"),
        (["10:30:01,123 ready", "10:30:01,187 ready"], "10:30:01,123 ready"),
        (["2026-11-20 10:30:01 INFO ready", "2026-11-20 10:30:02 INFO ready"], "2026-11-20 10:30:01 INFO ready"),
        (["at 0x7f3a10ff", "at 0x7f3b20ff"], "at 0x…"),
        (["[rank0]: Traceback", "[rank1]: Traceback"], "[rank*]: Traceback"),
        (["rank 0 is up", "rank 1 is up"], "rank * is up"),
        (["2.3100", "2.3101"], "2.3100±5e-05"),
    ],
)
def test_what_was_measured_is_shown_as_one(texts: list[str], text: str) -> None:
    assert shown(texts) == [((0, 1), text)]


TRACEBACK = """Traceback (most recent call last):
  File "{run}/train.py", line 12, in <module>
    main()
  File "{venv}/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1775, in _call_impl
    return forward_call(*args, **kwargs)
  File "{run}/tasks/data.py", line 40, in read
    with open(path) as file:
[rank{rank}]: FileNotFoundError: No such file or directory: '{run}/conf/a.json' of {temp}/shard-1.bin, pid {pid}
<Reader object at {address}> is not closed"""
PLACES = [
    ("/scratch/npu01/j-7/code", "/opt/venv", "/tmp/tmpab12cd_9", 4711, "0x7f3a10ff"),
    ("/data/u2/j-7", "/home/u2/venv", "/tmp/tmpzzz0_a1b", 77, "0x7f3a10aa"),
    ("/scratch/npu03/j-7/code", "/opt/venv", "/tmp/tmp12345678", 123456, "0xffff90001234"),
    ("/scratch/npu04/j-7/code", "/opt/venv", "/tmp/tmpabcdefgh", 4712, "0x7f3a10fe"),
]


def test_a_traceback_of_hosts_with_different_directories_is_shown_once() -> None:
    lines = [
        line(rank, text, at / 1000)
        for rank, (run, venv, temp, pid, address) in enumerate(PLACES)
        for at, text in enumerate(
            TRACEBACK.format(run=run, venv=venv, temp=temp, pid=pid, address=address, rank=rank).split("\n")
        )
    ]
    found = list(fold(sorted(lines, key=lambda one: one.at_s or 0), window_s=1))
    assert [one.ranks for one in found] == [(0, 1, 2, 3)] * 9
    assert found[1].text == '  File "…/train.py", line 12, in <module>'
    assert found[3].text.startswith('  File "…/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1775')
    assert found[7].text == (
        "[rank*]: FileNotFoundError: No such file or directory: '…/conf/a.json' of /tmp/…/shard-1.bin, pid *"
    )
    assert sorted(unfold(found)) == sorted(lines)


@pytest.mark.parametrize(
    "texts",
    [
        ['  File "/a/train.py", line 12, in main', '  File "/b/train.py", line 13, in main'],
        ['  File "/a/train.py", line 12, in main', '  File "/a/other.py", line 12, in main'],
        ['  File "/v/site-packages/a/b.py", line 1, in f', '  File "/v/site-packages/c/b.py", line 1, in f'],
        ['  File "/v/lib/python3.10/os.py", line 1, in f', '  File "/v/lib/python3.11/os.py", line 1, in f'],
        ["cannot read /data/a/x.json", "cannot read /data/b/x.json"],
        ["wrote /tmp/ckpt_step0001", "wrote /tmp/ckpt_step0002"],
    ],
)
def test_different_places_in_code_and_data_stay_apart(texts: list[str]) -> None:
    assert [text for _ranks, text in shown(texts)] == texts


def test_variable_parts_of_different_kinds_are_different_sentences() -> None:
    said = ["at 2.5", "at 10:30:01", "at 0x7f3a10ff", "at 10:30:02"]
    assert shown(said) == [((0,), said[0]), ((1, 3), said[1]), ((2,), said[2])]


def test_numbers_of_different_widths_are_the_same_sentence() -> None:
    assert shown(["took 9.5 s", "took 10.5 s"]) == [((0, 1), "took 10.0±0.5 s")]


def test_a_rank_that_speaks_of_another_is_not_folded_with_it() -> None:
    assert shown(["rank 1 is gone", "rank 1 is gone", "rank 1 is gone"]) == [
        ((0, 2), "rank 1 is gone"),
        ((1,), "rank 1 is gone"),
    ]  # rank 1 speaks of itself, the others of another


WORDS = ["12", "2.31", " loss 0.5", " rank 3", "1e-05", " 35 ms", "10:30:01", "0x7f3a10ff", " nan", " step 7", "1.2.3"]
TEXTS = st.lists(st.one_of(st.text(max_size=8), st.sampled_from(WORDS)), max_size=8).map("".join)
TEXT_LISTS = st.lists(st.one_of(TEXTS, st.just("a\nb"), st.just("x" * 2001), st.just("rank 3 took 2 ms")), max_size=6)


@given(st.lists(st.one_of(st.floats(-1e6, 1e6), st.sampled_from([0.0, 1.0, 1.01, 2.0, 9.0])), min_size=4, max_size=20))
def test_odd_are_those_that_are_more_than_six_usual_distances_and_a_twentieth_off(values: list[float]) -> None:
    middle = sorted(values)[len(values) // 2]
    off = [abs(value - middle) for value in values]
    limit = max(6 * 1.4826 * sorted(off)[len(off) // 2], 0.05 * abs(middle), 1e-9)
    assert find_outliers(values) == {at for at, distance in enumerate(off) if distance > limit}


@given(TEXT_LISTS, st.integers(0, 9))
def test_many_lines_have_the_same_templates_as_each_alone(texts: list[str], rank: int) -> None:
    ranks = [rank + at % 2 for at in range(len(texts))]
    assert Templates().find_all(texts, ranks) == [find(*said) for said in zip(texts, ranks)]


@given(
    st.lists(
        st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-1000, max_value=1000),
        min_size=1,
        max_size=9,
    )
)
def test_the_spread_covers_every_value(values: list[object]) -> None:
    mean, _, half = describe_spread([float(str(value)) for value in values], [str(values[0])]).partition("±")
    span = 2 * float(half or 0)
    assert all(abs(float(str(value)) - float(mean)) <= span + 0.002 for value in values)


def turned(text: str, at: int) -> str:
    """With another digit there."""
    return text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :]


@given(TEXTS)
def test_every_digit_of_a_line_is_either_part_of_what_may_differ_or_of_its_template(text: str) -> None:
    template, shape = find(text, 12345)
    variable = {at for field in shape.fields for at in range(field.start, field.end)}
    for at in (at for at, character in enumerate(text) if character in "0123456789"):
        other, other_shape = find(turned(text, at), 12345)
        if "rank" not in text.lower():
            assert (other == template) == (at in variable)
            assert other_shape == shape or not shape.fields


@given(TEXTS, TEXTS)
def test_texts_of_one_template_have_the_same_words_and_as_many_variable_parts(one: str, other: str) -> None:
    templates = Templates()
    (first, shape), (second, other_shape) = templates.find_all([one, other], [3, 3])
    if first == second:
        assert [field.kind for field in shape.fields] == [field.kind for field in other_shape.fields]
        assert fixed_parts(one, shape) == fixed_parts(other, other_shape)


def fixed_parts(text: str, shape: Shape) -> list[str]:
    ends = [0, *(field.end for field in shape.fields)]
    return [text[end:start] for end, start in zip(ends, [*(field.start for field in shape.fields), len(text)])]


def test_what_waits_to_be_folded_is_bounded_by_its_size() -> None:
    folder = Folder(window_s=1e9)
    given_out = 0
    for number in range(400):
        folder.add([line(0, f"{number} " + "x" * 60_000)], now_s=0.0)
        given_out += len(folder.take(now_s=0.0))
    assert given_out > 200
