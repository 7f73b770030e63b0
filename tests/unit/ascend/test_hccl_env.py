"""HCCL's own word on its settings, in every form that it is known to use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascendrun.ascend.hccl_env import HcclSetting, parse_hccl_env

HEAD = "[INFO] HCCL(4242,python3):2026-01-06-15:38:29.881.877 [externalinput.cc:598] [4242]"


@pytest.mark.parametrize(
    ("text", "name", "value", "unit", "origin"),
    [
        ("[HCCL_ENV] HCCL_CONNECT_TIMEOUT set by default to [120]s", "HCCL_CONNECT_TIMEOUT", "120", "s", "default"),
        ("HCCL_EXEC_TIMEOUT set by environment to [600]s", "HCCL_EXEC_TIMEOUT", "600", "s", "environment"),
        ("[HCCL_ENV] HCCL_BUFFSIZE set by environment to [1]M", "HCCL_BUFFSIZE", "1", "M", "environment"),
        ("[HCCL_ENV] HCCL_IF_IP is not set", "HCCL_IF_IP", None, "", "unset"),
        ("[HCCL_ENV] HCCL_SOCKET_IFNAME set by default to [EmptyString]", "HCCL_SOCKET_IFNAME", None, "", "unset"),
        (
            "[HCCL_ENV] HCCL_SOCKET_FAMILY is not set and is used by default [AF_INET]",
            "HCCL_SOCKET_FAMILY",
            "AF_INET",
            "",
            "default",
        ),
        (
            "[HCCL_ENV] HCCL_INTER_HCCS_DISABLE is not set, default value is FALSE.",
            "HCCL_INTER_HCCS_DISABLE",
            "FALSE",
            "",
            "default",
        ),
        (
            "[HCCL_ENV] HCCL_MULTI_QP_THRESHOLD is set to default value [512]KB",
            "HCCL_MULTI_QP_THRESHOLD",
            "512",
            "KB",
            "default",
        ),
        (
            "[HCCL_ENV][ParseRetryEnable] HCCL_OP_RETRY_ENABLE set by environment variable to [L0:0,L1:0].",
            "HCCL_OP_RETRY_ENABLE",
            "L0:0,L1:0",
            "",
            "environment",
        ),
        (
            "[HCCL_ENV] environmental variable HCCL_OP_EXPANSION_MODE is [HOST], aicpuUnfold[0]",
            "HCCL_OP_EXPANSION_MODE",
            "HOST",
            "",
            "unknown",
        ),
        (
            "[HCCL_ENV][Parse]environmental variable HCCL_RDMA_QP_PORT_CONFIG_PATH is empty",
            "HCCL_RDMA_QP_PORT_CONFIG_PATH",
            None,
            "",
            "unset",
        ),
        (
            "[HCCL_ENV] HCCL_DEBUG_CONFIG is not set, debugConfig set by default to 0x0",
            "HCCL_DEBUG_CONFIG",
            "0x0",
            "",
            "default",
        ),
        (
            '[Init][EnvVarParam]Env config "HCCL_IF_BASE_PORT" is not set. Default value is used.',
            "HCCL_IF_BASE_PORT",
            None,
            "",
            "unset",
        ),
    ],
)
def test_a_form_is_read(text: str, name: str, value: str | None, unit: str, origin: str) -> None:
    (found,) = parse_hccl_env([HEAD + text]).values()
    assert (found.name, found.value, found.unit, found.origin) == (name, value, unit, origin)


def test_a_line_about_two_settings_gives_both() -> None:
    line = HEAD + "HCCL_INTRA_PCIE_ENABLE set by default to [1], HCCL_INTRA_ROCE_ENABLE set by default to [0]"
    assert [(one.name, one.value) for one in parse_hccl_env([line]).values()] == [
        ("HCCL_INTRA_PCIE_ENABLE", "1"),
        ("HCCL_INTRA_ROCE_ENABLE", "0"),
    ]


def test_the_first_word_on_a_setting_counts() -> None:
    lines = [HEAD + f"HCCL_EXEC_TIMEOUT set by environment to [{value}]s" for value in (600, 900)]
    assert parse_hccl_env(lines) == {"HCCL_EXEC_TIMEOUT": HcclSetting("HCCL_EXEC_TIMEOUT", "600", "s", "environment")}


def test_other_lines_say_nothing() -> None:
    assert parse_hccl_env([HEAD + "[InitGroupStage] HCCL_CONNECT_TIMEOUT may be too short", "", "x" * 100_000]) == {}


@given(st.lists(st.text(max_size=200), max_size=5))
def test_no_text_makes_it_raise(lines: list[str]) -> None:
    parse_hccl_env([*lines, *(HEAD + "HCCL_ENV set by " + line for line in lines)])


@pytest.mark.skipif("ASCENDRUN_ASCEND_SAMPLES" not in os.environ, reason="the real samples are not ours to commit")
def test_every_setting_of_the_real_logs_is_read() -> None:
    path = Path(os.environ["ASCENDRUN_ASCEND_SAMPLES"]) / "log_hccl_plog_samples_all.txt"
    lines = [line for line in path.read_text().splitlines() if "[HCCL_ENV]" in line]
    found = parse_hccl_env(lines)
    assert lines and all(any(name in line for name in found) for line in lines if " HCCL_" in line)
