"""Two machines of one head at one node: the one with the lower term changes nothing more, and may still read."""

from __future__ import annotations

import pytest

from tests.agent.conftest import HOLD, Client, Node

HEAD = "0123abcd"
TAG = f"{HEAD}-j-0001.1"


@pytest.fixture
def old(node: Node) -> Client:
    """The agent of the machine that acts first."""
    client = node.connect()
    client.do("fence", head_id=HEAD, term=1)
    return client


def test_a_start_that_another_machine_overtakes_starts_nothing(node: Node, old: Client) -> None:
    job = node.job(TAG, HOLD)
    old.do("prepare", **job)
    new = node.connect()
    assert new.do("fence", head_id=HEAD, term=2)["live"] == [TAG]  # what the old one has left is read after the fence
    assert old.refused("go", tag=TAG, master_port=None, secret_env={})["code"] == "superseded"
    for op in ("stop", "abort", "release", "forget"):
        assert old.refused(op, tag=TAG, now=True, grace_s=None)["code"] == "superseded"
    assert old.refused("exec", argv=["true"], timeout_s=10)["code"] == "superseded"
    assert old.do("processes", tag=TAG)["phase"] == "prepared" and node.alive(TAG) == []
    old.do("follow", tag=TAG, offsets={})
    new.do("go", tag=TAG, master_port=None, secret_env={})
    new.do("follow", tag=TAG, offsets={})
    new.wait_told(TAG, "rank_started", rank=0)
    new.end(TAG)


def test_a_lower_term_is_refused_at_once_and_other_heads_are_not_concerned(node: Node, old: Client) -> None:
    new = node.connect()
    new.do("fence", head_id=HEAD, term=5)
    late = node.connect()
    assert late.refused("fence", head_id=HEAD, term=4)["message"]["values"] == {"term": 5}
    assert late.refused("abort", tag=TAG)["code"] == "superseded"
    node.connect().do("abort", tag="89abcdef-j-0001.1")  # a head without a standby
    other = node.connect()
    other.do("fence", head_id="89abcdef", term=1)
    other.do("abort", tag="89abcdef-j-0001.1")


def test_a_voter_keeps_its_lease_over_agents(node: Node, old: Client) -> None:
    lease = {"head_id": HEAD, "term": 1, "instance": "a", "host": "head1", "lease_s": 60.0}
    assert old.do("claim_head", **{**lease, "term": 2, "instance": "b"})["why"] == "unknown"
    assert old.do("renew_head", order=[0, 0], in_sync=True, **lease)["granted"]
    other = node.connect()
    assert other.do("claim_head", **{**lease, "term": 2, "instance": "b"})["why"] == "held"
    old.kill()
    assert other.do("renew_head", order=[0, 1], **lease)["in_sync"] is True
