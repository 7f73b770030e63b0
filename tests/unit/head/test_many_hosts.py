"""A thousand hosts are no million pairs: how often connections, records and files are asked for while they come up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ascendrun.core import network
from ascendrun.core.hosts import Host
from ascendrun.core.machines import MachineRecord
from ascendrun.core.reports import Route
from ascendrun.head.agents.connections import MANY, RESTING_TURNS, TURNS, Connections, dialled
from ascendrun.head.agents.node_query import NodeQuery
from ascendrun.head.loop.machine.reconcile import SAVED_AT_ONCE, MachineRecords
from ascendrun.head.protocol.agent_bootstrap import AgentImage
from ascendrun.head.protocol.agent_messages import Probe
from ascendrun.head.protocol.remote import ConnectionListener
from tests.lib.small_world import World
from tests.unit.head.agents.test_connections import Nowhere

HOSTS = tuple(Host(f"n{number}", addr=f"10.0.{number // 250}.{number % 250}") for number in range(400))


class Links:
    """Links that are up one after the other; `looks`: how often one was asked for."""

    def __init__(self) -> None:
        self.links = {host: Link(host) for host in HOSTS}
        self.looks = 0

    def get(self, host: Host) -> Any:
        self.looks += 1
        return self.links[host]


class Link:
    peer_address: str | None = None

    def __init__(self, host: Host) -> None:
        self.host, self.is_up, self.asked = host, False, []  # type: ignore[var-annotated]

    def connect(self) -> None:
        pass

    def call(self, request: Any, **_: Any) -> None:
        self.asked.append(request)


@pytest.mark.parametrize("order", [1, -1], ids=["in-order", "backwards"])
def test_hosts_that_connect_one_by_one_are_looked_at_a_few_times_each(order: int) -> None:
    links: Any = Links()
    query = NodeQuery(HOSTS, links, reported=lambda report: None, refused=lambda host, failure: None)
    query.start()
    for host in HOSTS[::order]:
        assert not any(link.asked for link in links.links.values())
        links.links[host].is_up = True
        query.on_up()
    for _ in HOSTS:  # those of other jobs connect
        query.on_up()
    assert links.looks <= 6 * len(HOSTS)
    probes = [link.asked for link in links.links.values()]
    assert all(len(asked) == 1 and isinstance(asked[0], Probe) for asked in probes)
    assert len({id(asked[0].peers) for asked in probes}) == 1 and set(probes[0][0].peers) == {one.name for one in HOSTS}


def test_one_host_asks_for_no_route_to_itself() -> None:
    links: Any = Links()
    links.links[HOSTS[0]].is_up = True
    NodeQuery(HOSTS[:1], links, reported=lambda report: None, refused=lambda host, failure: None).start()
    assert [request.peers for request in links.links[HOSTS[0]].asked] == [{}]


def test_the_record_of_a_host_is_found_without_a_walk(tmp_path: Path) -> None:
    class Counted(World):
        walks = 0

        def __iter__(self) -> Any:
            Counted.walks += 1
            return super().__iter__()

    world = Counted(tmp_path)
    records = world.jobs.machines.records
    for host in HOSTS[:50]:
        world.get(host).is_up = True
        records.keep(records.of(world.get(host)))  # type: ignore[arg-type]
    before = Counted.walks
    for host in HOSTS[:50]:
        assert [one.key for one in records.at(host)] == [f"key-{host.addr}"]
        other_port = replace(host, port=2222)
        assert [one.is_identified for one in records.at(other_port)] == [False]
    assert Counted.walks == before


class Table:
    has_files = True

    def __init__(self) -> None:
        self.saved: list[int] = []

    def all(self) -> tuple[MachineRecord, ...]:
        return ()

    def save(self, records: Any, events: Any, gone: Any) -> None:
        self.saved.append(len(records))


def test_a_beat_stores_some_machines_and_a_request_all() -> None:
    table: Any = Table()
    records = MachineRecords(table, links=())  # type: ignore[arg-type]
    for host in HOSTS:
        records.keep(MachineRecord(f"key-{host.name}", (host,)))
    records.save(within_s=0.0)
    assert table.saved == [SAVED_AT_ONCE] and records.has_unsaved
    records.save()
    assert table.saved[1:] == [len(HOSTS) - SAVED_AT_ONCE] and not records.has_unsaved


@pytest.fixture
def connections() -> Any:
    listener = ConnectionListener(lambda link: None, lambda link, error: None, lambda link, event, body: None)
    made = Connections(Nowhere(), AgentImage({}), listener, lambda call: None)  # type: ignore[arg-type]
    yield made
    made.close()


class Ticked:
    count, is_resting = 0, False

    def tick(self) -> None:
        self.count += 1

    def close(self) -> None:
        pass


def test_many_connections_take_turns_and_few_or_late_ones_do_not(connections: Any) -> None:
    links = {str(number): Ticked() for number in range(MANY * TURNS)}
    connections._links = links
    connections.tick(1.0)  # the first one is late
    assert {link.count for link in links.values()} == {1}
    for turn in range(TURNS):
        connections.tick(1.25 + turn / TURNS)
    assert {link.count for link in links.values()} == {2}
    connections.tick(9.0)
    assert {link.count for link in links.values()} == {3}
    connections._links = few = {str(number): Ticked() for number in range(3)}
    connections.tick(9.1)
    assert {link.count for link in few.values()} == {1}


@pytest.mark.parametrize(("count", "interval_s"), [(3, 0.25), (3, 1.0), (MANY * TURNS, 0.25), (MANY * TURNS, 1.0)])
def test_connections_that_rest_take_turns(connections: Any, count: int, interval_s: float) -> None:
    links = {str(number): Ticked() for number in range(count)}
    connections._links = links
    for number, link in enumerate(links.values()):
        link.is_resting = number != 1
    rounds = 4 * TURNS * RESTING_TURNS
    for turn in range(rounds):
        connections.tick(5.0 + turn * interval_s)
    waiting, *resting = sorted((link.count for link in links.values()), reverse=True)
    share = waiting / RESTING_TURNS
    assert waiting >= rounds * interval_s and all(share - 1 <= one <= share + 1 for one in resting)


def test_hosts_with_equal_settings_share_a_key_and_others_do_not() -> None:
    host = HOSTS[0]
    assert dialled(host) == dialled(replace(host, slots=4, line=9, groups=("a",)))
    others = [replace(host, **{name: "x"}) for name in ("name", "addr", "user", "engine", "allocation")]  # type: ignore[arg-type]
    assert len({dialled(host), dialled(replace(host, port=7)), *map(dialled, others)}) == 7


def test_a_million_routes_are_counted_by_kind() -> None:
    class Report:
        def __init__(self, host: Host, kinds: tuple[Route, ...]) -> None:
            self.routes = {one.name: kinds[number % len(kinds)] for number, one in enumerate(HOSTS) if one != host}

    network._is_loopback.cache_clear()
    kinds = Route("eth0", "10.0.0.1"), Route("eth1", "10.1.0.1"), Route("eth0", "10.0.0.1")
    reports: Any = {host.name: Report(host, kinds) for host in HOSTS}
    assert set(network.host_addresses(HOSTS, reports).values()) == {"10.0.0.1"}
    asked = network._is_loopback.cache_info()
    assert asked.hits + asked.misses <= 5 * len(HOSTS)
