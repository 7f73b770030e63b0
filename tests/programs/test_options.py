"""The option table and the command line made from it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ascendrun.programs.trainer.options import READERS, BadOptions, parse, parse_or_exit, read_table

TABLE = Path(__file__).resolve().parents[2] / "ascendrun" / "programs" / "trajectory" / "options.json"


def test_every_row_of_the_table_is_one_that_the_head_can_read():
    known = {"type", "default", "help", "choices", "min", "max", "required"}
    for name, row in json.loads(TABLE.read_text()).items():
        assert set(row) <= known and {"type", "default", "help"} <= set(row), name
        assert row["type"] in READERS and name.isidentifier()
        if "choices" in row:
            assert row["default"] in row["choices"], name


def test_defaults_hold_without_any_option():
    values = parse([], read_table(TABLE))
    assert values["data"] == "" and values["columns"] == [] and values["split_column"] is True


def test_values_get_the_type_of_their_row():
    values = parse(["--columns=time=T,lat=Y", "--lr=1e-4", "--split_column=false", "--epochs=3"], read_table(TABLE))
    assert values["columns"] == ["time=T", "lat=Y"] and values["split_column"] is False
    assert (values["lr"], values["epochs"]) == (1e-4, 3)


def test_all_problems_of_a_command_line_are_told_together():
    with pytest.raises(BadOptions) as caught:
        parse(
            ["--epoch=3", "--lr=fast", "--epochs=0", "--pooling=first", "--dropout=nan", "--split_column=maybe"],
            read_table(TABLE),
        )
    text = str(caught.value)
    assert "--epoch=3: no such option; did you mean --epochs?" in text
    for expected in (
        "--lr=fast: must be a number",
        "--epochs=0: must be at least 1",
        "must be one of mean, last",
        "--dropout=nan: must be a finite number",
        "--split_column=maybe: must be true or false",
    ):
        assert expected in text


def test_an_option_without_its_value_is_told_in_one_line(capsys):
    with pytest.raises(SystemExit) as ended:
        parse_or_exit(["--epochs=3", "--mode"], read_table(TABLE))
    told = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and len(told) == 2
    assert "--mode" in told[1] and "--option=value" in told[1]


def test_a_wrong_command_line_ends_with_code_2_before_torch_is_loaded():
    ended = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "ascendrun.programs.trajectory", "--epoch=3"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=TABLE.parents[3],
    )
    assert ended.returncode == 2
    assert "did you mean --epochs?" in ended.stderr and "| torch\n" not in ended.stderr
