"""Host keys over a whole cluster: strict, shown before they are recorded, and loud when they change."""

import json
from typing import Callable

import pytest
from scenes import Scene


@pytest.fixture
def strangers(scene_of: Callable[..., Scene]) -> Scene:
    """Two hosts whose keys the head has never seen."""
    return scene_of(2, is_trusted=False)


def test_an_unknown_host_gets_nothing_and_trust_is_the_way_out(strangers: Scene) -> None:
    job_file = strangers.job("first", "print", "hello")
    refused = strangers.ascendrun("submit", job_file, code=1)
    assert "ascendrun trust" in refused.stderr
    examined = strangers.ascendrun("doctor", "-H", strangers.folder / "first.hosts", "--quick", "-o", "json")
    told = [one for one in json.loads(examined.stdout)["findings"] if one["code"] == "host-key-unknown"]
    assert examined.returncode == 5 and sorted(host for one in told for host in one["hosts"]) == ["node1", "node2"]
    assert "ascendrun trust" in told[0]["hint"]
    assert strangers.reason("j-0001")["code"] == "preflight-failed"
    for host in strangers.cluster.hosts:
        assert "Accepted publickey" not in strangers.cluster.path(host, "/var/log/sshd.log").read_text()
    trusted = strangers.ascendrun("trust", "--hostfile", strangers.folder / "first.hosts", "--yes", code=0)
    assert (trusted.stdout + trusted.stderr).count("SHA256:") >= 2
    strangers.ascendrun("submit", job_file, code=0)
