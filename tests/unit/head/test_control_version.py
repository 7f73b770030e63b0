"""Commands and controllers of different versions report that, and can still stop each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ascendrun.core.errors import AuthenticationError, ConflictError
from ascendrun.head.protocol import control_socket
from ascendrun.head.protocol.control_socket import Answer, ControlClient, ControlServer, error_answer
from ascendrun.text import Text


def handle(op: str, header: Mapping[str, Any], body: bytes, answer: Answer) -> None:
    if op == "login":
        answer(error_answer(AuthenticationError(Text("ssh.no-key", "{host}: none", host="n1"), hint="h")), b"", True)
    else:
        answer({"ok": True, "op": op}, b"", True)


@pytest.fixture
def state_dir(tmp_path: Path) -> Iterator[Path]:
    server = ControlServer(tmp_path, handle)
    server.start()
    yield tmp_path
    server.close()


def test_one_version_is_served(state_dir: Path) -> None:
    with ControlClient(state_dir) as client:
        assert client.call("nodes")["op"] == "nodes"


@pytest.mark.parametrize("fields", [{"protocol": 1}, {"protocol": None}])
def test_a_command_of_another_version_is_reported(state_dir: Path, fields: Mapping[str, Any]) -> None:
    with ControlClient(state_dir) as client, pytest.raises(ConflictError) as caught:
        client.call("nodes", fields)
    assert isinstance(caught.value.message, Text)
    assert caught.value.message.key == "control.other-version"
    assert caught.value.message.values == {"controller": control_socket.PROTOCOL, "command": fields["protocol"]}
    assert "ascendrun controller stop" in str(caught.value.hint)


def test_a_controller_of_another_version_is_reported(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ControlClient(state_dir) as client:
        monkeypatch.setattr(control_socket, "_answerer", untold(control_socket._answerer))
        with pytest.raises(ConflictError) as caught:
            client.call("nodes")
        assert isinstance(caught.value.message, Text) and caught.value.message.values["controller"] == 1


def untold(make: Any) -> Any:
    return lambda outgoing, request: (
        lambda header, body, last: make(outgoing, request)({**header, "protocol": 1}, body, last)
    )


@pytest.mark.parametrize("op", control_socket.ANY_PROTOCOL)
def test_any_version_can_be_found_and_stopped(state_dir: Path, op: str) -> None:
    with ControlClient(state_dir) as client:
        assert client.call(op, {"protocol": 1})["op"] == op


def test_an_error_keeps_its_class_its_key_and_its_values(state_dir: Path) -> None:
    with ControlClient(state_dir) as client, pytest.raises(AuthenticationError) as caught:
        client.call("login")
    assert isinstance(caught.value.message, Text)
    assert (caught.value.message.key, caught.value.message.values) == ("ssh.no-key", {"host": "n1"})
