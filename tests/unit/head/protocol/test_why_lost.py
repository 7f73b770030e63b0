"""Why a host is unreachable, as a code: by the error of its connection."""

import socket

import pytest

from ascendrun.core.errors import AscendrunError, UnreachableError
from ascendrun.head.protocol.agent_bootstrap import (
    WHY_LOST,
    AgentBootstrap,
    AgentImage,
    agent_start_timeout,
    on_host,
    other_version,
    why_lost,
)
from ascendrun.head.ssh.config import SshTarget
from ascendrun.head.ssh.paramiko_login import dial
from ascendrun.head.ssh.transport import COMMAND_ENDED
from ascendrun.node import wire
from ascendrun.text import Text, translations
from tests.lib.pages.events import events_told


def refused_login() -> AscendrunError:
    """The error of a login to a port of this machine on which nothing listens."""
    with socket.socket() as unused, pytest.raises(AscendrunError) as found:
        unused.bind(("127.0.0.1", 0))
        dial(SshTarget("n1", "127.0.0.1", unused.getsockname()[1], "root"), 5.0)
    return found.value


def test_an_error_of_a_connection_has_the_code_of_why_the_host_is_unreachable() -> None:
    bootstrap = AgentBootstrap("n1", AgentImage({}))
    login_ended = bootstrap.why_closed(COMMAND_ENDED, 1)
    bootstrap.feed(wire.MAGIC)
    found = [
        *(why_lost(None), why_lost(login_ended), why_lost(bootstrap.why_closed(COMMAND_ENDED, None))),
        *(why_lost(agent_start_timeout("n1", 60.0)), why_lost(on_host("n1", Text("ssh.connection-ended", "x")))),
        *(why_lost(refused_login()), why_lost(other_version("n1", 1)), why_lost(UnreachableError("x"))),
    ]
    assert found == [
        *("no-reply", "not-started", "connection-ended"),
        *("not-started", "connection-ended"),
        *("refused", "other-version", "not-connected"),
    ]


def test_every_code_of_why_a_host_is_unreachable_has_an_error_and_its_documentation() -> None:
    assert set(WHY_LOST) <= set(translations("zh"))
    told = events_told()["unreachable"].values["why"]
    assert [code for code in {*WHY_LOST.values(), "not-connected"} if code not in told] == []
