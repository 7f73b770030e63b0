"""Nothing that a remote text holds reaches the terminal as a command."""

from __future__ import annotations

import json

import pyte
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ascendrun.cli.context import Screen
from ascendrun.cli.output import (
    HOSTILE,
    Column,
    format_record,
    format_table,
    headline,
    sanitise,
    sanitise_line,
    width_of,
)
from ascendrun.core.records import as_record
from tests.lib.story_cluster import Desk, make_job

HOSTILE_TEXTS = [
    "\x1b]52;c;cm0gLXJmIH4K\x07clipboard",
    "\x1b]0;title\x1b\\title",
    "\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\",
    "\x1b[2J\x1b[H\x1b[10Acursor",
    "\x1b[31mred\x1b[0m \x1b[38;5;196mdeep\x1b[m",
    "\x1b]0;never ended",
    "\x1bP+q544e\x1b\\dcs",
    "\x1b(0charset\x1b(B \x1bc reset",
    "\x9b31mC1 \x9d0;title\x9c",
    "bell\x07 back\x08\x08\x08 nul\x00 del\x7f vt\x0b ff\x0c",
    "over\rwritten",
    "\u202egnp.exe \u2066iso\u2069 \u200frtl",
    "line\u2028separator\u2029",
    "\ud800half",
    "[/foo] [bold]x[/bold] {0} %s",
    "\x1b\x1b[31m\x1b[",
]


@pytest.mark.parametrize("text", HOSTILE_TEXTS)
def test_a_hostile_text_is_shown_without_any_control(text: str) -> None:
    assert HOSTILE.search(sanitise(text)) is None
    sanitise(text).encode("utf-8")


@given(st.text(alphabet=st.one_of(st.sampled_from("\x1b[]0;?m\x07\\P\x9b\x9dabc\u202e\n\t"), st.characters())))
def test_no_text_at_all_gets_a_control_through(text: str) -> None:
    assert HOSTILE.search(sanitise(text)) is None


@given(st.text(alphabet=st.characters(exclude_categories=["Cc", "Cs", "Cf", "Zl", "Zp"])))
def test_plain_text_of_any_language_is_left_alone(text: str) -> None:
    assert sanitise(text) == text


def test_what_is_dropped_and_what_is_shown() -> None:
    assert sanitise("\x1b[31mred\x1b[0m\tx\n") == "red\tx\n"
    assert sanitise("\x1b]0;never ended") == "\\x1b]0;never ended"
    assert sanitise("\u202egnp \x9b1m \x07") == "\\u202egnp \\x9b1m \\x07"
    assert sanitise_line("a\nb\tc") == "a\\nb c"


@pytest.mark.parametrize("text", HOSTILE_TEXTS)
@pytest.mark.parametrize("output", [[], ["-o", "wide"], ["-o", "json"], ["-o", "jsonl"], ["-o", "yaml"], ["-o", "csv"]])
def test_no_output_format_lets_a_control_through(desk: Desk, text: str, output: list[str]) -> None:
    desk.cluster.view = make_job(name=text, reason=text, progress={"step": text, "loss": text})
    result = desk.say("ps", *output)
    assert result.code == 0
    assert HOSTILE.search(result.out.replace("\n", "")) is None


@pytest.mark.parametrize("text", [text for text in HOSTILE_TEXTS if "\ud800" not in text])
def test_json_and_yaml_still_carry_the_text_itself(text: str) -> None:
    job = make_job(name=text)
    assert json.loads(format_record(as_record(job), "json"))["name"] == text
    assert yaml.safe_load(format_record(as_record(job), "yaml"))["name"] == text


@pytest.mark.parametrize("text", HOSTILE_TEXTS)
def test_errors_and_talk_are_harmless_too(desk: Desk, text: str) -> None:
    for argv in (["show", text], [text], ["config", "get", text], ["exec", "--hosts", text, "x"], ["ps", "-x" + text]):
        result = desk.say(*argv)
        assert result.code in (2, 4)
        assert HOSTILE.search(result.err.replace("\n", "")) is None, argv


def test_a_hostile_log_leaves_the_terminal_as_it_was() -> None:
    screen, title = pyte.Screen(80, 10), "mine"
    screen.set_title(title)
    stream = pyte.Stream(screen)
    for text in HOSTILE_TEXTS:
        stream.feed(sanitise(text).replace("\n", "\r\n") + "\r\n")
    assert screen.title == title
    assert screen.cursor.attrs.fg == "default"
    assert "half" in "\n".join(screen.display)


def test_wide_characters_keep_columns_aligned() -> None:
    rows = ["损失", "loss", "e\u0301te\u0301"]
    lines = format_table(rows, [Column("NAME", str), Column("X", lambda row: "x")]).splitlines()
    assert {width_of(line) for line in lines} == {7}


def test_the_bottom_line_shows_no_control(capsys: pytest.CaptureFixture[str]) -> None:
    import sys

    Screen(sys.stdout, sys.stderr, has_color=lambda: False, is_live=True).progress("\x1b]0;x\x07step\n1")
    assert capsys.readouterr().err == "step\\n1"


def test_of_several_lines_a_headline_is_the_first_with_a_mark() -> None:
    assert headline("one\ttwo\n  three\n") == "one two …"
    assert headline("one\n") == "one" and headline("") == ""
