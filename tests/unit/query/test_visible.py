"""What a reader may request of a job of another user: the flags that the commands have, and nothing next to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

from ascendrun.cli.app import cli
from ascendrun.cli.elsewhere import READS
from ascendrun.core.errors import ConflictError, InvalidInputError
from ascendrun.head.queue.messages import PrintVisible
from ascendrun.query.visible import READABLE, words_of


def test_every_flag_that_is_allowed_is_one_of_the_command() -> None:
    assert {*READABLE} == {*READS}
    for name, flags in READABLE.items():
        command = cli.get_command(click.Context(cli), name)  # type: ignore[attr-defined, unused-ignore]
        assert command is not None
        assert {*flags} <= {max(one.opts, key=len) for one in command.params}


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("stop", {}),
        ("show", {"--output": "json"}),
        ("show", {"--output": ["wide"]}),
        ("explain", {"--fresh": True}),
        ("logs", {"--grep": "(a+)+$"}),
        ("logs", {"--tail=1 --files": True}),
        ("logs", {"-f": True}),
    ],
)
def test_what_others_may_not_do_is_refused_before_a_job_is_read(command: str, options: Any) -> None:
    with pytest.raises(ConflictError):
        words_of(PrintVisible("j-0001", command, options, "en"), Path("/nonexistent"))


@pytest.mark.parametrize("header", [{}, [], {"job": 1, "command": "show", "options": {}, "lang": "en"}])
def test_a_request_of_another_form_is_refused(header: Any) -> None:
    with pytest.raises(InvalidInputError):
        PrintVisible.from_header(header)
