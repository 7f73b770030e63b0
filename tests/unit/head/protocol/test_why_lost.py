"""Why a host is unreachable, as a code: by the error of its connection."""

import socket
from dataclasses import replace

import pytest

from ascendrun.core.errors import AscendrunError, UnreachableError
from ascendrun.head.protocol.agent_bootstrap import (
    AgentBootstrap,
    AgentImage,
    agent_start_timeout,
    internal_failure,
    invalid_data,
    no_reply,
    on_host,
    other_version,
    why_lost,
)
from ascendrun.head.ssh.config import SshTarget
from ascendrun.head.ssh.openssh import classify
from ascendrun.head.ssh.paramiko_login import dial
from ascendrun.head.ssh.transport import COMMAND_ENDED
from ascendrun.node import wire
from ascendrun.text import Text
from tests.lib.pages.events import events_told

TARGET = SshTarget("n1", "127.0.0.1", 22, "root")


def refused_login() -> AscendrunError:
    """The error of a login to a port of this machine on which nothing listens."""
    with socket.socket() as unused, pytest.raises(AscendrunError) as found:
        unused.bind(("127.0.0.1", 0))
        dial(replace(TARGET, port=unused.getsockname()[1]), 5.0)
    return found.value


def codes_found() -> list[str]:
    bootstrap = AgentBootstrap("n1", AgentImage({}))
    login_ended = bootstrap.why_closed(COMMAND_ENDED, 1)
    bootstrap.feed(wire.MAGIC)
    closed = Text("ssh.closed-here", "x")
    errors = [
        *(None, no_reply("n1", 15.0), login_ended, agent_start_timeout("n1", 60.0)),
        *(bootstrap.why_closed(COMMAND_ENDED, None), on_host("n1", closed, "connection-ended")),
        *(invalid_data("n1", ValueError("x")), internal_failure("n1", ValueError("x"))),
        *(refused_login(), classify("ssh: connect to host n1 port 22: Connection refused", TARGET)),
        *(other_version("n1", 1), UnreachableError("x"), on_host("n1", "x")),
    ]
    return [why_lost(error) for error in errors]


def test_an_error_of_a_connection_has_the_code_of_why_the_host_is_unreachable() -> None:
    assert codes_found() == [
        *("no-reply", "no-reply", "not-started", "not-started", "connection-ended", "connection-ended"),
        *("invalid-data", "internal", "refused", "refused", "other-version", "not-connected", "not-connected"),
    ]


def test_every_code_of_why_a_host_is_unreachable_has_its_documentation() -> None:
    told = events_told()["unreachable"].values["why"]
    assert [code for code in codes_found() if code not in told and code != "other-version"] == []
