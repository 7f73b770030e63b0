"""One link for each way of reaching a host, whoever asks first."""

from __future__ import annotations

import queue
import random
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ascendrun.core.errors import AgentVersionError, SupersededError, UnreachableError
from ascendrun.core.hosts import Host
from ascendrun.head.agents import connections
from ascendrun.head.agents.connections import COMMAND, MAGIC, Connections, post_later
from ascendrun.head.loop.operations import Operations
from ascendrun.head.protocol import control_messages as messages
from ascendrun.head.protocol import remote
from ascendrun.head.protocol.agent_bootstrap import LOGIN_BYTES, AgentBootstrap, AgentImage, is_permanent, why_lost
from ascendrun.head.protocol.agent_messages import Exec, ExecReply, Ping, Pong
from ascendrun.head.protocol.remote import FLOOD_FRAMES, AgentConnection, Reply, read_reply
from ascendrun.head.ssh.transport import COMMAND_ENDED, Receiver, StreamClosedError
from ascendrun.head.waiting import get_within
from ascendrun.node import wire
from ascendrun.text import Text
from tests.lib.background import join_threads
from tests.lib.vcluster.processes import await_true


def test_a_call_that_waits_has_no_thread() -> None:
    posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    links: Any = SimpleNamespace(post=posted.put)
    for _ in range(64):
        post_later(links, 3600.0, list)
    post_later(links, 0.001, dict)
    assert get_within(posted, 60.0) is dict
    join_threads("ended")  # those before it are started
    assert sum(thread.name == "later" for thread in threading.enumerate()) <= 1


class Nowhere:
    """A cluster none of whose hosts can be reached."""

    def connect(self, host: Host) -> Any:
        raise UnreachableError(f"{host.name} is nowhere")

    def close(self) -> None:
        pass


class OtherAgent:
    """A cluster, a connection and a stream to hosts whose agent sends `frames` once it is up."""

    peer_address, is_behind = None, False

    def __init__(self, *frames: dict[str, Any]) -> None:
        self.data = wire.MAGIC + b"".join(map(wire.pack, frames))

    def connect(self, host: Host) -> Any:
        return self

    def open(self, command: str, receiver: Receiver, *, deadline_s: float) -> Any:
        receiver.on_data(self.data)
        return self

    def send(self, data: bytes, *, deadline_s: float) -> None:
        self.sent = getattr(self, "sent", b"") + data

    def has_unread(self) -> bool:
        return self.is_behind

    def close(self) -> None:
        pass


HELLO = {
    **dict.fromkeys(("root", "hostname", "boot_id", "user", "python", "python_version", "kernel", "arch"), "x"),
    "cpus": 4,
}


class Deaf:
    def __getattr__(self, name: str) -> Any:
        return lambda *said, **more: None


@pytest.fixture
def hasty() -> Any:
    """Threads take turns as often as they can."""
    was = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(was)


def test_threads_that_ask_for_the_same_hosts_at_once_get_the_same_links(hasty: Any) -> None:
    links = Connections(Nowhere(), AgentImage({}), Deaf(), lambda call: call())  # type: ignore[arg-type]
    hosts = [Host(f"n{number}") for number in range(200)]
    together, found = threading.Barrier(4), []  # type: ignore[var-annotated]

    def ask() -> None:
        together.wait()
        found.append([links.get(host) for host in hosts])

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    same: list[bool] = [len({id(link) for link in of_host}) == 1 for of_host in zip(*found)]
    assert len(same) == len(hosts) and all(same)
    links.close()


def connect(*frames: dict[str, Any]) -> AgentConnection:
    """A link after one attempt to connect to such an agent, in this thread."""
    now: Any = type("Now", (), {"submit": lambda self, call, *args: call(*args)})()
    link = AgentConnection(
        Host("n1"),
        backend=OtherAgent(*frames),
        image=AgentImage({}),
        listener=Deaf(),  # type: ignore[arg-type]
        connecting=now,
        sending=now,
    )
    link.tick()
    return link


def test_a_silent_host_is_given_up_only_if_nothing_of_it_waits_to_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    link = connect({"event": "hello", "protocol": wire.PROTOCOL, **HELLO})
    assert link.liveness() == "ALIVE"
    with monkeypatch.context() as late:
        late.setattr(remote, "UNREACHABLE_S", -1.0)
        late.setattr(OtherAgent, "is_behind", True)
        link.tick()
    assert link.is_up and link.liveness() == "SUSPECT", "bytes that nobody has read show nothing as present"
    monkeypatch.setattr(remote, "UNREACHABLE_S", -1.0)
    link.tick()
    assert not link.is_up and isinstance(link.last_error, UnreachableError)


