"""Each verb asks the cluster for the right thing, prints it in every format, and ends with the right exit code."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path
from typing import Any

import pyte
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ascendrun.cli.context import Screen
from ascendrun.cli.output import (
    HOSTILE,
    Column,
    format_pairs,
    format_record,
    format_table,
    headline,
    sanitise,
    sanitise_line,
    width_of,
)
from ascendrun.cluster import HostStatus
from ascendrun.core.errors import AscendrunError, InvalidInputError, Problem
from ascendrun.core.events import Event
from ascendrun.core.records import as_record
from tests.lib.story_cluster import Desk, make_job, rank_fails


def test_every_format_holds_the_same_job(desk: Desk) -> None:
    desk.cluster.view = make_job(state="RUNNING", started_at_s=1_763_600_001.5, progress={"step": 1})
    as_json = json.loads(desk.say("ps", "-o", "json").out)
    assert as_json["schema_version"] == 2
    job = as_json["jobs"][0]
    assert (job["created_at"], job["started_at"]) == ("2025-11-20T00:53:20.000Z", "2025-11-20T00:53:21.500Z")
    assert job["ended_at"] is None and job["hosts"] == ["n1", "n2"] and job["progress"] == {"step": 1}
    assert yaml.safe_load(desk.say("ps", "-o", "yaml").out) == as_json
    assert json.loads(desk.say("ps", "-o", "jsonl").out) == {"schema_version": 2, **job}
    row = next(csv.DictReader(io.StringIO(desk.say("ps", "-o", "csv").out)))
    assert list(row) == [name for name in job if not name.startswith("reason_")]  # a cell has the words only
    assert (row["id"], row["created_at"], json.loads(row["hosts"])) == ("j-0001", job["created_at"], ["n1", "n2"])


def test_an_empty_csv_still_has_its_header(desk: Desk) -> None:
    desk.cluster.view = make_job(state="FAILED")
    assert desk.say("ps", "-o", "csv").out.startswith("id,name,state,reason,attempt,hosts")


def test_show_tells_the_failing_rank_and_the_story(desk: Desk) -> None:
    desk.cluster.job_events = (Event("preflight-warning", {"warning": "QUEUED -> CHECKING"}, at_s=1.0),)
    desk.cluster.story = [rank_fails(1, 9)]
    out = desk.say("show", "demo").out
    assert "rank 1 on n1 exited with code 9" in out
    assert "exit code 9\n" in out and "SIGTERM" in out
    assert "QUEUED -> CHECKING" in out
    assert json.loads(desk.say("show", "demo", "-o", "json").out)["ranks"][1]["exit_code"] == 9


def test_nodes_that_do_not_answer_are_named_with_the_way_out(desk: Desk) -> None:
    good = HostStatus("n1", True, None, None, "n1", "3.11.7", 8, 64 << 30, 10 << 30, 0.002, None)
    bad = HostStatus("n2", False, "host key unknown", "ascendrun trust n2", *[None] * 7)
    desk.cluster.statuses = [bad, good]
    result = desk.say("nodes", "-H", "all.hosts")
    assert result.code == 6
    rows = [line.split("  ")[0] for line in result.out.splitlines()]
    assert rows == ["HOST", "n1", "n2"] and "64.0 GiB" in result.out and "UNREACH" in result.out
    assert "ascendrun trust n2" in result.err


def test_the_setting_names_the_hostfile(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCENDRUN_HOSTFILE", "all.hosts")
    desk.say("nodes")
    assert desk.cluster.calls[0][1] == ("n1", "n2")


def test_config_tells_each_value_and_its_origin(desk: Desk) -> None:
    desk.write_settings("exec_timeout_s: 7\n")
    shown = json.loads(desk.say("--color", "never", "config", "-o", "json").out)["settings"]
    settings = {one["name"]: one for one in shown}
    assert settings["exec_timeout_s"]["value"] == "7" and settings["exec_timeout_s"]["origin"].endswith("config.yaml")
    assert (settings["color"]["value"], settings["color"]["origin"]) == ("never", "--color")
    assert settings["state_dir"]["origin"] == "$ASCENDRUN_STATE_DIR"
    assert desk.say("config", "get", "exec_timeout_s").out == "7\n"
    assert "did you mean color" in desk.say("config", "get", "colour").err


def test_a_wrong_settings_file_is_shown_with_its_place(desk: Desk) -> None:
    file = desk.write_settings("exec_timeout_s: 7\ncolor: pink\n")
    result = desk.say("ps")
    assert result.code == 2
    assert f"{file}:2:1: " in result.err and "'pink'" in result.err
    assert "    2 | color: pink\n        ^\n" in result.err


@pytest.mark.parametrize(
    "text",
    [
        "notify: [{type: slack, url: https://hooks.slack.com/topsecret, stile: rich}]",
        "notify: https://hooks.slack.com/topsecret",
        "notify:\n  - {type: slack, ulr: https://hooks.slack.com/topsecret}",
        "deadman: {interval_s: soon, url: https://hc.example/topsecret}",
        "url: https://hooks.slack.com/topsecret",
        "webhook: {url: https://hooks.slack.com/topsecret}",
        'url: "https://hooks.slack.com/topsecret" x',
        "{color: pink, notify: [{type: slack, url: https://hooks.slack.com/topsecret}]}",
    ],
)
def test_no_line_of_a_settings_file_shows_a_credential(desk: Desk, text: str) -> None:
    desk.write_settings(text + "\n")
    result = desk.say("config")
    assert result.code == 2 and "config.yaml:" in result.err
    assert "topsecret" not in result.out + result.err


def test_validate_names_the_jobs_of_a_sweep(desk: Desk) -> None:
    text = (desk.folder / "job.yaml").read_text()
    (desk.folder / "sweep.yaml").write_text(f"{text}sweep: {{nodes: [1, 2]}}\n")
    result = desk.say("validate", "sweep.yaml")
    assert result.out == "sweep.yaml: valid: sweep of 2 jobs (demo-1, demo-2) on 2 hosts\n"


def test_validate_reports_every_problem_of_every_file(desk: Desk) -> None:
    (desk.folder / "bad.yaml").write_text("name: demo\ncomand: [x]\nnodes: 0\n")
    (desk.folder / "bad.hosts").write_text("n1 slot=8\nn1\n")
    result = desk.say("validate", "job.yaml", "bad.yaml", "bad.hosts", "missing.yaml")
    assert result.code == 2
    assert result.out == "job.yaml: valid: job demo on 2 hosts\n"
    for place in ("bad.yaml:2:", "bad.yaml:3:", "bad.hosts:1:4", "bad.hosts:2:1", "missing.yaml: cannot read the file"):
        assert f"error: {place}" in result.err
    assert "    1 | n1 slot=8\n           ^\n" in result.err


def test_validate_prints_the_steps_of_a_sample(desk: Desk) -> None:
    (desk.folder / "train.log").write_text("loading\n" + "".join(f"iter {n}: loss {n / 2}\n" for n in range(1, 31)))
    result = desk.say("validate", "--sample", "train.log")
    rows = [line.split() for line in result.out.splitlines()]
    assert result.code == 0 and rows[1][:3] == ["STEP", "TOTAL", "LOSS"]
    assert [row[0] for row in rows[2:]] == [*map(str, range(1, 11)), "…", *map(str, range(21, 31))]
    pattern = "progress: {pattern: 'done (?P<step>\\d+)'}\n"
    (desk.folder / "own.yaml").write_text("name: own\ncommand: [x]\nhostfile: all.hosts\n" + pattern)
    (desk.folder / "own.log").write_text("iter 1: loss 2\ndone 7\n")
    own = desk.say("validate", "own.yaml", "--sample", "own.log")
    assert own.code == 0 and own.out.splitlines()[-1].split()[0] == "7"


def test_validate_of_a_sample_without_steps_fails(desk: Desk) -> None:
    (desk.folder / "train.log").write_text("the loss of step 3 was fine\n")
    assert desk.say("validate", "--sample", "train.log").code == 2
    assert desk.say("validate", "--sample", "missing.log").code == 2
    assert desk.say("validate").code == 2


def test_the_schema_is_json(desk: Desk) -> None:
    assert "properties" in json.loads(desk.say("schema").out)


def test_completion_answers_with_verbs(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_ASCENDRUN_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "ascendrun s")
    monkeypatch.setenv("COMP_CWORD", "1")
    words = [line.split(",")[1] for line in desk.say().out.splitlines()]
    assert words == ["submit", "sweep", "show", "stacks", "shell", "stop", "schema", "sim"]


def test_init_lists_and_copies(desk: Desk) -> None:
    names = [line.split()[0] for line in desk.say("init", "--list").out.splitlines()]
    assert "quickstart" in names
    result = desk.say("init", "quickstart", "mine")
    assert result.code == 0 and all(Path(line).is_file() for line in result.out.splitlines())
    assert desk.say("init", "quickstart", "mine").code == 7


def test_a_fifo_is_no_hostfile(desk: Desk, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.hosts")
    result = desk.say("nodes", "-H", str(tmp_path / "pipe.hosts"))
    assert result.code == 2 and "fifo" in result.err


def test_a_value_of_several_lines_is_shown_in_several_lines() -> None:
    assert format_pairs([("reason", "one\ntwo"), ("x", "y")]) == "reason  one\n        two\nx       y\n"


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["sbmit", "x"], 2, "hint: ascendrun submit"),
        (["list"], 2, "hint: ascendrun ps"),
        (["delete", "j-0001"], 2, "hint: ascendrun rm"),
        (["ps", "--nosuch"], 2, "hint: ascendrun ps --help"),
        (["submit"], 2, "error: missing FILE"),
        (["submit", "job.yaml", "--detatch"], 2, "--detach"),
        (["submit", "job.yaml", "--wait", "--detach"], 2, "--detach cannot be combined with --wait"),
        (["submit", "missing.yaml"], 2, "missing.yaml: cannot read the file"),
        (["ps", "-o", "xml"], 2, "'xml'"),
        (["show", "nothing"], 4, "hint: ascendrun ps -a"),
        (["wait", "demo", "--timeout", "soon"], 2, "got 'soon'"),
        (["nodes", "-H", "missing.hosts"], 2, "missing.hosts: cannot read the file"),
        (["exec", "-H", "all.hosts", "--hosts", "n7", "--", "x"], 4, "n7"),
        (["trust", "n[1-"], 2, "HOSTS"),
        (["trust", "all.hosts"], 2, "--hostfile all.hosts"),
        (["nodes"], 2, "--hostfile"),
        (["init"], 2, "quickstart"),
        (["report", "nobody"], 4, "nobody"),
        (["top", "--once", "--job", "nosuch"], 4, "nosuch"),
        (["events", "--kind", "state-change"], 2, "did you mean"),
        (["events", "--kind", "asked"], 2, "stop-requested"),
        (["events", "--since", "soon"], 2, "--since"),
        (["events", "-f", "-o", "json"], 2, "jsonl"),
        (["bundle", "demo", "--max-size", "huge"], 2, "100M"),
        (["bundle", "demo", "--layout", "ascend-fd", "--no-logs"], 2, "--no-logs"),
        (["history", "--by", "user", "-q"], 2, "--by"),
        (["history", "--by", "user", "-o", "name"], 2, "--by"),
        (["history", "--since", "soon"], 2, "--since"),
    ],
)
def test_a_wrong_command_line_says_what_and_how(desk: Desk, argv: list[str], code: int, words: str) -> None:
    result = desk.say(*argv)
    assert (result.code, result.out) == (code, "")
    assert words in result.err and result.err.startswith("error: ")


@pytest.mark.parametrize("kind", AscendrunError.__subclasses__())
def test_every_error_becomes_a_sentence_a_hint_and_its_exit_code(
    desk: Desk, kind: type[AscendrunError], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = (
        InvalidInputError([Problem("f", 1, 2, "m", "h")]) if kind is InvalidInputError else kind("what", hint="way out")
    )

    def refuse(**_: Any) -> None:
        raise error

    monkeypatch.setattr(desk.cluster.jobs, "list", refuse)
    result = desk.say("ps")
    assert result.code == kind.exit_code
    assert result.err == ("error: f:1:2: m\nhint: h\n" if kind is InvalidInputError else "error: what\nhint: way out\n")


def test_our_own_fault_is_one_sentence_and_a_file(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(**_: Any) -> None:
        raise ZeroDivisionError("secret\x1b[2J")

    monkeypatch.setattr(desk.cluster.jobs, "list", break_down)
    result = desk.say("ps")
    assert result.code == 8
    sentence, hint = result.err.splitlines()
    assert sentence == "error: internal error: ZeroDivisionError: secret"
    path = Path(hint.rpartition(" ")[2])
    assert path.is_relative_to(desk.folder / "state") and path.stat().st_mode & 0o777 == 0o600
    assert "Traceback" in path.read_text() and "Traceback" not in result.err


def test_the_verbs_have_two_examples_each(desk: Desk) -> None:
    from ascendrun.cli.app import COMMANDS

    for verb in COMMANDS:
        text = desk.say(verb.name, "--help").out
        examples = text[text.index("Examples:") :].splitlines()
        assert sum("ascendrun" in line for line in examples) >= 2, verb.name


@pytest.mark.parametrize(("alias", "verb"), [("run", "submit"), ("ls", "ps"), ("kill", "stop"), ("status", "show")])
def test_aliases_are_the_verbs_that_others_know(desk: Desk, alias: str, verb: str) -> None:
    assert desk.say(alias, "--help").out == desk.say(verb, "--help").out


def test_no_verb_at_all_shows_the_help(desk: Desk) -> None:
    result = desk.say()
    assert result.code == 0
    assert result.out.startswith("Usage: ascendrun [OPTIONS] COMMAND")


@pytest.mark.parametrize("argv", [["--version"], ["--color", "never", "--version"]])
def test_the_version_is_told(desk: Desk, argv: list[str]) -> None:
    from ascendrun import __version__

    assert desk.say(*argv).out == f"ascendrun {__version__}\n"


def test_help_of_a_command_by_its_name(desk: Desk) -> None:
    assert desk.say("help", "ps").out == desk.say("ps", "--help").out
    assert desk.say("help").out == desk.say("--help").out


@pytest.mark.parametrize(
    ("flag", "variable", "setting", "locale", "language"),
    [
        ("zh", "en", "en", "C", "zh"),
        (None, "zh", "en", "C", "zh"),
        (None, None, "zh", "en_US.UTF-8", "zh"),
        (None, None, None, "zh_CN.UTF-8", "zh"),
        (None, None, "en", "zh_CN.UTF-8", "en"),
        (None, None, None, "C", "en"),
    ],
)
def test_the_language(
    desk: Desk,
    monkeypatch: pytest.MonkeyPatch,
    flag: str | None,
    variable: str | None,
    setting: str | None,
    locale: str,
    language: str,
) -> None:
    monkeypatch.setenv("LC_ALL", locale)
    monkeypatch.setenv("ASCENDRUN_LANG", variable or "")
    if setting is not None:
        desk.write_settings(f"color: never\nlang: {setting}\n")
    for words in (
        (["--lang", flag, "ps", "--nosuch"], ["ps", "--nosuch", f"--lang={flag}"]) if flag else (["ps", "--x"],)
    ):
        assert desk.say(*words).err.startswith("错误" if language == "zh" else "error"), words


def test_settings_files_are_those_that_are_loaded() -> None:
    from ascendrun.cli import language
    from ascendrun.core import settings

    for environ in ({"XDG_CONFIG_HOME": "/c"}, {}):
        assert language.settings_files(environ) == tuple(map(str, settings.settings_files(environ)))


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
