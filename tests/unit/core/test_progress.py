"""Progress in what trainings print: real outputs with their rows, and real outputs without any step."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from ascendrun.core.progress import ProgressReader, find_lines, merge_rows

RECORDINGS = Path(__file__).parents[2] / "recordings" / "progress"
HELD_OUT = "453431b7819dac6de41096e9fb9dd0e7bc837c6292b2375906ee36e75b6bf230"
"""Of the rows that were written down before the first pattern."""
SHORT = {
    "s": "step",
    "t": "total_steps",
    "l": "loss",
    "lr": "learning_rate",
    "g": "grad_norm",
    "e": "epoch",
    "sps": "samples_per_s",
    "tps": "tokens_per_s",
}


def read_all(text: str, pattern: str | None = None) -> list[dict[str, Any]]:
    """Return the rows of an output, one for each step in succession."""
    reader = ProgressReader(pattern)
    rows = [
        row
        for _, line in find_lines(text.encode(), at_start=True, is_any=reader.reads_any_line)
        for row in reader.read(line)
    ]
    return merge_rows(rows + reader.flush())


def entries(name: str) -> list[Any]:
    rows = yaml.safe_load((RECORDINGS / name).read_text(encoding="utf-8"))
    return [pytest.param(row, id=f"{row.get('framework', 'text')}-{number}") for number, row in enumerate(rows)]


def same(found: Any, expected: Any) -> bool:
    if expected is None or found is None:
        return found is expected
    expected = float(expected)
    return (math.isnan(found) and math.isnan(expected)) or math.isclose(found, expected, rel_tol=1e-3, abs_tol=1e-12)


@pytest.mark.parametrize("entry", entries("held_out.yaml") + entries("steps.yaml"))
def test_step_and_loss_are_right_on_every_line(entry: dict[str, Any]) -> None:
    found = read_all(entry["text"])
    expected = [{SHORT[key]: value for key, value in row.items()} for row in entry["rows"]]
    assert len(found) == len(expected), found
    for row, wanted in zip(found, expected):
        for key in {"step", "loss", *wanted}:
            assert same(row.get(key), wanted.get(key)), (key, row, wanted)


def test_the_held_out_half_is_as_it_was_before_the_first_pattern() -> None:
    assert hashlib.sha256((RECORDINGS / "held_out.yaml").read_bytes()).hexdigest() == HELD_OUT


@pytest.mark.parametrize("entry", entries("no_steps.yaml"))
def test_no_step_is_read_from_output_without_any(entry: dict[str, Any]) -> None:
    assert read_all(entry["text"]) == []


def test_no_step_is_read_from_all_outputs_without_any_together() -> None:
    together = "\n".join(param.values[0]["text"] for param in entries("no_steps.yaml"))
    assert [row for row in read_all(together) if "step" in row] == []


def test_the_pattern_of_a_job_is_the_only_one_that_counts() -> None:
    text = "batch 7 of 90 | value 2.5e-1 | lr 1e-4\niter 8: loss 3.1\n"
    pattern = r"batch (?P<step>\d+) of (?P<total_steps>\d+) \| value (?P<loss>\S+) \| lr (?P<learning_rate>\S+)"
    assert read_all(text, pattern) == [{"step": 7, "total_steps": 90, "loss": 0.25, "learning_rate": 1e-4}]
