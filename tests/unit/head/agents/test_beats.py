"""Beats are rarer with many hosts, and a host is lost as soon as before."""

from typing import Any

import pytest

from ascendrun.core.hosts import Host
from ascendrun.head.agents.connections import Connections
from ascendrun.head.protocol import remote
from ascendrun.head.protocol.agent_bootstrap import AgentImage
from ascendrun.head.protocol.agent_messages import Ping
from ascendrun.node import wire
from tests.unit.head.agents.test_connections import HELLO, Deaf, Nowhere, connect


def test_the_next_request_has_the_interval_of_beats_once_and_silence_counts_as_before() -> None:
    link = connect({"event": "hello", "protocol": wire.PROTOCOL, **HELLO})
    agent: Any = link._stream
    link.beat_s = wire.MOST_BEAT_S
    for _ in range(2):
        link.call(Ping(), deadline_s=60, done=lambda reply: None)
    headers = [header for header, _ in wire.FrameReader().feed(agent.sent)]
    assert [header.get("beat_s") for header in headers] == [wire.MOST_BEAT_S, None]
    seen_mono, found = link._received_mono, []
    for silence_s in (0.0, wire.MOST_BEAT_S + 2.0, remote.SUSPECT_S + wire.MOST_BEAT_S, remote.UNREACHABLE_S):
        link._received_mono = seen_mono - silence_s
        found.append(link.liveness())
    assert found == ["ALIVE", "ALIVE", "SUSPECT", "UNREACHABLE"]
    link._received_mono -= 1.0
    link.tick()
    assert not link.is_up, "rare beats make no host lost later"
    link.connect()
    link.call(Ping(), deadline_s=60, done=lambda reply: None)
    assert next(reversed(wire.FrameReader().feed(agent.sent)))[0]["beat_s"] == wire.MOST_BEAT_S, "told again"


def test_beats_are_rarer_with_more_than_two_hundred_busy_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    intervals = [wire.beat_interval_s(hosts) for hosts in (0, 1, 200, 300, 500, 1000, 10_000)]
    assert intervals == [2.0, 2.0, 2.0, 3.0, 5.0, 5.0, 5.0]
    assert 3 * wire.MOST_BEAT_S <= remote.UNREACHABLE_S
    links = Connections(Nowhere(), AgentImage({}), Deaf(), lambda call: call())  # type: ignore[arg-type]
    monkeypatch.setattr(links, "_connecting", Deaf())
    for number in range(400):
        links.get(Host(f"n{number}"))
    for busy, beat_s in ((200, 2.0), (300, 3.0), (1000, 4.0)):  # of jobs that share hosts, one counts twice
        links.busy_hosts = busy
        links.tick(float("inf"))
        assert {link.beat_s for link in links} == {beat_s}
    links.close()
