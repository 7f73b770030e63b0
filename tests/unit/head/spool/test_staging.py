"""Directories of a job on their way to its hosts; with many hosts from one to the next."""

import io
import queue
import sys
import tarfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable

import pytest

from ascendrun.core.jobs.plan import Tree
from ascendrun.core.node_messages import Failure
from ascendrun.head.protocol.file_messages import OfferTree, OfferTreeReply, PutFileReply, PutTree, TakeTree
from ascendrun.head.protocol.remote import Reply
from ascendrun.head.spool import staging, transfer
from ascendrun.head.spool.staging import Relay, TreePush, push_once_per_home
from ascendrun.head.state.state_dir import tree_file
from ascendrun.node import tree_hash
from ascendrun.node.agent import relay
from ascendrun.node.agent.trees import Trees
from ascendrun.node.op_errors import OperationError

HOSTS = [f"n{number}" for number in range(12)]


def test_bytes_are_counted_as_they_arrive_and_when_they_are_there(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(transfer, "BLOCK_BYTES", 4)
    code, data = Tree("code", "a" * 64, 9, 1), Tree("data", "b" * 64, 7, 1)
    (tmp_path / "trees").mkdir()
    tree_file(tmp_path, code.sha256).write_bytes(b"x" * 10)
    seen: list[tuple[int, int | None]] = []
    cut = [4]

    def ask(request: Any, body: bytes, then: Callable[[Reply[Any]], None]) -> None:
        seen.append((push.done_bytes, request.offset))
        if cut and request.offset == cut[0]:
            cut.pop()
            then(Reply(None, error=Failure("connection-lost", "cut")))
            return
        here = 4 if ended else 0
        have = (request.offset or here) + len(body)
        then(Reply(PutFileReply(have, request.tree == data.sha256 or request.sha256 is not None)))

    ended: list[Failure | None] = []
    for _ in range(2):
        push = TreePush(tmp_path, [code, data], query=ask, done=ended.append)
        push.send_next()
    assert [one and one.code for one in ended] == ["connection-lost", None]
    assert seen == [(0, None), (0, 0), (4, 4), (0, None), (0, 4), (8, 8), (9, None), (9, None)]
    assert (push.done_bytes, push.total_bytes) == (16, 16), "what the node has is not sent again; never more than all"


def test_nodes_that_share_a_home_wait_for_one_of_them() -> None:
    begun: dict[str, Callable[[], None]] = {}
    push_once_per_home(("n1", "n2", "n3", "n4"), {"n1": "n3", "n3": "n3", "n4": "n3"}, begun.__setitem__)
    assert list(begun) == ["n1", "n2"]
    begun["n2"]()
    assert list(begun) == ["n1", "n2"]
    begun["n1"]()
    assert list(begun) == ["n1", "n2", "n3", "n4"]


class World:
    """Hosts with real trees directories and connections; `lost`: hosts that answer nothing more."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.lost, self.sent = folder, set[str](), 0
        self.takes: dict[str, int] = {}
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

    def trees(self, host: str) -> Trees:
        return Trees(str(self.folder / host))

    def send(self, hosts: Sequence[str]) -> None:
        """Send the directory to hosts, and wait until each push has ended."""
        passed_on = Relay(dict.fromkeys(hosts, ("127.0.0.1",)))
        for host in hosts:
            push = TreePush(
                self.folder,
                [self.tree],
                query=lambda request, body, then, host=host: self._query(host, request, body, then),  # type: ignore[misc]
                done=lambda failure, host=host: self.ended.__setitem__(host, failure),  # type: ignore[misc]
                host=host,
                relay=passed_on,
            )
            push.send_next()
        while len(self.ended) < len(hosts):
            self._calls.get(timeout=120)()

    def has(self, host: str) -> bool:
        self.trees(host).verify(self.sha256)
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
        header, trees = request.to_header(), self.trees(host)
        try:
            if isinstance(request, PutTree):
                return Reply(PutFileReply(**trees.put(self.sha256, header, body)))
            if isinstance(request, OfferTree):
                return Reply(OfferTreeReply(**trees.offer(self.sha256, header)))
            assert isinstance(request, TakeTree)
            self.takes[host] = self.takes.get(host, 0) + 1
            return Reply(PutFileReply(**trees.take(self.sha256, header)))
        except OperationError as error:
            return Reply(None, error=Failure(error.code, str(error)))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(staging, "DIRECT", 2)
    monkeypatch.setattr(staging, "FAN_OUT", 2)
    monkeypatch.setattr(relay, "IDLE_S", 1.0)
    return World(tmp_path, staging.RELAY_BYTES)


def test_a_source_that_is_lost_is_replaced_and_its_readers_keep_what_they_have(world: World) -> None:
    passing = HOSTS[0]

    def lose_at_first_reader(host: str, request: Any) -> None:
        if isinstance(request, TakeTree):
            world.lost.add(passing)

    world.begun = lose_at_first_reader
    world.send(HOSTS)
    failed = {host for host, failure in world.ended.items() if failure is not None}
    assert failed <= {passing}, "a host that was lost fails; those that it served do not"
    assert all(map(world.has, set(HOSTS) - failed))


def test_bytes_that_were_damaged_on_a_host_cost_it_nothing_but_time(world: World) -> None:
    damaged: set[str] = set()

    def damage(host: str, request: Any) -> None:
        if isinstance(request, TakeTree) and host not in damaged and len(damaged) < 3:
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


def test_this_machine_sends_to_few_hosts_and_they_to_the_others(world: World) -> None:
    world.send(HOSTS)
    assert set(world.ended.values()) == {None} and all(map(world.has, HOSTS))
    assert world.sent < len(HOSTS) // 2 * world.tree.size_bytes
    assert len(world.takes) > len(HOSTS) // 2
    before = world.sent
    world.ended.clear()
    world.send(HOSTS)
    assert world.sent == before, "what is there is not sent again"


def test_only_who_has_the_identity_of_the_round_reads_an_offer(world: World, tmp_path: Path) -> None:
    size, first = world.tree.size_bytes, Relay({})
    giver, taker = world.trees("giver"), world.trees("taker")
    giver.put(world.sha256, {"size_bytes": size}, b"")
    taker.put(world.sha256, {"size_bytes": size}, b"")
    port = giver.offer(world.sha256, {"size_bytes": size, "identity": first.identity})["port"]
    giver.put(world.sha256, {"size_bytes": size, "offset": 0}, tree_file(tmp_path, world.sha256).read_bytes()[:1000])
    where = {"size_bytes": size, "addresses": ["127.0.0.1"], "port": port}
    assert taker.take(world.sha256, {**where, "identity": Relay({}).identity}) == {"have": 0, "done": False}
    assert taker.take(world.sha256, {**where, "identity": first.identity}) == {"have": 1000, "done": False}


def test_a_host_never_gets_a_directory_by_way_of_itself() -> None:
    exchange = staging.Exchange(Relay({}))
    a, b = staging.Source("a", 1, 4), staging.Source("b", 2, 4)
    exchange._sources = [a, b]
    exchange._source_of = {"b": a}
    assert exchange._find("a", may_read=True) is None
    assert exchange._find("c", may_read=True) is a
