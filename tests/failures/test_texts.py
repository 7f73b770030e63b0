"""No sentence of a diagnosis is broken: nothing empty in it, no half of a pair of quotes, no end in the middle."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from corpus import Builder, case_files, case_of

from ascendrun.ascend.signatures import signature_of
from ascendrun.health.diagnosis import Diagnosis, diagnose, render
from ascendrun.text.format import excerpt

CASES = case_files()
BROKEN = {
    "empty place": re.compile(r"\{[a-z_]*\}|``|(?<!\w)[(（][)）]|: ?[;,)]|…(?: (?:of|to) …)"),
    "two blanks": re.compile(r"\S {2,}"),
    "lost end": re.compile(r" (?:of|on|at|in|to|from|with|for|by|the|an?|and|or|than|as|between)[.:;,]?$"),
    "blank at an end": re.compile(r"^\s|\s$"),
    "lost object": re.compile(r" (?:of|at|from|with|for|by) [,;:)]"),
}


def sentences(found: Diagnosis, lang: str) -> Iterator[str]:
    shown = render(found, lang)
    yield from (shown.message, shown.cause, shown.hint)
    yield from (link.message for link in (*shown.chain, *shown.alternatives))
    yield from (text.render(lang) for text in (*shown.caveats, *shown.missing, *shown.outcome, *shown.anomalies))


def faults_in(text: str) -> list[str]:
    """The names of what is broken; [] nothing. An apostrophe is in words too, so single quotes are not counted."""
    faults = [name for name, pattern in BROKEN.items() if pattern.search(text)]
    return faults + [mark for mark in '`"' if text.count(mark) % 2]


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_no_sentence_of_a_diagnosis_is_broken(path: Path) -> None:
    _, found = case_of(path)
    shown = (text for lang in ("en", "zh") for text in sentences(found, lang))
    assert not {text: faults for text in shown if (faults := faults_in(text))}


OUTPUTS = [
    "RuntimeError: cannot read the index. Please run `fetch --all; rebuild --index` first",
    "RuntimeError: Please rebuild it with `make all` and pass `" + "--long-option " * 30 + "` to it",
    'RuntimeError: the field "rank" ' + "is not one of these: a, b, c " * 30 + 'of the group "left',
    "ImportError: /x/libop.so: version `OPS_9.1' not found (required by /x/libnet.so)",
    "HcclError: Heartbeat  lost,   nothing came",
]


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("output", OUTPUTS)
def test_an_excerpt_that_is_cut_is_still_a_sentence(output: str, lang: str) -> None:
    err = f'Traceback (most recent call last):\n  File "/job/a.py", line 3, in <module>\n    run()\n{output}'
    row = {"ranks": 2, "family": "npu", "groups": [{"ranks": "all", "at": 60, "exit": 1, "err": err}]}
    found = diagnose(Builder(row, seed="texts").evidence())
    assert not {text: faults for text in sentences(found, lang) if (faults := faults_in(text))}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("version `A_1' not  found", "version 'A_1' not found"),
        ("run `make` and `make in", "run `make` and make in"),
        ('"a" is not "b', '"a" is not b'),
        ("run `make`", "run `make`"),
    ],
)
def test_half_of_a_pair_of_quotes_is_removed(text: str, shown: str) -> None:
    assert excerpt(text) == shown


def test_a_clause_without_its_values_is_not_shown() -> None:
    row = signature_of("hccl-culprit-lost")
    assert row is not None
    assert row.words("en", {"device": "3"}).message == "HCCL names the rank whose heartbeat stopped"
    assert row.words("zh", {}).message.endswith("rank")
    assert row.words("en", {"device": "3", "peer": "10.0.0.1"}).message.endswith(": device 3 of 10.0.0.1")