def test_an_agent_whose_first_message_comes_before_open_returns_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "BOOT_S", -1.0)
    link = connect({"event": "hello", "protocol": wire.PROTOCOL, **HELLO})
    link.tick()
    assert link.is_up, link.last_error
    late = connect()
    late.tick()
    assert "did not start" in str(late.last_error), "without it the limit holds"


def test_why_a_host_was_lost_is_the_first_error_until_it_is_connected_again(monkeypatch: pytest.MonkeyPatch) -> None:
    link = connect({"event": "hello", "protocol": wire.PROTOCOL, **HELLO})
    assert link.first_error is None
    with monkeypatch.context() as gone:
        gone.setattr(remote, "UNREACHABLE_S", -1.0)
        gone.setattr(OtherAgent, "connect", Nowhere.connect)
        link.tick()
        link.connect()
    assert (link.failures, why_lost(link.last_error), why_lost(link.first_error)) == (2, "not-connected", "no-reply")
    link.connect()
    assert link.is_up and link.first_error is None


def test_an_agent_that_rests_is_expected_later(monkeypatch: pytest.MonkeyPatch) -> None:
    hello = {"event": "hello", "protocol": wire.PROTOCOL, **HELLO}
    busy, resting = connect(hello), connect(hello, {"event": "beat", "rests": True})
    assert (busy.is_resting, resting.is_resting) == (False, True)
    awake = connect(hello, {"event": "beat", "rests": True}, {"event": "beat", "rests": False})
    assert not awake.is_resting, "its attempt runs"
    for link in (busy, resting, awake):
        link._received_mono -= remote.UNREACHABLE_S + 1.0
    assert [link.liveness() for link in (busy, resting, awake)] == ["UNREACHABLE", "ALIVE", "UNREACHABLE"]
    for link in (busy, resting, awake):
        link.tick()
    assert [link.is_up for link in (busy, resting, awake)] == [False, True, False]
    endless = connect(hello, {"event": "beat", "rests": True})
    endless._received_mono -= remote.UNREACHABLE_S + wire.RESTING_BEAT_S
    endless.tick()
    assert not endless.is_up


def test_an_agent_of_another_version_is_reported_with_the_fix() -> None:
    link = connect({"event": "hello", "protocol": wire.PROTOCOL + 1})
    error = link.last_error
    assert isinstance(error, AgentVersionError) and isinstance(error.message, Text) and not link.is_up
    assert (error.message.key, error.message.values["agent"]) == ("agent.other-version", wire.PROTOCOL + 1)
    assert "ascendrun controller stop" in str(error.hint) and is_permanent(error)
    old = connect({"event": "hello"}).last_error
    assert isinstance(old, AgentVersionError) and isinstance(old.message, Text) and old.message.values["agent"] is None


def test_a_head_with_nothing_to_send_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    link = connect({"event": "hello", "protocol": wire.PROTOCOL, **HELLO})
    agent: Any = link._stream
    link.tick()
    assert not hasattr(agent, "sent")
    monkeypatch.setattr(wire, "HEAD_BEAT_S", -1.0)
    link.tick()
    assert [header["op"] for header, _ in wire.FrameReader().feed(agent.sent)] == ["ping"]


def test_an_event_that_cannot_be_read_ends_the_connection() -> None:
    error = connect({"event": "data", "tag": "j.1", "file": "events"}).last_error
    assert error is not None and isinstance(error.message, Text) and error.message.key == "agent.invalid-data"


class Shell:
    """A host and its connections. `opened`: the commands on each connection; the agent's is any but COMMAND. `ends`:
    whether a command ends at once; else `end` ends those that run."""

    def __init__(self) -> None:
        self.opened: list[list[str]] = []
        self.lost: set[int] = set()
        self.closed: set[int] = set()
        self.ends = True
        self.running: list[Receiver] = []

    def connect(self, host: Host) -> Any:
        self.opened.append([])
        return ShellConnection(self, len(self.opened) - 1)

    def end(self) -> None:
        running, self.running = self.running, []
        for receiver in running:
            receiver.on_closed(COMMAND_ENDED, 0)

    def close(self) -> None:
        pass


class ShellConnection:
    peer_address = None

    def __init__(self, shell: Shell, number: int) -> None:
        self.shell, self.number, self.receivers = shell, number, {}  # type: ignore[var-annotated]

    def open(self, command: str, receiver: Receiver, *, deadline_s: float) -> Any:
        if self.number in self.shell.lost:
            raise StreamClosedError()
        is_once = command == COMMAND
        self.shell.opened[self.number].append("once" if is_once else "agent")
        if is_once:
            receiver.on_data(MAGIC + b"out")
        else:
            receiver.on_data(wire.MAGIC + wire.pack({"event": "hello", "protocol": wire.PROTOCOL, **HELLO}))
        return ShellStream(self.shell, receiver if is_once else None)

    def close(self) -> None:
        self.shell.closed.add(self.number)


