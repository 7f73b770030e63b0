"""Host keys over a whole cluster: strict, shown before they are recorded, and loud when they change."""

from __future__ import annotations

from typing import Any, Callable

import pytest
from scenes import Scene, run_text

from tests.lib.vcluster.cluster import VirtualCluster

Ascendrun = Any


@pytest.fixture
def strangers(ascendrun: Ascendrun, cluster_of: Callable[..., VirtualCluster]) -> Scene:
    """Two hosts whose keys the head has never seen."""
    cluster = cluster_of(2, is_trusted=False)
    return Scene(ascendrun.on(cluster), cluster)


def test_an_unknown_host_gets_nothing_and_trust_is_the_way_out(strangers: Scene) -> None:
    job_file = strangers.job("first", "print", "hello")
    refused = strangers.ascendrun("submit", job_file)
    assert refused.returncode == 1, run_text(refused)
    assert "ascendrun trust" in refused.stderr
    assert strangers.reason("j-0001")["code"] == "preflight-failed"
    for host in strangers.cluster.hosts:
        assert "Accepted publickey" not in strangers.cluster.path(host, "/var/log/sshd.log").read_text()
    trusted = strangers.ascendrun("trust", "--hostfile", strangers.folder / "first.hosts", "--yes")
    assert trusted.returncode == 0, run_text(trusted)
    assert (trusted.stdout + trusted.stderr).count("SHA256:") >= 2
    again = strangers.ascendrun("submit", job_file)
    assert again.returncode == 0, run_text(again)


def test_a_changed_host_key_stops_that_node_with_both_fingerprints_and_no_login(strangers: Scene) -> None:
    hostfile = strangers.folder / "two.hosts"
    hostfile.write_text(strangers.cluster.hostfile(slots=2))
    recorded = strangers.ascendrun("trust", "--hostfile", hostfile, "--yes")
    assert recorded.returncode == 0, run_text(recorded)
    known = strangers.ascendrun.state_dir / "known_hosts"
    node1, node2 = sorted(known.read_text().splitlines())
    known.write_text(f"{node1}\n{node2.split()[0]} {' '.join(node1.split()[1:])}\n")
    done = strangers.ascendrun("exec", "--hostfile", hostfile, "--", "hostname")
    assert done.returncode == 6, run_text(done)
    assert "node1" in done.stdout
    told = done.stdout + done.stderr
    assert told.count("SHA256:") >= 2 and "ascendrun trust --replace" in told
    assert "Accepted publickey" not in strangers.cluster.path("node2", "/var/log/sshd.log").read_text()
