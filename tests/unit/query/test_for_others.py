"""What another user may request of the jobs of a user, and what an administrator may."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import pytest

from ascendrun.cli.app import cli
from ascendrun.core.errors import ConflictError, InvalidInputError, NotFoundError, UnreachableError
from ascendrun.head.queue.messages import Admins, RunForOther
from ascendrun.query.for_others import FOR_ADMINS, READABLE, WORDS, words_of

NOWHERE = Path("/nonexistent")
NO_ADMIN, ADMIN = Admins(False, ("root", "@ops")), Admins(True, ())


def words(command: str, options: Mapping[str, Any], *more: str, found: Admins = NO_ADMIN) -> list[str]:
    return words_of(RunForOther(command, ("j-0001",), options, more), NOWHERE, lambda: found)


@pytest.mark.parametrize("rules", [READABLE, FOR_ADMINS])
def test_every_flag_that_is_allowed_is_one_of_the_command(rules: Mapping[str, Any]) -> None:
    for name, flags in rules.items():
        command = cli.get_command(click.Context(cli), name)  # type: ignore[attr-defined, unused-ignore]
        assert command is not None
        assert {*flags} - {WORDS} <= {max(one.opts, key=len) for one in command.params}


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("stop", {}),
        ("hold", {}),
        ("fetch", {}),
        ("rm", {}),
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
        words(command, options)


def test_who_is_no_administrator_gets_the_names_of_those_who_are() -> None:
    with pytest.raises(ConflictError) as caught:
        words("stop", {"--now": True})
    assert caught.value.hint.values["admins"] == ["root", "@ops"]  # type: ignore[union-attr]
    with pytest.raises(NotFoundError):
        words("logs", {})


def test_without_the_server_of_the_queue_nothing_is_changed() -> None:
    def away() -> Admins:
        raise UnreachableError.of("queue.silent", "the controller of {user} does not respond", user="root")

    with pytest.raises(UnreachableError):
        words_of(RunForOther("stop", ("j-0001",), {}), NOWHERE, away)


def test_an_administrator_changes_and_reads_every_job_and_gets_no_login_of_its_user() -> None:
    assert words("stop", {"--now": True}, found=ADMIN) == ["stop", "--now", "--", "j-0001"]
    assert words("show", {"--output": "json"}, found=ADMIN) == ["show", "--output=json", "--", "j-0001"]
    assert words("fetch", {}, "-rf", found=ADMIN)[1:] == ["--", "j-0001", "-rf"], "no flag"
    refused: list[tuple[str, Mapping[str, Any], tuple[str, ...]]] = [
        ("rm", {}, ()),
        ("shell", {}, ()),
        ("cp", {}, ()),
        ("submit", {}, ()),
        ("stop", {WORDS: True}, ()),
        ("stop", {}, ("j-0002",)),
        ("fetch", {"--output-dir": "/etc"}, ()),
        ("logs", {"--state-dir": "/"}, ()),
    ]
    for command, options, more in refused:
        with pytest.raises(ConflictError):
            words(command, options, *more, found=ADMIN)


@pytest.mark.parametrize("header", [{}, [], {"jobs": 1, "command": "show", "options": {}, "lang": "en"}])
def test_a_request_of_another_form_is_refused(header: Any) -> None:
    with pytest.raises(InvalidInputError):
        RunForOther.from_header(header)
