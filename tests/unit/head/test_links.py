"""One link for each way of reaching a host, whoever asks first."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

from ascendrun.core.errors import UnreachableError
from ascendrun.core.hosts import Host
from ascendrun.head.agents.connections import Connections
from ascendrun.head.protocol.agent_bootstrap import AgentImage


class Nowhere:
    """A cluster none of whose hosts can be reached."""

    def connect(self, host: Host, *, deadlines: Any) -> Any:
        raise UnreachableError(f"{host.name} is nowhere")

    def close(self) -> None:
        pass


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
    links = Connections(Nowhere(), AgentImage(b"", "", ""), Deaf())  # type: ignore[arg-type]
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
