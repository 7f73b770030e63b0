"""Every message has a key of its own, its values, and a Chinese template with the same placeholders."""

from __future__ import annotations

import json
from collections import defaultdict

from ascendrun.text import Text
from tests.docs.catalogue import CHINESE, PACKAGE, chinese, fields, inline

SAME_IN_CHINESE = frozenset(
    {
        "doctor.cluster-finding",
        "doctor.command-output",
        "doctor.finding",
        "doctor.summary",
        "straggler.cause-and-metrics",
        "agent.on-host",
        "node.command-not-executable.hint",
        "node.directory-unusable",
        "node.disk-full",
        "node.error",
        "node.failure",
        "node.failure-and-hint",
        "node.file-error",
        "node.os-error",
        "node.several",
        "node.unknown-op.hint",
    }
)
"""Keys whose Chinese entry has no Chinese character, each looked at: names, units, commands."""


def test_a_key_has_one_template() -> None:
    templates = defaultdict(set)
    for message in inline():
        templates[message.key].add(message.english)
    assert {key: sorted(found) for key, found in templates.items() if len(found) > 1} == {}


def test_the_values_of_a_call_are_those_of_its_template() -> None:
    wrong = [
        f"{message.place}: {message.key}: {sorted(message.values ^ fields(message.english))}"
        for message in inline()
        if message.values is not None and message.values != fields(message.english)
    ]
    assert wrong == []


def test_every_message_is_in_chinese_with_the_same_placeholders() -> None:
    rows = chinese()
    missing = sorted({message.key for message in inline()} - set(rows))
    assert missing == []
    assert [message.key for message in inline() if fields(message.english) != fields(rows[message.key])] == []


def test_a_chinese_entry_is_chinese() -> None:
    assert [key for key, text in chinese().items() if not CHINESE.search(text) and key not in SAME_IN_CHINESE] == []


def test_a_key_is_in_one_file_once() -> None:
    def pairs(found: list[tuple[str, str]]) -> dict[str, str]:
        assert len(dict(found)) == len(found), "a key stands twice"
        return dict(found)

    seen: dict[str, str] = {}
    for file in sorted((PACKAGE / "text" / "zh").glob("*.json")):
        for key in json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=pairs):
            assert seen.setdefault(key, file.name) == file.name, key


def test_every_message_renders_in_both_languages_whatever_its_values() -> None:
    for message in inline():
        values = dict.fromkeys(fields(message.english), None)
        for lang in ("en", "zh", "pseudo"):
            assert Text(message.key, message.english, **values).render(lang)
