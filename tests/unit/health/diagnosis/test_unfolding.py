"""Tracebacks that a logger wrote as one line."""

from __future__ import annotations

import json

import pytest

from ascendrun.health.diagnosis import Line
from ascendrun.health.diagnosis.lines.tracebacks import find_chains, unfold

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