class ShellStream:
    def __init__(self, shell: Shell, command: Receiver | None) -> None:
        self.shell, self.command = shell, command

    def send(self, data: bytes, *, deadline_s: float) -> None:
        pass

    def close_input(self) -> None:
        if self.command is not None:
            self.shell.running.append(self.command)
            if self.shell.ends:
                self.shell.end()

    def close(self) -> None:
        pass


class Desk:
    """The connections of a controller to one such host; everything happens in this thread."""

    host = Host("n1")

    def __init__(self) -> None:
        now: Any = type("Now", (), {"submit": lambda _, call, *args: call(*args), "shutdown": lambda _, **how: None})()
        self.shell, self.replies = Shell(), list[Reply[ExecReply]]()
        self.links = Connections(self.shell, AgentImage({}), Deaf(), lambda call: call())  # type: ignore[arg-type]
        self.links._connecting = self.links._sending = now

    def execute(self) -> bool:
        return self.links.run_once(self.host, Exec(("true",), 9.0, 99), deadline_s=9.0, done=self.replies.append)


def test_a_command_starts_no_agent_and_the_next_one_uses_its_connection() -> None:
    desk = Desk()
    assert desk.execute()
    desk.links.start_agents()
    desk.links.tick()
    assert desk.shell.opened == [["once"]] and [link.is_up for link in desk.links] == [False]
    assert desk.execute()
    assert desk.shell.opened == [["once", "once"]]
    desk.links.start_agents()
    assert desk.shell.opened == [["once", "once", "agent"]] and [link.is_up for link in desk.links] == [True]
    assert not desk.execute()  # now by the agent
    assert [(reply.error, reply.message.code, reply.body) for reply in desk.replies] == [(None, 0, b"out")] * 2


def test_whatever_needs_an_agent_starts_it_on_the_connection_that_rests() -> None:
    desk = Desk()
    desk.execute()
    link = desk.links.get(desk.host)
    link.connect()
    assert link.is_up and desk.shell.opened == [["once", "agent"]]
    desk.links.tick()
    assert not desk.shell.closed


def test_a_connection_that_was_lost_while_it_rested_is_made_anew() -> None:
    desk = Desk()
    desk.execute()
    desk.shell.lost.add(0)
    assert desk.execute()
    assert [reply.error for reply in desk.replies] == [None, None]
    assert desk.shell.opened == [["once"], ["once"]] and desk.shell.closed == {0}


