"""What measurements mean: who is named, with which numbers, and who is not."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from ascendrun.core.dataclass import load_dataclass
from ascendrun.core.findings import Finding, Severity
from ascendrun.health.comparison import finding_line
from ascendrun.health.deep.measurements import (
    DeepReport,
    DeviceResult,
    Exchange,
    HostResult,
    Quantity,
    better_of,
    newest_like,
    read_exchange,
    read_host,
)
from ascendrun.health.deep.view import deep_findings
from ascendrun.text import Text, to_json

GOOD = "aaaa"


def host(
    *tflops: float,
    digests: Sequence[str] = (),
    wrong: Sequence[int] = (),
    inside: float | None = 100e9,
    why: str | None = None,
) -> HostResult:
    devices = tuple(
        DeviceResult(f"npu:{k}", value, value, digests[k] if digests else GOOD, wrong[k] if wrong else 0)
        for k, value in enumerate(tflops)
    )
    return HostResult(devices=devices, bandwidth_bytes_per_s=inside, latency_s=1e-5, why=why)


def report(
    hosts: Mapping[str, HostResult],
    *rounds: Sequence[Exchange],
    at_s: float = 1000.0,
    busy: Mapping[str, str] | None = None,
    unfit: Sequence[str] = (),
) -> DeepReport:
    return DeepReport(
        at_s=at_s,
        device_type="npu",
        sizes=(1024,),
        hosts=hosts,
        rounds=tuple(tuple(found) for found in rounds),
        busy=busy or {},
        not_ready=tuple(unfit),
    )


def exchange(one: str, other: str, bandwidth: float | None, **rails: float) -> Exchange:
    if bandwidth is None:
        return Exchange(one, other, rates=None, why="j-0007 stopped after 240 s")
    named = {f"rail npu:{name[1:]}": value for name, value in rails.items()}
    return Exchange(one, other, rates={"bandwidth": bandwidth, "promptness": 5e4, **named})


def lower(fraction: float) -> Text:
    return Text("deep.lower", "", fraction=fraction)


def codes(found: Sequence[Finding]) -> list[Any]:
    return [(one.code, one.hosts) for one in found]


FOUR = {name: host(300.0, 301.0) for name in ("n1", "n2", "n3", "n4")}


def pairs(**bandwidth: float | None) -> list[list[Exchange]]:
    """Two rounds of four hosts, as `n1n2=20e9`; the others at 20 GB/s."""
    found = {name: bandwidth.get(name, 20e9) for name in ("n1n2", "n3n4", "n1n3", "n2n4")}
    made = [exchange(name[:2], name[2:], value) for name, value in found.items()]
    return [made[:2], made[2:]]


def test_sound_hosts_give_no_finding() -> None:
    assert deep_findings(report(FOUR, *pairs())) == ()


def test_a_slow_host_is_named_with_its_rate_the_usual_one_and_every_pair_as_evidence() -> None:
    [found] = deep_findings(report(FOUR, *pairs(n3n4=5e9, n1n3=6e9)))
    assert (found.code, found.hosts, found.severity) == ("deep-host-slow", ("n3",), Severity.WARN)
    assert found.values == {"measured": Quantity(6e9, "B/s"), "typical": Quantity(20e9, "B/s"), "below": lower(0.7)}
    assert [str(line) for line in found.evidence] == [
        "n1 and n3: 6 GB/s, latency 20 µs",
        "n3 and n4: 5 GB/s, latency 20 µs",
    ]


def test_a_host_that_reaches_nobody_is_a_failure_with_the_reason_as_evidence() -> None:
    [found] = deep_findings(report(FOUR, *pairs(n3n4=None, n1n3=None)))
    assert (found.code, found.hosts, found.severity) == ("deep-host-disconnected", ("n3",), Severity.FAIL)
    assert "j-0007" in str(found.evidence[0])


def test_a_link_that_stays_slow_is_named_as_two_sound_hosts() -> None:
    rounds = [*pairs(n1n2=1e9), [exchange("n1", "n2", 1e9)]]
    [found] = deep_findings(report(FOUR, *rounds))
    assert (found.code, found.hosts) == ("deep-link-slow", ("n1", "n2"))
    assert found.evidence[0].values["measured"].key == "deep.repeated"


def test_a_bad_uplink_is_one_finding_about_two_groups() -> None:
    rounds = [*pairs(n1n3=1e9, n2n4=1.5e9), [exchange("n1", "n3", 1e9), exchange("n2", "n4", 1.4e9)]]
    [found] = deep_findings(report(FOUR, *rounds))
    assert (found.code, found.hosts) == ("deep-split-slow", ("n1", "n2", "n3", "n4"))
    assert found.values == {
        "one": ("n1", "n2"),
        "other": ("n3", "n4"),
        "count": 2,
        "measured": Quantity(1.5e9, "B/s"),
        "typical": Quantity(20e9, "B/s"),
        "below": lower(1 - 1.5 / 20),
    }


def test_one_bad_rail_of_eight_is_named_by_its_device() -> None:
    rounds = [
        [exchange("n1", "n2", 20e9, r0=9e9, r1=9e9), exchange("n3", "n4", 19e9, r0=9e9, r1=1e9)],
        [exchange("n1", "n3", 19e9, r0=9e9, r1=1.1e9), exchange("n2", "n4", 20e9, r0=9e9, r1=9e9)],
    ]
    [found] = deep_findings(report(FOUR, *rounds))
    assert (found.code, found.hosts) == ("deep-host-slow", ("n3",))
    assert found.values["measured"] == Quantity(1.1e9, "B/s", "npu:1")
    assert str(found.values["typical"]) == "9 GB/s"
    assert "slowest rail npu:1" in str(found.evidence[0])


def test_a_device_slow_against_all_devices_is_named() -> None:
    hosts = {**FOUR, "n2": host(300.0, 210.0)}
    [found] = deep_findings(report(hosts))
    assert (found.code, found.hosts) == ("deep-device-slow", ("n2",))
    assert found.values == {
        "device": "npu:1",
        "measured": Quantity(210.0, "TFLOP/s"),
        "typical": Quantity(300.0, "TFLOP/s"),
        "below": lower(1 - 210 / 300),
    }


def test_nobody_is_slow_among_two() -> None:
    assert deep_findings(report({"n1": host(300.0), "n2": host(100.0, inside=1e9)})) == ()


def test_a_device_that_computes_something_else_is_a_failure() -> None:
    hosts = {**FOUR, "n4": host(300.0, 300.0, digests=[GOOD, "bbbb"])}
    assert codes(deep_findings(report(hosts))) == [("deep-device-wrong", ("n4",))]
    hosts = {**FOUR, "n4": host(300.0, 300.0, wrong=[3, 0])}
    [found] = deep_findings(report(hosts))
    assert (found.code, found.values) == ("deep-device-inconsistent", {"device": "npu:0", "wrong": 3})


def test_a_host_whose_inside_is_slow_is_named() -> None:
    assert codes(deep_findings(report({**FOUR, "n1": host(300.0, 300.0, inside=50e9)}))) == [
        ("deep-node-slow", ("n1",))
    ]


def test_failed_and_skipped_hosts_are_said_and_the_worst_comes_first() -> None:
    hosts = {**FOUR, "n4": HostResult(why="rank 0 on n4 exited with code 1")}
    found = deep_findings(report(hosts, busy={"n5": "j-0003"}, unfit=["n6", "n7"]))
    assert codes(found) == [
        ("deep-host-failed", ("n4",)),
        ("deep-host-busy", ("n5",)),
        ("deep-host-not-ready", ("n6", "n7")),
    ]


def test_the_last_run_is_compared_host_by_host() -> None:
    before = report(FOUR, *pairs(), at_s=500.0)
    now = report({**FOUR, "n2": host(177.0, 301.0)}, *pairs(n3n4=11.8e9, n1n3=11.8e9), at_s=600.0)
    found = {one.code: one for one in deep_findings(now, before)}
    assert found["deep-network-slower-than-before"].hosts == ("n3",)
    assert found["deep-network-slower-than-before"].values["below"] == lower(1 - 11.8e9 / 20e9)
    assert found["deep-device-slower-than-before"].values == {
        "device": "npu:0",
        "below": lower(1 - 177 / 300),
        "measured": Quantity(177.0, "TFLOP/s"),
        "before": Quantity(300.0, "TFLOP/s"),
    }


def test_only_a_run_of_the_same_kind_is_compared() -> None:
    now = report(FOUR, at_s=600.0)
    older, newer, later = (report(FOUR, at_s=at_s) for at_s in (100.0, 200.0, 700.0))
    other = DeepReport(at_s=300.0, device_type="cpu", sizes=(1024,), hosts=FOUR)
    strangers = report({"m1": host(1.0)}, at_s=400.0)
    assert newest_like(now, [later, older, newer, other, strangers]) is newer
    assert newest_like(now, [other]) is None


def test_a_report_survives_its_file() -> None:
    first = report({**FOUR, "n4": HostResult(why="no")}, *pairs(n3n4=None), busy={"n5": "j-0003"}, unfit=["n6"])
    assert load_dataclass(DeepReport, json.loads(json.dumps(to_json(first)))) == first


def test_a_second_measurement_forgives_slowness_and_never_a_wrong_product() -> None:
    first, second = host(100.0, 300.0, inside=5e9), host(290.0, 280.0, inside=90e9, wrong=[0, 1])
    best = better_of(first, second)
    assert [one.tflops for one in best.devices] == [290.0, 300.0]
    assert [one.wrong for one in best.devices] == [0, 1]
    assert best.bandwidth_bytes_per_s == 90e9
    assert better_of(HostResult(why="no"), second) == second and better_of(first, HostResult(why="no")) == first
    assert better_of(host(1.0), host(2.0, digests=["bbbb"])).devices[0].wrong == 1


def test_the_programs_lines_are_read() -> None:
    burnt = {"measured": "device", "rank": 1, "tflops": 3.0, "tflops_slowest": 2.0, "digest": "d", "wrong": 0}
    mesh: dict[str, Any] = {"latency_s": 2e-5, "bandwidth_bytes_per_s": {"1024": 1e6, "65536": 5e6}}
    found = read_host([{**burnt, "device": "npu:10"}, {**burnt, "device": "npu:9"}, {**mesh, "measured": "node"}])
    assert [one.device for one in found.devices] == ["npu:9", "npu:10"]
    assert (found.bandwidth_bytes_per_s, found.latency_s) == (5e6, 2e-5)
    lines = [{**mesh, "measured": "rail", "device": "npu:0"}, {**mesh, "measured": "mesh", "device": "npu:0"}]
    assert read_exchange("a", "b", lines).rates == {
        "rail npu:0": 5e6,
        "bandwidth": 5e6,
        "promptness": pytest.approx(5e4),
    }
    assert read_exchange("a", "b", []).rates is None


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_no_value_is_missing_from_the_words(lang: str) -> None:
    hosts = {
        **FOUR,
        "n4": host(100.0, 300.0, digests=[GOOD, "b"], inside=5e9),
        "n5": HostResult(why="no"),
        "n6": host(300.0, wrong=[1]),
    }
    now = report(hosts, *pairs(n3n4=5e9, n1n3=6e9), busy={"n7": "j-0003"}, unfit=["n8"])
    split = [*pairs(n1n3=None, n2n4=None), *pairs(n1n3=None, n2n4=None)]
    found = [
        *deep_findings(now, report(FOUR, *pairs(), at_s=1.0)),
        *deep_findings(report(FOUR, *pairs(n1n2=None))),
        *deep_findings(report(FOUR, *split)),
    ]
    assert len({one.code for one in found}) >= 9 and all(one.message for one in found)
    for one in found:
        line = finding_line(one).render(lang)
        assert not re.search(r"\?", line), (one, line)


def test_quantities_have_a_prefix_that_suits_them() -> None:
    speeds = [str(Quantity(value, "B/s")) for value in (23.456e9, 5.04e6, 900.0)]
    assert speeds == ["23.5 GB/s", "5.04 MB/s", "0.9 kB/s"]
    assert [str(Quantity(value, "s")) for value in (2e-5, 0.004, 3.0)] == ["20 µs", "4 ms", "3 s"]
