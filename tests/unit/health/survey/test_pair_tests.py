"""The devices' own ports: who pings whom, and what is told of links that are not sound."""

from dataclasses import replace

from ascendrun.core.findings import Severity
from ascendrun.health.survey.pair_tests import ping_items, plan_pings
from ascendrun.sim.ascend.scenario import Scenario
from tests.lib.npu_worlds import codes, node, ran, raw_answers, section, the, world


def test_every_port_asks_once_and_answers_once_in_a_ring_and_every_pair_on_request():
    addresses = {f"n{host}": {device: f"29.1.{host}.{device}" for device in range(8)} for host in range(1, 6)}
    ring = plan_pings(addresses, every_pair=False)
    assert all(len(targets) == 8 for targets in ring.values())
    asked = [address for targets in ring.values() for _, address in targets]
    assert sorted(asked) == sorted(one for ports in addresses.values() for one in ports.values())
    assert all(address.endswith(f".{device}") for targets in ring.values() for device, address in targets)
    whole = plan_pings(addresses, every_pair=True)
    assert all(len(targets) == 32 for targets in whole.values())
    assert plan_pings({"n1": {0: "29.1.1.1"}, "n2": {}}, every_pair=True) == {"n1": ()}


def test_ports_that_are_down_or_have_no_address_are_not_pinged_and_neither_is_what_nobody_could_read():
    results = {
        "n1": raw_answers(Scenario(number=1)),
        "n2": raw_answers(Scenario(number=2)),
        "n3": {"hccn": {"error": "no answer in time", "late": True}},
        "n4": {},
        "n5": {"hccn": ran("\x00@@ @@\n")},
    }
    results["n2"]["hccn"]["out"] = results["n2"]["hccn"]["out"].replace("link status: UP", "link status: DOWN", 1)
    items = ping_items(results, every_pair=False)
    assert set(items) == {"n1", "n2"}
    words = items["n1"]["argv"][4:]
    assert words[:2] == ["1", "29.1.3.11"] and len(words) == 14, "device 0 of n2 is down"


def test_a_port_that_gets_no_answer_is_told_with_the_pair():
    silent = node("n2", None, ("unreachable", 3), pings=[(2, "29.1.2.12"), (3, "29.1.2.13")])
    finding = the(world(node("n1", pings=[(3, "29.1.3.13")]), silent), "device-unreachable")
    assert (finding.hosts, finding.values["devices"]) == (("n2",), (3,))
    assert [line.values for line in finding.evidence] == [
        {"device": 3, "address": "29.1.2.13", "owner": "n1 device 3", "received": 0, "sent": 3}
    ]
    lossy = ran(
        section("ping 0 29.1.2.10", "device 0 PING 29.1.2.10\n3 packets transmitted, 1 received, 66.67% packet loss\n")
    )
    assert the(world(node("n1"), node("n2", raw={"hccn-pings": lossy})), "device-ping-loss").hosts == ("n2",)


def test_one_address_on_two_ports_is_told():
    twice = Scenario(cards=2, addresses=("29.1.9.1", "29.1.9.2"))
    finding = the(
        world(node("n1", twice), node("n2", replace(twice, addresses=("29.1.9.2", "29.1.9.3")))), "device-ip-twice"
    )
    assert finding.hosts == ("n1", "n2") and finding.values["address"] == "29.1.9.2"


def test_a_link_that_comes_and_goes_is_told_and_one_that_was_moved_once_is_not():
    def history(*downs):
        lines = "".join(
            f"    Thu Nov 19 {hour:02d}:00:00 2026    LINK {word}\n"
            for hour in sorted(downs, reverse=True)
            for word in ("UP", "DOWN")
        )
        text = "".join(
            f"[devid 3]{line}\n"
            for line in (
                "current time        : Thu Nov 19 23:00:00 2026",
                f"link up count       : {len(downs)}",
                "link change records :",
                *lines.splitlines(),
            )
        )
        return world(node("n1"), node("n2", raw={"hccn": ran(section("link_stat 3", text))}))

    finding = the(history(1, 7, 20), "device-link-flaps")
    assert finding.severity is Severity.WARN and finding.evidence[0].values == {"device": 3, "count": 3}
    assert "device-link-flaps" not in codes(history(7))
