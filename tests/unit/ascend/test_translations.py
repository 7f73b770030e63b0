"""Every message of the vendor tables and tool errors has a Chinese translation."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from ascendrun import ascend
from ascendrun.ascend.faults import fault_classes, fault_of
from ascendrun.ascend.tables import load_table
from ascendrun.ascend.variables import check_environment
from ascendrun.facts.chips import chip_of
from ascendrun.text import Text, translations

FOLDER = Path(ascend.__file__).parent
CHINESE = re.compile(r"[一-鿿]")
HALF_WIDTH = re.compile(r"[一-鿿][,:;()]|[,:;()][一-鿿]")


def literal_keys():
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Text":
                key, english = node.args[:2]
                if isinstance(key, ast.Constant):
                    yield key.value, english.value


def table_texts():
    for row in load_table("variables")["rows"]:
        for rule in row.get("harmful", ()):
            value = "x" if rule["when"] == "any" else rule["when"][1:]
            for family in ("910A", "910B3", "Ascend910", "310P3"):
                for found in check_environment({row["name"]: value}, chip_of(family)):
                    yield found.message
                    yield found.hint
    for name in ("NCCL_DEBUG", "CM_CHIEF_IP", "HCCL_NEW", "HCCL_CONECT_TIMEOUT"):
        for found in check_environment({name: "1"}):
            yield found.message
            yield found.hint
    for fault_class in fault_classes():
        yield fault_class.hint
    for row in load_table("fault_codes")["rows"]:
        yield fault_of(row["code"]).message


def test_every_literal_message_has_its_chinese():
    chinese, found = translations("zh"), list(literal_keys())
    assert len(found) > 60
    for key, english in found:
        assert CHINESE.search(chinese.get(key, "")), key
        assert sorted(re.findall(r"\{\w+", english)) == sorted(re.findall(r"\{\w+", chinese[key])), key
        assert not HALF_WIDTH.search(chinese[key]), key


def test_every_message_of_a_table_has_its_chinese():
    texts = {text.key: text for text in table_texts() if isinstance(text, Text)}
    assert len(texts) > 60
    missing = [key for key, text in texts.items() if not CHINESE.search(text.render("zh"))]
    assert missing == []
