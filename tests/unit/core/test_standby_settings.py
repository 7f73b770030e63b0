"""The `standby` block of settings files: the block of the strongest file, and all its problems at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from ascendrun.core.errors import ConflictError, InvalidInputError
from ascendrun.core.standby_settings import LEASE_S, Standby, read_standby
from ascendrun.head.state.user_files import load_settings, read_hostfile
from ascendrun.node.agent.terms import LONGEST_S

GOOD = "standby: {heads: [me@h1, me@h2], voters: [n1, n2, n3], hostfile: all.hosts}"


def load(tmp_path: Path, text: str) -> Standby | None:
    (tmp_path / "all.hosts").write_text("n1\nn2 addr=10.0.0.2\nn3\nn4\n")
    (tmp_path / "user.yaml").write_text(text)
    return read_standby(load_settings({}, files=[tmp_path / "user.yaml"]), read_hostfile)


def test_voters_are_hosts_of_the_hostfile(tmp_path: Path) -> None:
    standby = load(tmp_path, GOOD)
    assert standby is not None and standby.heads == ("me@h1", "me@h2") and standby.lease_s == 20
    assert [host.addr for host in standby.voters] == [None, "10.0.0.2", None] and standby.majority == 2
    assert load(tmp_path, "color: never") is None and LEASE_S[1] == LONGEST_S


@pytest.mark.parametrize(
    ("block", "count"),
    [
        ("{heads: [a, b], voters: [n1, n2], hostfile: all.hosts}", 1),
        ("{heads: [a], voters: [n1, n2, n3], hostfile: all.hosts, lease_s: 1}", 2),
        ("{heads: [a, a], voters: [n1, n2, n3, n9], hostfile: all.hosts}", 3),
        ("{heads: [a, b], voters: [n1, n2, n2], hostfile: all.hosts}", 1),
        ("{heads: [a, b], voters: [n1, n2, n3, n4], hostfile: none.hosts}", 2),
        ("{heads: [a, b], voters: [n1, n2, n3]}", 1),
    ],
)
def test_problems_are_one_report(tmp_path: Path, block: str, count: int) -> None:
    with pytest.raises(InvalidInputError) as caught:
        load(tmp_path, f"standby: {block}")
    assert len(caught.value.problems) == count, caught.value.problems


def test_the_voters_of_a_term_cannot_be_replaced(tmp_path: Path) -> None:
    standby = load(tmp_path, GOOD)
    assert standby is not None
    for known in ((), ("n3", "n1", "n2")):
        standby.require_voters(known)
    with pytest.raises(ConflictError):
        standby.require_voters(("n1", "n2", "n4"))
