"""From what agents say to reports: what a node could not tell is missing, never a value."""

import json

from ascendrun.core.hosts import Host
from ascendrun.core.reports import Route, load_report, report_values
from ascendrun.head.protocol.agent_bootstrap import Login
from ascendrun.head.protocol.agent_events import make_report
from ascendrun.head.protocol.agent_messages import AgentInfo, ProbeReply

TEXTS = ("root", "hostname", "boot_id", "user", "python", "python_version", "kernel", "arch")
HELLO = {**{name: f"a {name}" for name in TEXTS}, "cpus": 4}


def test_a_peer_without_a_route_is_missing_and_the_report_survives_the_socket():
    routes = {
        "n2": {"interface": "eth0", "source": "10.0.0.1", "error": None},
        "n3": {"interface": None, "source": None, "error": "n3: no such name"},
    }
    info, probe = AgentInfo.from_header(HELLO), ProbeReply.from_header({"at_ns": 5, "routes": routes})
    report = make_report(Host("n1"), info, probe, clock_offset_s=0.5, login=Login(0.2, "welcome"))
    assert (report.login_s, report.login_noise, report.is_local) == (0.2, "welcome", False)
    assert report.routes == {"n2": Route("eth0", "10.0.0.1")}
    assert load_report(report_values(report)) == report
    everyone = [report.host, *report.routes]
    assert load_report(json.loads(json.dumps(report_values(report, everyone))), everyone) == report
    assert load_report(report_values(report, [*everyone, "another"]), [*everyone, "another"]) == report
