"""Where an attempt's growing files are."""

from pathlib import Path

import pytest

from ascendrun.node import layout
from ascendrun.node.agent import checks
from ascendrun.node.agent.attempt.attempts import place_streams


def test_files_that_stay_on_a_network_file_system_are_told_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "root/nodes/key/runs/head-j-0001/attempt-1"
    folder.mkdir(parents=True)
    assert place_streams(str(folder)) == (str(folder), None)
    kinds = [*checks.NETWORK, checks.file_system_of(str(folder)), checks.file_system_of(layout.LOCAL)]
    monkeypatch.setattr(checks, "NETWORK", kinds)
    streams, why = place_streams(str(folder))
    assert why is not None and (streams, why["key"]) == (str(folder), "local-on-network")
