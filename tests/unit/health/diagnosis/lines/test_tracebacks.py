"""Tracebacks in streams as they really are, also those that a logger wrote as one line."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascendrun.health.diagnosis.evidence import Line
from ascendrun.health.diagnosis.lines.tracebacks import Chain, find_chains, unfold


def lines(text: str) -> list[Line]:
    return [Line(one, "f", 0, None, "err") for one in text.split("\n")]


def only(text: str) -> Chain:
    chains = find_chains(lines(text))
    assert len(chains) == 1, chains
    return chains[0]


PLAIN = """Traceback (most recent call last):
  File "/job/train.py", line 8, in <module>
    main()
  File "/opt/lib/python3.10/site-packages/torch/nn/module.py", line 99, in forward
    raise ValueError("no")
ValueError: no
"""


def test_the_place_is_the_last_line_of_code_that_is_not_a_library_s() -> None:
    chain = only(PLAIN)
    assert (chain.root.type, chain.root.message, chain.root.where) == ("ValueError", "no", "train.py:8")


def test_ranks_that_share_a_stream_are_read_apart() -> None:
    mixed = [f"[rank{rank}]: {line}" for line in PLAIN.strip().split("\n") for rank in (3, 5)]
    assert [chain.rank for chain in find_chains([Line(one, "f", 0, None, "err") for one in mixed])] == [3, 5]


@pytest.mark.parametrize(
    "link",
    [
        "During handling of the above exception, another exception occurred:",
        "The above exception was the direct cause of the following exception:",
    ],
)
def test_linked_exceptions_are_one_chain_with_the_first_as_its_root(link: str) -> None:
    chain = only(f"{PLAIN}\n{link}\n\n{PLAIN.replace('ValueError', 'KeyError')}")
    assert [one.type for one in chain.raised] == ["ValueError", "KeyError"]


def test_what_python_passed_over_is_marked() -> None:
    assert only("Exception ignored in: <function Pool.__del__ at 0x1>\n" + PLAIN).kind == "ignored"
    assert only("Exception in thread Thread-3 (run):\n" + PLAIN).kind == "thread"
    assert only(PLAIN).kind == "main"


def test_an_exception_without_its_head_is_found_and_marked_as_torn() -> None:
    assert only("    main()\n  File \"/job/a.py\", line 3, in f\n    g()\nKeyError: 'lr'").kind == "torn"


def test_of_two_tracebacks_written_into_each_other_both_exceptions_are_found() -> None:
    head, frame = "Traceback (most recent call last):\n", '  File "/job/a.py", line 3, in f\n'
    text = f"{head}{head}{frame}{frame}OSError: first\nKeyError: 'second'\nstep 7\nKeyError: 'said'"
    mixed = find_chains(lines(text))
    assert [(chain.root.type, chain.kind) for chain in mixed] == [("OSError", "main"), ("KeyError", "torn")]


def test_a_decorator_of_torch_distributed_above_the_program_makes_no_collective() -> None:
    library = '  File "/opt/lib/python3.10/site-packages/torch/distributed/elastic/errors.py", line 3, in call\n'
    job, end = '  File "/job/a.py", line 9, in main\n', "ValueError: x"
    assert not only(f"Traceback (most recent call last):\n{library}{job}{end}").root.collective
    assert only(f"Traceback (most recent call last):\n{job}{library}{end}").root.collective


def test_loguru_points_at_the_frame_with_an_arrow() -> None:
    frames = '  File "/job/a.py", line 9, in f\n> File "/job/b.py", line 4, in g\n'
    assert only(f"Traceback (most recent call last):\n{frames}KeyError: 1").root.where == "b.py:4"


@pytest.mark.parametrize("text", ["ValueError: skipping sample 3\nstep 4 loss 1\nstep 5 loss 1", "INFO: ok", ""])
def test_a_line_that_only_looks_like_an_exception_is_none(text: str) -> None:
    assert find_chains(lines(text)) == ()


@given(
    st.lists(
        st.sampled_from(
            [
                *PLAIN.split("\n"),
                "",
                "step 1",
                "During handling of the above exception, another exception occurred:",
                "│ /a.py:3 in f",
                "[rank1]: ValueError: x",
                "Exception ignored in: x",
            ]
        ),
        max_size=30,
    )
)
def test_no_mixture_of_lines_breaks_the_search(texts: Sequence[str]) -> None:
    found = find_chains([Line(text, "f", 0, None, "err") for text in texts])
    assert all(0 <= chain.first <= chain.last < len(texts) for chain in found)


def test_what_came_while_another_was_handled_is_known_from_what_was_raised_from_it() -> None:
    during = "\nDuring handling of the above exception, another exception occurred:\n\n"
    direct = "\nThe above exception was the direct cause of the following exception:\n\n"
    chain = only(PLAIN + during + PLAIN + direct + PLAIN)
    assert [one.during for one in chain.raised] == [False, True, False]
    assert chain.root.raised_in == ("/opt/lib/python3.10/site-packages/torch/nn/module.py", "forward")
    assert (chain.root.caught_in, chain.root.statement) == (("/job/train.py", "<module>"), 'raise ValueError("no")')


TRACEBACK = (
    'Traceback (most recent call last):\n  File "/job/train.py", line 9, in main\n'
    '    rate = parts["a\\\\b"] / n\nValueError: 比率 \'a\' is "odd"\n'
)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"level": "error", "exc_info": TRACEBACK, "rank": 3}),
        json.dumps({"level": "error", "exc_info": TRACEBACK}, ensure_ascii=False),
        f"{{'level': 'error', 'exc_info': {TRACEBACK!r}}}",
        f"ERROR {TRACEBACK!r}",
    ],
    ids=["json", "json-unicode", "repr-in-a-dictionary", "repr"],
)
def test_a_traceback_within_one_line_is_read_like_any_other(text: str) -> None:
    line = Line(text, "rank-0.out.0", 700, 12.5, "out")
    pieces = unfold([Line("before", "f"), line])
    raised = find_chains(pieces)[0].root
    assert (raised.type, raised.where) == ("ValueError", "train.py:9")
    assert raised.message == "比率 'a' is \"odd\""
    assert {(piece.file, piece.offset, piece.at_s) for piece in pieces[1:]} == {("rank-0.out.0", 700, 12.5)}


@pytest.mark.parametrize("text", ["Traceback (most recent call last):", "", r"path C:\new\table", r'{"msg": "a\nb"}'])
def test_other_lines_are_left_as_they_are(text: str) -> None:
    assert unfold([Line(text, "f")]) == (Line(text, "f"),)


@pytest.mark.parametrize(
    "text",
    [
        r"Traceback (most recent call last):\n",
        r'Traceback (most recent call last):\n\u12"',
        "Traceback (most recent call last):\\n\\",
        r"Traceback (most recent call last):\n\"\"\"}",
    ],
)
def test_a_torn_line_breaks_nothing(text: str) -> None:
    assert unfold([Line(text, "f")])
