"""The `power` block of settings files: the agent of the strongest file, and its problems."""

from __future__ import annotations

from pathlib import Path

import pytest

from ascendrun.core.errors import InvalidInputError
from ascendrun.core.hosts import Host
from ascendrun.core.power_settings import PowerAgent, read_power
from ascendrun.head.state.user_files import load_settings


def load(tmp_path: Path, text: str, *, weak: str = "") -> PowerAgent | None:
    (tmp_path / "user.yaml").write_text(text)
    (tmp_path / "weak.yaml").write_text(weak)
    return read_power(load_settings({}, files=[tmp_path / "weak.yaml", tmp_path / "user.yaml"]))


def test_the_power_agent_of_the_strongest_file_gets_what_is_known_of_a_host(tmp_path: Path) -> None:
    weak = "power: {command: [true]}\nhook: {command: [bin/told]}"
    text = 'power: {command: [fence_redfish, "--ip={bmc}", "--plug={host}/{addr}"], timeout_s: 5}'
    power, host = load(tmp_path, text, weak=weak), Host("n1", addr="10.0.0.1", bmc="10.1.0.1")
    assert power is not None and power.timeout_s == 5 and power.file.endswith("user.yaml")
    assert power.argv(host, "off") == ["fence_redfish", "--ip=10.1.0.1", "--plug=n1/10.0.0.1", "--action=off"]
    kept = load(tmp_path, "color: never", weak=weak)
    assert kept is not None and kept.command == ("true",)


@pytest.mark.parametrize("power", ['{command: [a, "--ip={ipmi}"]}', "{command: fence}", "{command: []}", "[]", "{}"])
def test_a_power_agent_that_cannot_work_is_one_problem(tmp_path: Path, power: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        load(tmp_path, f"power: {power}")
    assert [problem.line for problem in caught.value.problems] == [1]
