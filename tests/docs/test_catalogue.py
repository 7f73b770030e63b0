"""Every message has a key of its own, its values, and a Chinese template with the same placeholders."""

import importlib
import re
from collections import defaultdict
from pathlib import Path

import click
import pytest

from ascendrun.cli.app import COMMANDS
from ascendrun.text import Text, use_language
from tests.docs.catalogue import CHINESE, PACKAGE, chinese, fields, files_of, inline, tables, templates

SAME_IN_CHINESE = frozenset(
    """
    column.id column.pid column.python column.rank jobfile.value report.mfu report.tokens-per-s
    sim.no-compiler.hint options.row options.value diagnosis.stage-skipped.hint diagnosis.time-limit.cause
    notify.block-url program.device-speed node.command-not-executable.hint node.unknown-op.hint
    signature.inotify-exhausted.hint signature.memlock-too-small.hint ssh.trust
    ssh.verbose ssh.jump-failed.hint
    """.split()
)
"""Entries that are a command, the name of a key or a unit and nothing else, each looked at."""
UNTRANSLATED = re.compile(r"\{[^{}]*\}|\brank\b")
"""Placeholders, and the term that stays (docs/style.md)."""
HALF_WIDTH = re.compile(
    r"[\u4e00-\u9fff][,:;()!?]"
    r"|[,:;!?] ?[\u4e00-\u9fff]"
    r"|[()][\u4e00-\u9fff]"
    r"|\S;\S"
)
"""Next to a Chinese character; a semicolon between commands also where no Chinese stands next to it."""


def test_a_key_has_one_template() -> None:
    templates = defaultdict(set)
    for message in inline():
        templates[message.key].add(message.english)
    assert {key: sorted(found) for key, found in templates.items() if len(found) > 1} == {}


def test_a_call_gives_every_value_of_its_template() -> None:
    """More than those is fine: programs read them, and a translation may use them."""
    wrong = [
        f"{message.place}: {message.key}: {sorted(fields(message.english) - message.values)}"
        for message in inline()
        if message.values is not None and not message.values >= fields(message.english)
    ]
    assert wrong == []


def test_every_message_is_in_chinese_with_the_same_placeholders() -> None:
    rows = chinese()
    missing = sorted({message.key for message in inline()} - set(rows))
    assert missing == []
    assert [message.key for message in inline() if fields(message.english) != fields(rows[message.key])] == []


def test_a_chinese_entry_is_chinese() -> None:
    """One of placeholders alone has nothing to translate."""
    latin = {
        key: text
        for key, text in chinese().items()
        if not CHINESE.search(text) and re.search(r"[A-Za-z]{2,}", UNTRANSLATED.sub("", text))
    }
    assert {key: text for key, text in latin.items() if key not in SAME_IN_CHINESE} == {}


def test_punctuation_in_chinese_sentences_is_full_width() -> None:
    """In code spans and placeholders, and in the examples of help, it is code."""
    sentences = {
        key: re.sub(r"`[^`]*`|\{[^{}]*\}", "X", re.sub(r"\{\{|\}\}", "", text))
        for key, text in chinese().items()
        if CHINESE.search(text) and not key.endswith(".examples")
    }
    assert {key: text for key, text in sentences.items() if HALF_WIDTH.search(text)} == {}


def test_chinese_messages_do_not_plead() -> None:
    """Hints are imperative: "please" is for the docs (docs/style.md)."""
    assert {key: text for key, text in chinese().items() if re.search("请(?!求)", text.replace("申请", ""))} == {}


def test_every_message_of_a_program_is_printed_by_some_code() -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    named = set(re.findall(r"""["']([\w.-]+)["']""", code))
    keys = [key for key in templates(files_of("en")[0]) if key.startswith(("program.", "lightning."))]
    assert [key for key in keys if key not in named and key.partition(".")[2] not in named] == []


def test_examples_of_help_are_the_same_commands_in_chinese() -> None:
    rows = chinese()

    def commands(text: str) -> list[str]:
        return [re.split(r"\s+#\s", line)[0].rstrip() for line in text.splitlines()]

    for entry in COMMANDS:
        command = getattr(importlib.import_module(f"ascendrun.cli.commands.{entry.module}"), entry.attribute)
        shown = rows.get(f"help.{entry.name}.examples", command.examples)
        assert commands(shown) == commands(command.examples), entry.name


@pytest.mark.parametrize("path", [*files_of("en"), *files_of("zh")], ids=lambda path: path.parent.name)
def test_a_file_of_templates_is_sorted(path: Path) -> None:
    """Two people who add keys change different lines."""
    assert list(templates(path)) == sorted(templates(path))


def test_every_message_renders_in_both_languages_whatever_its_values() -> None:
    for message in inline():
        values = dict.fromkeys(fields(message.english), None)
        for lang in ("en", "zh", "pseudo"):
            assert Text(message.key, message.english, **values).render(lang)


def test_a_python_format_of_a_value_applies() -> None:
    assert Text("a.b", "{seconds:.0f} s, {code:04d}", seconds=3900.2, code=7).render("en") == "3900 s, 0007"
    assert Text("a.b", "{seconds:.0f} s", seconds="soon").render("en") == "soon s"


def test_every_row_of_a_table_is_in_chinese_with_the_same_placeholders() -> None:
    rows = chinese()
    found = [message for message in tables() if re.search("[A-Za-z]", UNTRANSLATED.sub("", message.english))]
    assert sorted({message.key for message in found} - set(rows)) == []
    assert [message.key for message in found if fields(message.english) != fields(rows[message.key])] == []


def test_every_command_has_help_in_chinese() -> None:
    from ascendrun.cli.app import summary_of
    from ascendrun.cli.options import option_help, translated_help

    english = []
    try:
        use_language("zh")
        for entry in COMMANDS:
            command = getattr(importlib.import_module(f"ascendrun.cli.commands.{entry.module}"), entry.attribute)
            texts = {
                f"help.{entry.name}.summary": summary_of(entry),
                f"help.{entry.name}": translated_help(f"help.{entry.name}", command.help),
                **{
                    f"help.{entry.name}.{max(option.opts, key=len)}": option_help(entry.name, option)
                    for option in command.params
                    if isinstance(option, click.Option) and not option.hidden
                },
            }
            english += [key for key, text in texts.items() if text and not CHINESE.search(text)]
    finally:
        use_language("en")
    assert english == []
