"""A large file on its way to many hosts, from one to the next."""

import hashlib
import io
import queue
import sys
import tarfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ascendrun.core.jobs.plan import Tree
from ascendrun.core.node_messages import Failure
from ascendrun.head.protocol.file_messages import Offer, PutFile, PutTree, Take, TakeReply
from ascendrun.head.protocol.messages import R, Request
from ascendrun.head.protocol.remote import Reply
from ascendrun.head.spool import relay
from ascendrun.head.spool.relay import Relay
from ascendrun.head.spool.staging import TreePush
from ascendrun.head.spool.transfer import finish_s, send_files
from ascendrun.head.state.state_dir import tree_file
from ascendrun.node import layout, tree_hash
from ascendrun.node.agent import relay as node_relay
from ascendrun.node.agent import transfer as node_transfer
from ascendrun.node.agent.operations import Operations
from ascendrun.node.agent.trees import Trees
from ascendrun.node.op_errors import OperationError

HOSTS = [f"n{number}" for number in range(12)]


class World:
    """Hosts with real operations and connections; `lost`: hosts that answer nothing more. `sent`: bytes from here."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.lost, self.sent = folder, set[str](), 0
        self.takes: set[str] = set()
        self.ended: dict[str, Failure | None] = {}
        self.begun: Callable[[str, Any], None] = lambda host, request: None
        self._calls: queue.Queue[Callable[[], None]] = queue.Queue()
        source = folder / "source"
        source.mkdir()
        (source / "weights").write_bytes(bytes(range(256)) * (size // 256))
        self.sha256 = tree_hash.hash_listing(tree_hash.list_tree(str(source)))
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            tar.add(source / "weights", "weights")
        (folder / "trees").mkdir()
        tree_file(folder, self.sha256).write_bytes(packed.getvalue())
        self.tree = Tree("code", self.sha256, len(packed.getvalue()), 1)

    def perform(self, host: str, request: Request[R], body: bytes = b"") -> R:
        """Raises OperationError."""
        root, nothing = str(self.folder / host), dict[bytes, bytes]()
        made = Operations(root, agent=[], umask=0o77, login=nothing, clean=nothing, send=lambda header, body: None)
        fields, _ = made.table()[request.OP].run(request.to_header(), body)
        reply: R = request.REPLY.from_header(fields)
        return reply

    def send(self, hosts: Sequence[str], address: str = "127.0.0.1") -> None:
        """Send the directory to hosts, and wait until each push has ended."""
        passed_on = Relay(dict.fromkeys(hosts, (address,)))
        for host in hosts:
            push = TreePush(
                self.folder,
                [self.tree],
                query=lambda request, body, deadline_s, then, host=host: self._query(host, request, body, then),  # type: ignore[misc]
                done=lambda failure, host=host: self.ended.__setitem__(host, failure),  # type: ignore[misc]
                host=host,
                relay=passed_on,
            )
            push.send_next()
        while len(self.ended) < len(hosts):
            self._calls.get(timeout=120)()

    def copy(self, hosts: Sequence[str]) -> None:
        """Copy the file to hosts, with a thread for each, as `cp` does."""
        passed_on, slots = Relay(dict.fromkeys(hosts, ("127.0.0.1",))), threading.Semaphore(4)

        def run(host: str) -> None:
            def ask(request: Request[R], *, deadline_s: float, body: bytes = b"") -> Reply[R]:
                replies: queue.Queue[Reply[R]] = queue.Queue()
                self._query(host, request, body, replies.put)
                self._calls.get(timeout=deadline_s)()
                return replies.get(timeout=deadline_s)

            send = partial(passed_on.send, host, slots)
            source = self.folder / "source" / "weights"
            send_files(ask, "run-1", [source], "into", send=send)

        with ThreadPoolExecutor(len(hosts)) as pool:
            list(pool.map(run, hosts))

    def has(self, host: str) -> bool:
        Trees(str(self.folder / host)).verify(self.sha256)
        return True

    def _query(self, host: str, request: Any, body: bytes, then: Callable[[Reply[Any]], None]) -> None:
        self.sent += len(body)

        def run() -> None:
            reply = self._reply(host, request, body)
            self._calls.put(lambda: then(reply))

        threading.Thread(target=run, daemon=True).start()

    def _reply(self, host: str, request: Any, body: bytes) -> Reply[Any]:
        self.begun(host, request)
        if host in self.lost:
            return Reply(None, error=Failure("connection-lost", "lost"))
        if isinstance(request, Take):
            self.takes.add(host)
        try:
            return Reply(self.perform(host, request, body))
        except OperationError as error:
            return Reply(None, error=Failure(error.code, str(error)))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(relay, "DIRECT", 2)
    monkeypatch.setattr(relay, "FAN_OUT", 2)
    monkeypatch.setattr(node_relay, "IDLE_S", 10.0)  # longer than a reader needs to come, on a machine with other work
    return World(tmp_path, relay.RELAY_BYTES)


def test_a_source_that_is_lost_is_replaced_and_its_readers_keep_what_they_have(world: World) -> None:
    passing = HOSTS[0]

    def lose_at_first_reader(host: str, request: Any) -> None:
        if isinstance(request, Take):
            world.lost.add(passing)

    world.begun = lose_at_first_reader
    world.send(HOSTS)
    failed = {host for host, failure in world.ended.items() if failure is not None}
    assert failed <= {passing}, "a host that was lost fails; those that it served do not"
    assert all(map(world.has, set(HOSTS) - failed))


def test_bytes_that_were_damaged_on_a_host_cost_it_nothing_but_time(world: World) -> None:
    damaged: set[str] = set()

    def damage(host: str, request: Any) -> None:
        if isinstance(request, Take) and host not in damaged and len(damaged) < 3:
            damaged.add(host)
            (part,) = (world.folder / host / "trees").glob(".tmp-part-*")
            with open(part, "r+b") as file:
                file.write(b"no tar" * 1000)

    world.begun = damage
    world.send(HOSTS)
    assert damaged and set(world.ended.values()) == {None}
    assert all(map(world.has, HOSTS))


def test_hosts_without_tls_are_served_by_this_machine(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ssl", None)
    world.send(HOSTS)
    assert set(world.ended.values()) == {None} and not world.takes
    assert world.sent == len(HOSTS) * world.tree.size_bytes


def test_hosts_that_cannot_reach_each_other_are_served_by_this_machine(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_relay, "QUIET_S", 0.1)
    tried: list[str] = []
    world.begun = lambda host, request: tried.extend([host] * isinstance(request, Take))
    world.send(HOSTS, address="")
    assert set(world.ended.values()) == {None} and all(map(world.has, HOSTS))
    assert world.sent == len(HOSTS) * world.tree.size_bytes
    assert 0 < len(tried) < 4 * len(HOSTS), "not every host tries every other"


def test_this_machine_sends_to_few_hosts_and_they_to_the_others(world: World) -> None:
    world.send(HOSTS)
    assert set(world.ended.values()) == {None} and all(map(world.has, HOSTS))
    assert world.sent < len(HOSTS) // 2 * world.tree.size_bytes
    assert len(world.takes) > len(HOSTS) // 2
    before = world.sent
    world.ended.clear()
    world.send(HOSTS)
    assert world.sent == before, "what is there is not sent again"


def test_a_source_that_has_nothing_yet_is_waited_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet_s, takes, are_many = node_relay.QUIET_S, list[str](), threading.Event()
    monkeypatch.setattr(node_relay, "QUIET_S", 0.1)

    def hold_back(host: str, request: Any) -> None:
        takes.extend([host] * isinstance(request, Take))
        if len(takes) > 4 * len(HOSTS):
            node_relay.QUIET_S = quiet_s  # a handshake may take longer than 0.1 s
            are_many.set()
        if isinstance(request, PutTree) and request.offset is not None:
            are_many.wait(60.0)
            are_many.set()

    world.begun = hold_back
    world.send(HOSTS)
    assert len(takes) > 4 * len(HOSTS) and set(world.ended.values()) == {None} and all(map(world.has, HOSTS))
    assert world.sent < len(HOSTS) // 2 * world.tree.size_bytes


def test_files_of_a_command_are_passed_on_too(world: World) -> None:
    world.copy(HOSTS)
    source = (world.folder / "source" / "weights").read_bytes()
    assert all(
        Path(layout.work_dir(str(world.folder / host), "run-1"), "into", "weights").read_bytes() == source
        for host in HOSTS
    )
    assert world.sent < len(HOSTS) // 2 * len(source)
    before = world.sent
    world.copy(HOSTS)
    assert world.sent == before, "what is there is not sent again"


def test_only_who_has_the_identity_of_the_round_reads_an_offer(world: World) -> None:
    request, first = PutTree(world.sha256, world.tree.size_bytes), Relay({})
    packed = tree_file(world.folder, world.sha256).read_bytes()
    for host in ("giver", "taker"):
        world.perform(host, request)
    port = world.perform("giver", Offer(request.to_header(), first.identity)).port
    world.perform("giver", replace(request, offset=0), packed[:1000])
    stranger, member = (Take(request.to_header(), one.identity, ["127.0.0.1"], port, 3.0) for one in (Relay({}), first))
    assert world.perform("taker", stranger) == TakeReply(0, False, is_met=True)
    assert world.perform("taker", member) == TakeReply(1000, False, is_met=True)


def test_a_reader_continues_with_another_source_where_the_first_one_ended(world: World) -> None:
    request, passed_on = PutTree(world.sha256, world.tree.size_bytes), Relay({})
    packed = tree_file(world.folder, world.sha256).read_bytes()
    half = len(packed) // 2
    for host in ("first", "second", "taker"):
        world.perform(host, request)
    offer = Offer(request.to_header(), passed_on.identity)
    first, second = (world.perform(host, offer).port for host in ("first", "second"))
    world.perform("first", replace(request, offset=0), packed[:half])
    world.perform("second", replace(request, offset=0), b"?" * half)
    (part,) = (world.folder / "second" / "trees").glob(".tmp-part-*")
    with open(part, "ab") as file:
        file.write(packed[half:])
    from_first, from_second = (
        Take(request.to_header(), passed_on.identity, ["127.0.0.1"], port, 3.0) for port in (first, second)
    )
    assert world.perform("taker", from_first) == TakeReply(half, False, is_met=True)
    assert world.perform("taker", from_second) == TakeReply(len(packed), True, is_met=True), "not from its start"
    assert world.has("taker")


def test_a_host_never_gets_a_file_by_way_of_itself(world: World) -> None:
    exchange = relay.Exchange(Relay({}), Path(), PutTree(world.sha256, 1))
    a, b = relay.Source("a", 1, 4), relay.Source("b", 2, 4)
    exchange._sources = [a, b]
    exchange._source_of = {"b": a}
    assert exchange._find("a", may_read=True) is None
    assert exchange._find("c", may_read=True) is a


def test_a_host_that_has_the_file_takes_nothing_more(world: World) -> None:
    weights = world.folder / "source" / "weights"
    size, sha256 = weights.stat().st_size, hashlib.sha256(weights.read_bytes()).hexdigest()
    request = PutFile("run-1", "weights", size, 1, 0o600)
    take = Take(replace(request, sha256=sha256).to_header(), Relay({}).identity, [], 1, 3.0)
    world.perform("n0", replace(request, offset=0), weights.read_bytes())
    assert world.perform("n0", take) == TakeReply(size, True), "completed: no source is needed"
    assert world.perform("n0", take) == TakeReply(size, True, is_met=True), "the reply to the first one came too late"
    assert [path.name for path in Path(layout.work_dir(str(world.folder / "n0"), "run-1")).iterdir()] == ["weights"]


def test_two_requests_may_complete_the_same_file_at_once(world: World) -> None:
    weights = (world.folder / "source" / "weights").read_bytes()
    request = PutFile("run-1", "weights", len(weights), 1, 0o600, sha256=hashlib.sha256(weights).hexdigest())
    world.perform("n0", replace(request, sha256=None, offset=0), weights)
    part, complete = node_transfer.file_place(str(world.folder / "n0"), request.to_header())
    with open(part, "r+b") as first, open(part, "r+b") as second:
        assert complete(first.fileno()) and complete(second.fileno())


def test_hosts_reply_more_rarely_the_more_they_are(world: World) -> None:
    seconds = set[float]()
    world.begun = lambda host, request: seconds.update({request.seconds} if isinstance(request, Take) else ())
    world.send(HOSTS)
    assert seconds == {relay.TAKE_S}
    few, many, most = (Relay(dict.fromkeys(map(str, range(count)), ())).take_s for count in (30, 256, 9999))
    assert relay.TAKE_S == few < many < most == relay.MOST_TAKE_S


def test_a_slow_disk_under_a_complete_file_is_waited_for() -> None:
    assert finish_s(500 << 20) > 250, "hosts that share a disk write out 500 MB for minutes"
