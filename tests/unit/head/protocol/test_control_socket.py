"""Commands and controllers of different versions report that, and can still stop each other."""

from __future__ import annotations

import fcntl
import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ascendrun.cluster import Cluster
from ascendrun.cluster.controller import PULSE_WAIT_S
from ascendrun.core.errors import AuthenticationError, ConflictError, DeadlineExceededError
from ascendrun.head.loop.guard import LOCK_NAME
from ascendrun.head.protocol import control_socket
from ascendrun.head.protocol.control_messages import ControllerStatus, Nodes, Shutdown, Status, Stop
from ascendrun.head.protocol.control_socket import Answer, ControlClient, ControlServer
from ascendrun.head.protocol.messages import Done, Request
from ascendrun.text import Text


def handle(op: str, header: Mapping[str, Any], body: bytes, answer: Answer) -> None:
    if op == "nodes":
        answer(AuthenticationError(Text("ssh.no-key", "{host}: none", host="n1"), hint="h"), b"", True)
    else:
        answer(ControllerStatus(7) if op == "status" else Done(), b"", True)


class Foreign(Request[Any]):
    """A request as a command of another version sends it."""

    request: Request[Any]
    protocol: int | None

    @property
    def OP(self) -> str:  # type: ignore[override]
        return self.request.OP

    @property
    def REPLY(self) -> Any:  # type: ignore[override]
        return self.request.REPLY

    def to_header(self) -> dict[str, Any]:
        return {**self.request.to_header(), "protocol": self.protocol}


@pytest.fixture
def state_dir(tmp_path: Path) -> Iterator[Path]:
    server = ControlServer(tmp_path, handle)
    server.start()
    yield tmp_path
    server.close()


def test_the_status_of_a_controller_that_ends_is_requested_again(tmp_path: Path) -> None:
    calls = Cluster(state_dir=tmp_path).controller
    assert calls.status() is None
    with open(tmp_path / LOCK_NAME, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DeadlineExceededError):  # it holds the lock, but does not listen
            calls.status(timeout_s=0.1)
        with socket.socket(socket.AF_UNIX) as ending, ThreadPoolExecutor(1) as pool:
            ending.bind(str(tmp_path / control_socket.SOCKET_NAME))
            ending.listen()
            asked = pool.submit(calls.status, timeout_s=60.0)
            ending.accept()[0].close()
            server = ControlServer(tmp_path, handle)
            server.start()
            assert asked.result() == ControllerStatus(7)
            server.close()


@pytest.mark.parametrize("is_heard", [False, True], ids=["no-socket", "silent"])
def test_a_controller_that_says_nothing_is_reported_with_the_limit_of_the_caller(
    tmp_path: Path, is_heard: bool
) -> None:
    with open(tmp_path / LOCK_NAME, "w") as lock, socket.socket(socket.AF_UNIX) as silent:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_heard:
            silent.bind(str(tmp_path / control_socket.SOCKET_NAME))
            silent.listen()
        calls = Cluster(state_dir=tmp_path).controller
        with pytest.raises(DeadlineExceededError) as caught:
            calls.status(timeout_s=0.2)
        assert isinstance(caught.value.message, Text) and caught.value.message.values["limit_s"] == 0.2
        problem = calls.sight().problem
        assert isinstance(problem, Text) and problem.values["limit_s"] == PULSE_WAIT_S


def test_one_version_is_served(state_dir: Path) -> None:
    with ControlClient(state_dir) as client:
        assert client.call(Stop("j-0001")) == Done()


@pytest.mark.parametrize("protocol", [1, None])
def test_a_command_of_another_version_is_reported(state_dir: Path, protocol: int | None) -> None:
    with ControlClient(state_dir) as client, pytest.raises(ConflictError) as caught:
        client.call(Foreign(Stop("j-0001"), protocol))
    assert isinstance(caught.value.message, Text)
    assert caught.value.message.key == "control.other-version"
    assert caught.value.message.values == {"controller": control_socket.PROTOCOL, "command": protocol}
    assert "ascendrun controller stop" in str(caught.value.hint)


def test_a_controller_of_another_version_is_reported(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = control_socket.wire.pack
    old = lambda header, body: pack({**header, "protocol": 1} if "re" in header else header, body)  # noqa: E731
    with ControlClient(state_dir) as client:
        monkeypatch.setattr(control_socket.wire, "pack", old)
        with pytest.raises(ConflictError) as caught:
            client.call(Stop("j-0001"))
        assert isinstance(caught.value.message, Text) and caught.value.message.values["controller"] == 1


@pytest.mark.parametrize("request_", [Status(), Shutdown()])
def test_any_version_can_be_found_and_stopped(state_dir: Path, request_: Request[Any]) -> None:
    assert request_.OP in control_socket.ANY_PROTOCOL
    with ControlClient(state_dir) as client:
        assert isinstance(client.call(Foreign(request_, 1)), request_.REPLY)


def test_an_error_keeps_its_class_its_key_and_its_values(state_dir: Path) -> None:
    with ControlClient(state_dir) as client, pytest.raises(AuthenticationError) as caught:
        client.call(Nodes(()))
    assert isinstance(caught.value.message, Text)
    assert (caught.value.message.key, caught.value.message.values) == ("ssh.no-key", {"host": "n1"})
