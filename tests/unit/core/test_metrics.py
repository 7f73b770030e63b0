"""A program's metrics lines: whatever stands there, numbers come out or nothing."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascendrun.core.metrics import EVENTS, LINE_LIMIT_BYTES, MetricsLine, parse_line


def test_the_line_of_a_step_says_all_that_it_says() -> None:
    line = parse_line(
        b'{"at_s": 1700000000.5, "step": 12, "epoch": 0.5, "loss": 2.25, "lr": 1e-4, "grad_norm": 1.5,'
        b' "tokens_per_s": 15300, "mfu": 0.41, "step_s": 1.25, "data_s": 0.125, "comm_s": 0.25,'
        b' "eval_macro_f1": 0.75, "unheard_of": [1]}'
    )
    assert line == MetricsLine(
        at_s=1700000000.5,
        step=12,
        epoch=0.5,
        loss=2.25,
        lr=1e-4,
        grad_norm=1.5,
        tokens_per_s=15300.0,
        mfu=0.41,
        step_s=1.25,
        data_s=0.125,
        comm_s=0.25,
        evals={"eval_macro_f1": 0.75},
    )


@pytest.mark.parametrize(
    "raw",
    [
        b'{"step": 12, "lo',
        b"",
        b"12",
        b"[1, 2]",
        b"null",
        b"\x00\xff\xfe",
        b"[" * 100_000,
        b'{"a": ' * 50_000,
        b'{"step": 1, "pad": "' + b"x" * LINE_LIMIT_BYTES + b'"}',
    ],
    ids=["torn", "empty", "number", "list", "null", "binary", "brackets", "nested", "too long"],
)
def test_what_is_no_object_is_no_line(raw: bytes) -> None:
    assert parse_line(raw) is None


@pytest.mark.parametrize(
    "value",
    ["true", '"7"', "[7]", '{"x": 7}', "null", "NaN", "1e999", "-1", "1" + "0" * 400],
    ids=["bool", "text", "list", "object", "null", "nan", "infinite", "negative", "huge"],
)
def test_a_value_of_the_wrong_kind_counts_as_not_said_and_spoils_nothing_else(value: str) -> None:
    line = parse_line(b'{"step_s": ' + value.encode() + b', "step": ' + value.encode() + b', "lr": 0.5}')
    assert line is not None
    assert (line.step_s, line.step, line.lr) == (None, None, 0.5)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", '"nan"', '"inf"', "1e999"])
def test_a_loss_that_is_no_number_is_kept_as_the_program_said_it(text: str) -> None:
    line = parse_line(b'{"loss": ' + text.encode() + b"}")
    assert line is not None and line.loss is not None
    assert not math.isfinite(line.loss) and line.diverged


def test_a_half_step_is_no_step() -> None:
    line = parse_line(b'{"step": 1.5, "total_steps": 100.0}')
    assert line is not None
    assert (line.step, line.total_steps) == (None, 100)


def test_the_lines_of_events_carry_their_facts() -> None:
    start = parse_line(
        b'{"event": "start", "total_steps": 100, "world_size": 16, "parameters": 7e9,'
        b' "flops_per_step": 1e15, "peak_flops": 3.2e14, "tokens_per_step": 65536}'
    )
    saved = parse_line(b'{"event": "checkpoint", "step": 50, "seconds": 4.5, "bytes": 1024, "path": "/ckpt/50"}')
    again = parse_line(b'{"event": "resume", "step": 50, "checkpoint": "/ckpt/50"}')
    assert start is not None and saved is not None and again is not None
    assert (start.event, start.total_steps, start.world_size, start.peak_flops) == ("start", 100, 16, 3.2e14)
    assert (saved.event, saved.step, saved.path) == ("checkpoint", 50, "/ckpt/50")
    assert (saved.seconds, saved.bytes) == (4.5, 1024)
    assert (again.event, again.step, again.path) == ("resume", 50, "/ckpt/50")


def test_older_programs_words_are_understood() -> None:
    step = parse_line(b'{"step": 20, "steps": 110, "loss": 1.29}')
    saved = parse_line(b'{"step": 20, "checkpoint": "/ckpt/step-20"}')
    done = parse_line(b'{"done": true}')
    assert step is not None and saved is not None and done is not None
    assert (step.event, step.step, step.total_steps) == (None, 20, 110)
    assert (saved.event, saved.step, saved.path) == ("checkpoint", 20, "/ckpt/step-20")
    assert done.event == "end"


def test_an_event_of_another_release_is_none_of_ours() -> None:
    line = parse_line(b'{"event": "profile", "step": 3}')
    assert line == MetricsLine(step=3)


@given(st.binary(max_size=300))
def test_no_bytes_whatever_raise(raw: bytes) -> None:
    parse_line(raw)


ANYTHING = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.lists(st.integers())


@given(
    st.dictionaries(
        st.sampled_from(["step", "loss", "at_s", "event", "path", "checkpoint", "steps", "eval_x", "step_s", "done"]),
        ANYTHING,
    )
)
def test_every_number_that_comes_out_is_one(values: dict[str, Any]) -> None:
    import json

    line = parse_line(json.dumps(values).encode())
    assert line is not None
    assert line.event in (None, *EVENTS)
    for name in ("step", "at_s", "step_s", "total_steps"):
        value = getattr(line, name)
        assert value is None or (math.isfinite(value) and value >= 0)
    assert all(math.isfinite(value) for value in line.evals.values())
