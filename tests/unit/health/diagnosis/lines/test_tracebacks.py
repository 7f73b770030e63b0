"""Tracebacks in streams, also those that a logger wrote as one line; tests/failures has the rest in whole jobs."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascendrun.health.diagnosis.evidence import Line
from ascendrun.health.diagnosis.lines.tracebacks import read_chains, unfold


def kind_of(text: str) -> str:
    [chain], _ = read_chains([Line(one, "f", 0, None, "err") for one in text.split("\n")])
    return chain.kind


PLAIN = """Traceback (most recent call last):
  File "/job/train.py", line 8, in <module>
    main()
  File "/opt/lib/python3.10/site-packages/torch/nn/module.py", line 99, in forward
    raise ValueError("no")
ValueError: no
"""


def test_what_python_passed_over_is_marked() -> None:
    assert kind_of("Exception ignored in: <function Pool.__del__ at 0x1>\n" + PLAIN) == "ignored"
    assert kind_of("Exception in thread Thread-3 (run):\n" + PLAIN) == "thread"
    assert kind_of(PLAIN) == "main"


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
    found, _ = read_chains([Line(text, "f", 0, None, "err") for text in texts])
    assert all(0 <= chain.first <= chain.last < len(texts) for chain in found)


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
    raised = read_chains(pieces)[0][0].root
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