@pytest.mark.parametrize("how", ["time", "forget", "close"])
def test_a_connection_rests_for_a_while_only(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    desk.execute()
    monkeypatch.setattr(connections, "REST_S", 0.0)
    {"time": desk.links.tick, "forget": lambda: desk.links.forget(desk.host), "close": desk.links.close}[how]()
    assert desk.shell.closed == {0} and list(desk.links) == []
    desk.links.tick()
    assert desk.execute() and desk.shell.opened == [["once"], ["once"]]


def test_while_a_command_runs_for_long_another_one_goes_to_an_agent_on_its_own_connection() -> None:
    desk = Desk()
    desk.shell.ends = False
    operations = Operations(desk.links)
    for number in range(2):
        operations.execute(messages.Exec((desk.host,), ("true",), 9.0 + number), Deaf().answer)
    [link] = desk.links
    assert link.is_up and desk.shell.opened == [["once"], ["agent"]]
    desk.shell.end()
    assert desk.shell.closed == {0} and link.is_up


NONSENSE = (None, True, -1, 1 << 70, 0.5, "x", "\0", [], [[]], {}, {"a": {}}, [1] * 50)


def test_whatever_a_host_sends_is_that_hosts_fault(capsys: pytest.CaptureFixture[str]) -> None:
    luck = random.Random(7)
    data = {"event": "data", "tag": "j.1", "file": "events", "generation": 0, "offset": 0}
    hello = {"event": "hello", "protocol": wire.PROTOCOL, **HELLO}
    frames = [hello, data, {"re": 1, "ok": True}, {"re": 1, "ok": False, "error": {"code": "x", "message": "y"}}]
    for _ in range(400):
        frame = dict(luck.choice(frames))
        for name in luck.sample(sorted(frame), luck.randint(1, 2)):
            frame[name] = luck.choice(NONSENSE)
        error = connect(hello, frame).last_error
        if error is not None:
            assert isinstance(error, UnreachableError) and error.exit_code == 5 and isinstance(error.message, Text)
            assert error.message.key in ("agent.invalid-data", "agent.other-version"), (frame, error.message)
    assert "Traceback" not in capsys.readouterr().err


def test_a_reply_with_a_wrong_type_is_an_error_of_the_host() -> None:
    for value in NONSENSE:
        reply = read_reply(Ping(), {"ok": False, "error": value}, b"")
        assert reply.error is not None
    assert read_reply(Ping(), {"ok": True, "at_ns": {}}, b"").error is not None


def test_deep_json_is_no_frame() -> None:
    deep = b'{"a":' * 100_000
    with pytest.raises(wire.FrameError):
        wire.FrameReader().feed(len(deep).to_bytes(4, "big") + bytes(4) + deep)


def test_a_host_that_floods_is_cut() -> None:
    beats = [{"event": "beat"}] * (FLOOD_FRAMES + 1)
    error = connect({"event": "hello", "protocol": wire.PROTOCOL, **HELLO}, *beats).last_error
    assert error is not None and isinstance(error.message, Text) and error.message.key == "agent.invalid-data"
    bootstrap = AgentBootstrap("n1", AgentImage({}))
    with pytest.raises(wire.FrameError):
        for _ in range(LOGIN_BYTES // 65536 + 1):
            bootstrap.feed(b"y" * 65536)


def test_a_reply_that_cannot_be_read_is_an_error_of_the_request() -> None:
    reply = read_reply(Ping(), {"ok": True, "at_ns": None}, b"")
    assert reply.error is not None and reply.error.code == "invalid-reply"
    assert read_reply(Ping(), {"ok": True, "at_ns": 5, "from_the_future": 1}, b"").message == Pong(5)
    refused = {"code": "unknown-op", "message": {"key": "unknown-op", "values": {"op": "ping", "version": 1}}}
    error = read_reply(Ping(), {"ok": False, "error": refused}, b"").error
    assert error is not None and error.code == "unknown-op" and "ascendrun controller stop" in str(error.hint)


class Term:
    """The term of a head, which has its lease or not."""

    head_id, term, is_held = "0123abcd", 3, False

    def allows(self, op: str) -> bool:
        return op in wire.READING or self.is_held


def fenced(bootstrap: AgentBootstrap, reply: dict[str, Any]) -> list[dict[str, Any]]:
    """Let an agent start and answer the first request; the frames that the connection gets."""
    hello = {"event": "hello", "protocol": wire.PROTOCOL, "live": ["old"], **HELLO}
    assert bootstrap.feed(wire.MAGIC + wire.pack(hello)) == [] and bootstrap.needs_input()
    ((request, _),) = wire.FrameReader().feed(bootstrap.make_input())
    assert (request["op"], request["head_id"], request["term"]) == ("fence", "0123abcd", 3)
    return [header for header, _ in bootstrap.feed(wire.pack({"re": request["id"], **reply}))]


def test_an_agent_admits_the_term_of_a_head_before_its_state_counts() -> None:
    (hello,) = fenced(AgentBootstrap("n1", AgentImage({}), ("0123abcd", 3)), {"ok": True, "live": []})
    assert hello["event"] == "hello" and hello["live"] == [] and hello["cpus"] == 4 and hello["re"] is None


@pytest.mark.parametrize(("code", "kind"), [("superseded", SupersededError), ("disk-full", UnreachableError)])
def test_an_agent_that_does_not_admit_it_is_not_connected(code: str, kind: type[Exception]) -> None:
    error = {"code": code, "message": {"key": "superseded", "values": {"term": 4}}}
    with pytest.raises(kind):
        fenced(AgentBootstrap("n1", AgentImage({}), ("0123abcd", 3)), {"ok": False, "error": error})


def test_without_its_lease_a_head_only_reads() -> None:
    agent, term = OtherAgent({"event": "hello", "protocol": wire.PROTOCOL, **HELLO}), Term()
    agent.data += wire.pack({"re": 0, "ok": True})
    links = Connections(agent, AgentImage({}), Deaf(), lambda call: call(), term)  # type: ignore[arg-type]
    link, request = links.get(Host("n1")), Exec(["true"], 5.0, 10)
    assert not links.run_once(Host("n1"), request, deadline_s=60, done=lambda reply: None)  # where no agent refuses it
    for one in (request, Ping()):
        link.call(one, deadline_s=60, done=lambda reply: None)

    def sent() -> list[str]:
        links.tick()
        return [header["op"] for header, _ in wire.FrameReader().feed(getattr(agent, "sent", b""))]

    assert await_true(lambda: "ping" in sent(), deadline_s=60) and "exec" not in sent()
    term.is_held = True
    assert await_true(lambda: "exec" in sent(), deadline_s=60)
    links.close()
