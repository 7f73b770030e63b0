"""What tables and parsers say in English is said in Chinese too."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascendrun.ascend.chips import chip_of, device_faults
from ascendrun.ascend.compatibility import MISFIT, Versions, judge_versions
from ascendrun.ascend.install import parse_driver, parse_firmware
from ascendrun.ascend.tables import load_table
from ascendrun.ascend.tool_errors import read_error
from ascendrun.ascend.variables import judge_environment, known_variables
from ascendrun.core.findings import Finding, Severity
from ascendrun.health.texts import render
from ascendrun.health.texts.phrases import translate

SENTENCE = re.compile(r"[a-z]{2,} [a-z]{2,}")
CHINESE = re.compile(r"[\u4e00-\u9fff]")
COMMAND = re.compile(r"(?:lsmod|find|npu-smi|ls|dmesg|lspci|pip|docker) |[A-Z_]+=")


def untold(phrases):
    return [
        one
        for one in phrases
        if one and SENTENCE.search(one) and not COMMAND.match(one) and not CHINESE.search(translate(one, "zh"))
    ]


def test_every_sentence_of_the_tables_has_its_chinese():
    variables, faults = load_table("variables"), load_table("fault_codes")
    rules = [*variables["prefixes"], *(rule for row in variables["rows"] for rule in row.get("harmful", ()))]
    said = [rule[part] for rule in rules for part in ("says", "hint")]
    said += [one["hint"] for one in faults["classes"]] + [row["says"] for row in faults["rows"]]
    assert untold(said) == []


VALUES = st.sampled_from(
    [
        "",
        "0",
        "1",
        "-1",
        "9999999",
        "1800",
        "600",
        "abc",
        "0,0",
        "1,0",
        "0, 1",
        "^eth0",
        "a b c",
        "70000",
        "level0:ring",
        "x:y",
        "x",
        "expandable_segments:True,max_split_size_mb:50",
        "max_split_size_mb:1",
        "relative/path",
        "AIV",
        "true",
        "DEBUG",
    ]
)
NAMES = st.sampled_from([*known_variables(), "HCCL_CONECT_TIMEOUT", "HCCL_NEW", "NCCL_DEBUG", "CM_CHIEF_IP"])


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(NAMES, VALUES, max_size=6), st.sampled_from(["910A", "910B3", "Ascend910", "310P3", None]))
def test_whatever_is_wrong_with_a_variable_is_said_in_chinese(environment, chip):
    found = judge_environment(environment, chip_of(chip) if chip else None)
    assert untold(part for one in found for part in (one.says, one.hint)) == []


@pytest.mark.parametrize(
    "versions",
    [
        Versions("2.4.0", "2.6.0", "8.0.RC3", "3.10.1"),
        Versions("2.9.0", "2.9.0", "8.0.RC3", "3.7.1"),
        Versions("2.4.0", "2.4.0+cu121", "9.1.0", "3.10.1"),
        Versions("2.4.0.dev2", "2.4.0", "8.0.RC3", "3.10.1"),
        Versions(
            driver=parse_driver("Version=1.0\ncompatible_version_fw=[7.0.0,7.1.99]\n"),
            firmware=parse_firmware("Version=9.0.0\n"),
        ),
    ],
)
def test_versions_that_do_not_fit_are_said_in_chinese(versions):
    found = [fact for fact in judge_versions(versions) if fact.verdict == MISFIT or fact.pair.startswith("torch_npu")]
    assert (
        found
        and untold(part for fact in found if fact.verdict != "fits" for part in (fact.says, fact.hint or "")) == []
    )


def test_device_sets_and_errors_of_the_tools_are_said_in_chinese():
    sets = [
        *device_faults(chip_of("910A"), (0, 1, 2)),
        *device_faults(chip_of("910A"), (3, 4)),
        *device_faults(chip_of("Ascend910"), (0, 3)),
    ]
    assert len(sets) >= 3 and untold(sets) == []
    errors = [
        read_error(line)
        for line in (
            "dcmi module initialize failed. ret is -8006",
            "Permission denied",
            "npu-smi: command not found",
            "libdcmi.so: error while loading shared libraries: libdcmi.so: cannot open",
            "Command execute failed!",
            "This device does not support querying product.",
            "Invalid chip id.",
            "Failed to query",
        )
    ]
    assert all(errors) and untold(part for error in errors for part in (error.says, error.hint or "")) == []


def test_values_that_are_no_phrases_are_left_as_they_are():
    finding = Finding(
        "variable-wrong",
        Severity.FAIL,
        ("n1",),
        {"name": "drop it", "value": "watch", "says": "outside 120 to 7200 s", "hint": "unset it"},
    )
    words = render(finding, "zh")
    assert words.says == "drop it=watch:超出范围 120 to 7200 s" and words.advice == "取消设置"
    assert render(finding, "en").says == "drop it=watch: outside 120 to 7200 s"
    assert translate("never heard of", "zh") == "never heard of"
