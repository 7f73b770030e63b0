"""Two hosts of one attempt without a controller: the ranks of one end, those of the other must not wait for ever."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.conftest import HOLD, TAG, Client, Node
from tests.ports import free_port

ADDRESSES, KEY = ["127.0.0.1", "127.0.0.2"], "5f" * 32


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Client]:
    node = Node(tmp_path / "other")
    yield node.connect()
    assert node.clean() == []


@pytest.fixture
def port() -> int:
    return free_port()


def start(agent: Client, rank: int, command: list[str], port: int, *, after_s: float = 0.2, key: str = KEY) -> None:
    peers = {"addresses": ADDRESSES, "key": key, "after_s": after_s}
    agent.start(agent.node.job(TAG, command, node_rank=rank, peers=peers), master_port=port)
    agent.wait_told(TAG, "rank_started")


def test_ranks_end_when_those_of_another_host_have_failed(agent: Client, other: Client, port: int) -> None:
    start(other, 1, HOLD, port)
    start(agent, 0, ["sh", "-c", "exit 3"], port)
    other.wait_ended(TAG, 20.0)
    [stopping] = other.told(TAG, "stopping")
    assert stopping["by"] == "peer" and stopping["reason"]["values"] == {"node": 0}
    assert other.told(TAG, "rank_exited")[0]["stopped"]
    assert [line["by"] for line in agent.told(TAG, "stopping")] in ([], ["failure"])


DONE = """echo '{"done": true}' >> "$ASCENDRUN_METRICS_FILE"; kill -9 $$"""  # as if it had been killed at its exit


@pytest.mark.parametrize(
    "command, key", [(["true"], KEY), (["sh", "-c", DONE], KEY), (["sh", "-c", "exit 3"], "a0" * 32)]
)
def test_ranks_run_on_when_others_succeed_or_a_stranger_sends(
    agent: Client, other: Client, port: int, command: list[str], key: str
) -> None:
    start(other, 1, HOLD, port)
    start(agent, 0, command, port, key=key)
    agent.wait_ended(TAG)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for size in range(64):
            sender.sendto(bytes(size), (ADDRESSES[1], port))
    seen: list[str] = []
    other.wait(lambda: seen.append(other.phase(TAG) or "") or len(seen) > 40)
    assert set(seen) == {"running"} and not other.told(TAG, "stopping")
    other.end(TAG)
