"""Checks of NPUs over small worlds: the texts come from simulated tools, the findings must name what was planted."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ascendrun.core.findings import Severity
from ascendrun.health.checks import NPU_CHECKS, run_checks
from ascendrun.health.checks.npu import unowned_memory
from ascendrun.health.comparison import finding_line
from ascendrun.health.survey.facts import DeviceNode, NodeFacts
from ascendrun.health.survey.recorded_facts import recorded_facts
from ascendrun.sim.ascend.scenario import Scenario, ShownProcess
from ascendrun.text import LANGUAGES
from tests.lib.npu_worlds import RESERVED, codes, findings, node, ran, section, the, world


@pytest.mark.parametrize("family", ["cpu", "cuda"])
def test_npus_matter_to_npu_jobs_only(family):
    assert run_checks(world(node("n1", None, ("health_alarm", 0)), node("n2"), family=family)) == ()


# A fault of n2 and what must be said of it: fault of the simulator, code, severity, a value, words of the evidence.
FAULTS = [
    (("dropped", 3), "npu-missing", "FAIL", {"found": 7, "expected": 8}, "lists NPU 0-2,4-7"),
    (("health_warning", 2), "npu-health-warning", "WARN", {"npus": (2,)}, "80E18402"),
    (("health_alarm", 2), "npu-health-alarm", "FAIL", {"npus": (2,)}, "RestartNPU"),
    (("health_critical", 2), "npu-health-critical", "FAIL", {"npus": (2,)}, "80E01801"),
    (("health_unknown", 2), "npu-health-unknown", "FAIL", {"npus": (2,)}, "UNKNOWN"),
    (("ecc_single", 1), "ecc-single", "NOTE", {"npus": (1,)}, "single bit"),
    (("ecc_double", 1), "ecc-double", "FAIL", {"npus": (1,)}, "double bit"),
    (("hbm_short", 5), "hbm-short", "FAIL", {"npus": (5,)}, "of 65536 MB"),
    (("hbm_held", 5), "hbm-owner-unknown", "WARN", {"npus": (5,)}, "of 65536 MB in use"),
    (("ghost_process", 6, "4242"), "npu-ghost", "WARN", {"npus": (6,), "pid": 4242}, "no such process"),
    (("link_down", 4), "device-link-down", "FAIL", {"devices": (4,)}, "DOWN"),
    (("ip_missing", 4), "device-ip-missing", "FAIL", {"devices": (4,)}, "address_4=29.1.3.14"),
    (("ip_v6", 4), "device-ip-family", "FAIL", {"value": "IPv6", "majority": "IPv4"}, "1 of 16"),
    (("hccn_conf_stale", 4), "hccn-conf-stale", "WARN", {"devices": (4,)}, "29.1.3.14"),
    (("tls_on", 7), "device-tls-differs", "FAIL", {"devices": (7,), "switch": 0}, "1 of 16 ports: on"),
    (("net_health", 0, "Unreachable"), "device-net-health", "WARN", {"status": "Unreachable"}, ""),
    (("fec_none", 0), "device-fec-off", "WARN", {"devices": (0,)}, ""),
    (("optical_absent", 0), "device-optical", "WARN", {"devices": (0,)}, "no module"),
    (("optical_dark", 0), "device-optical", "WARN", {"devices": (0,)}, "0.0054 mW"),
    (("driver_missing", None), "npu-driver-unreachable", "FAIL", {}, "-8005"),
    (("device_used", None), "npu-held-elsewhere", "FAIL", {}, "-8020"),
    (("firmware_mismatch", None), "driver-firmware", "WARN", {}, "NOK"),
    (("hccn_refused", None), "hccn-refused", "NOTE", {"user": "me"}, "permission"),
    (("garbage", None), "npu-smi-unreadable", "FAIL", {}, ""),
]


@pytest.mark.parametrize("fault, code, severity, values, evidence", FAULTS, ids=lambda one: str(one)[:30])
def test_a_fault_of_one_node_has_its_code_its_node_and_its_evidence(fault, code, severity, values, evidence):
    if fault[0] == "garbage":  # written by the program around the tools, which is not asked here
        ill = node("n2", raw={"npu-smi": ran(section("info", "\x00\x9f{]]\x1bGW\n\x07~~")), "hccn": ran("")})
    else:
        ill = node("n2", None, fault)
    one = world(node("n1"), ill)
    finding = the(one, code)
    assert (finding.severity.value, finding.hosts) == (severity, ("n2",))
    assert values.items() <= dict(finding.values).items() and evidence in "\n".join(map(str, finding.evidence))
    for lang in LANGUAGES:
        line = finding_line(finding).render(lang)
        assert line and "{" not in line and "?" not in line
    assert all(found.hosts == ("n2",) for found in run_checks(one)), "the sound node is left in peace"


def test_what_a_planned_job_does_not_take_does_not_stop_it():
    for fault, code in (
        (("health_alarm", 7), "npu-health-alarm"),
        (("link_down", 7), "device-link-down"),
        (("ecc_double", 7), "ecc-double"),
        (("hbm_short", 7), "hbm-short"),
        (("dropped", 7), "npu-missing"),
        (("tls_on", 7), "device-tls-differs"),
    ):
        nodes = [node("n1", **RESERVED), node("n2", None, fault, **RESERVED)]
        assert the(world(*nodes, per_node=4), code).severity is Severity.WARN, code
        assert the(world(*nodes, per_node=8), code).severity is Severity.FAIL, code


@pytest.mark.parametrize("devices, severity", [(8, Severity.FAIL), (4, Severity.WARN)])
def test_memory_beyond_that_of_earlier_starts_keeps_its_device_from_the_next_job(devices, severity):
    idle = unowned_memory(node("n1").npu, is_idle=True)
    assert set(idle) == set(range(8)) and unowned_memory(node("n1", None, ("ghost_process", 6)).npu).keys() == set(idle)
    ill = world(node("n1", None, ("hbm_held", 5), **RESERVED), per_node=devices)
    assert the(ill, "hbm-owner-unknown").severity is Severity.WARN, "no earlier start is known"
    ill = replace(ill, idle_memory={"n1": idle})
    found = the(ill, "hbm-not-released")
    assert (found.severity, found.values["npus"]) == (severity, (5,)) and found.values["memory_mb"] > 1000
    assert "hbm-owner-unknown" not in codes(ill)
    well = replace(world(node("n1", **RESERVED), per_node=8), idle_memory={"n1": idle})
    assert "hbm-not-released" not in codes(well)


def test_one_node_alone_trains_without_its_ports():
    alone = world(node("n1", None, ("link_down", 0), ("ip_missing", 1)))
    assert the(alone, "device-link-down").severity is Severity.NOTE
    assert "device-ip-missing" not in codes(alone)
    examined = replace(alone, has_peers=True)
    assert the(examined, "device-link-down").severity is Severity.FAIL, "jobs may use it with others"


def test_more_cards_than_the_others_is_worth_a_note_and_fewer_a_failure():
    one = world(node("n1", Scenario(cards=4)), node("n2", Scenario(cards=4)), node("n3", Scenario(cards=8)))
    assert the(one, "npu-more").hosts == ("n3",) and "npu-missing" not in codes(one)
    finding = the(world(node("n1"), node("n2"), node("n3", Scenario(cards=7))), "npu-missing")
    assert finding.hosts == ("n3",) and finding.values["expected"] == 8


def test_a_job_that_wants_more_devices_than_there_are_is_told_so():
    finding = the(world(node("n1", Scenario(cards=4), **RESERVED), per_node=8), "npu-too-few")
    assert finding.severity is Severity.FAIL and finding.values["ids"] == (4, 5, 6, 7)


@pytest.mark.parametrize(
    "counts, code, severity",
    [
        ({"double_bit_pages": 64}, "ecc-pages-retired", Severity.FAIL),
        ({"single_bit_pages": 16}, "ecc-pages-retired", Severity.WARN),
        ({"double_bit_total": 3}, "ecc-past", Severity.WARN),
        ({"single_bit_pages": 1}, "ecc-past", Severity.NOTE),
    ],
)
def test_worn_memory_is_judged_by_the_pages_out_of_use(counts, code, severity):
    from ascendrun.ascend.npu_smi_views import ChipEcc, EccCounts

    clean = EccCounts(0, 0, 0, 0, 0, 0)
    whole = node("n1")
    cards = replace(whole.npu.cards, ecc={3: (ChipEcc(0, clean, replace(clean, **counts)),)})
    finding = the(world(replace(whole, npu=replace(whole.npu, cards=cards))), code)
    assert finding.severity is severity and finding.values["npus"] == (3,)


def test_a_code_of_a_device_that_calls_itself_well_is_told_by_its_class():
    from ascendrun.ascend.npu_smi_views import ChipHealth

    whole = node("n1")

    def with_code(code):
        cards = replace(whole.npu.cards, health={2: (ChipHealth(0, "OK", (code,), ()),)})
        return the(world(replace(whole, npu=replace(whole.npu, cards=cards))), "npu-fault-code")

    assert with_code("8C03A000").severity is Severity.FAIL, "the device must be reset"
    assert with_code("80E18400").severity is Severity.NOTE
    assert with_code("12345678").severity is Severity.WARN, "unknown is not harmless"


# --- processes ---


GHOST = ("ghost_process", 6, "4242")


def test_a_process_of_somebody_is_named_with_user_and_command_and_stops_a_job_that_wants_the_device():
    busy = node("n1", None, GHOST, owners={4242: ("alice", "python train.py", None)}, **RESERVED)
    plain = the(world(busy), "npu-busy")
    assert plain.severity is Severity.WARN
    assert (plain.values["user"], plain.values["command"], plain.values["npus"]) == ("alice", "python train.py", (6,))
    assert the(world(busy, per_node=8), "npu-busy").severity is Severity.FAIL
    assert the(world(busy, per_node=4), "npu-busy").severity is Severity.NOTE


def test_a_process_of_another_ascendrun_run_is_told_as_such():
    busy = node("n1", None, GHOST, owners={4242: ("bob", "python x.py", "head-j-7.2")}, **RESERVED)
    assert (the(world(busy), "npu-busy-run").severity, the(world(busy), "npu-busy-run").values["run"]) == (
        Severity.NOTE,
        "head-j-7",
    )
    assert the(world(busy, per_node=8), "npu-busy-run").severity is Severity.FAIL


# --- tools ---


def test_a_tool_that_hangs_is_named_and_what_it_said_before_still_counts():
    late = {"error": "no answer in time", "late": True}
    silent = node("n2", raw={"npu-smi": late, "hccn": late}, late=("hccn", "npu-smi"))
    one = world(node("n1"), silent)
    assert the(one, "npu-smi-hangs").hosts == the(one, "hccn-hangs").hosts == ("n2",)
    killed = ran(
        section("link 0", "link status: DOWN\n") + section("link 1", "Killed\n", 137) + "@@ link 2\n",
        code=None,
        timed_out=True,
    )
    one = world(node("n1"), node("n2", raw={"hccn": killed}))
    assert the(one, "hccn-hangs").evidence == ("link of device 1", "link of device 2")
    assert the(one, "device-link-down").values["devices"] == (0,)


def test_a_node_without_npus_is_no_matter_until_a_job_wants_some():
    bare = {
        "npu-smi": ran(section("none", "")),
        "npu-devices": {"stats": {"/dev/davinci0": {"missing": True}}},
        "npu-cards": ran(""),
        "hccn": ran(""),
        "ascend-files": ran(""),
        "cann": ran(""),
    }
    assert run_checks(world(node("n1", raw=bare), family=None)) == ()
    assert findings(world(node("n1", raw=bare))) == {("npu-none", "FAIL", ("n1",))}
    one = world(node("n1"), node("n2", raw=bare), family=None)
    assert run_checks(one) == ()


def test_devices_without_their_tool_are_an_incomplete_node():
    finding = the(world(node("n1", raw={"npu-smi": ran(section("none", ""))})), "npu-smi-missing")
    assert finding.values["devices"] == tuple(range(8))


@pytest.mark.parametrize(
    "text, otherwise",
    [
        ("dcmi module initialize failed. ret is -8006", "dmesg"),
        ("npu-smi: error while loading shared libraries: libdcmi.so: cannot open shared object", "driver/lib64"),
        ("Get npu info failed.", "npu-smi info"),
    ],
)
def test_whatever_else_npu_smi_complains_of_is_told_with_its_own_words(text, otherwise):
    finding = the(world(node("n1", raw={"npu-smi": ran(section("info", text + "\n", 1))})), "npu-smi-error")
    assert finding.severity is Severity.FAIL and text in finding.evidence
    assert otherwise in f"{finding.values['hint']} {finding.values['problem']}"


def test_device_files_that_are_closed_or_not_there_are_told():
    whole = node("n1")
    shut = {name: DeviceNode(is_open=False, mode=0o660) for name in whole.npu.devices}
    finding = the(world(replace(whole, npu=replace(whole.npu, devices=shut))), "device-file-closed")
    assert finding.severity is Severity.FAIL and finding.fix == "usermod -aG HwHiAiUser me"
    lone = {name: one for name, one in whole.npu.devices.items() if name != "hisi_hdc"}
    finding = the(world(replace(whole, npu=replace(whole.npu, devices=lone))), "device-file-missing")
    assert finding.values["files"] == ("hisi_hdc",)


def test_heat_clock_and_mtu_are_compared_with_the_other_npus_and_busy_ones_are_left_out():
    faults = [("throttled", 0, None), ("rated_clock", 1, "1500"), ("mtu", 2, "4200")]
    sick = world(node("n1"), node("n2", None, *faults), per_node=8)
    for code, name, value in (
        ("npu-hot", "npus", (0,)),
        ("npu-throttled", "npus", (0,)),
        ("npu-clock-differs", "npus", (1,)),
        ("device-mtu-differs", "devices", (2,)),
    ):
        finding = the(sick, code)
        assert (finding.severity, finding.hosts, finding.values[name]) == (Severity.WARN, ("n2",), value)
    assert "npu-hot" in codes(world(node("n1"), node("n2", None, *faults)), is_full=False)
    busy = Scenario(processes=tuple(ShownProcess(device, 50 + device, "python", 9000, 90) for device in range(8)))
    assert not {"npu-hot", "npu-throttled"} & codes(world(node("n1", busy), node("n2", busy, ("hot", 3, "88"))))
    room = [(f"n{number}", None, *(("hot", card, "81") for card in range(8))) for number in (1, 2)]
    assert len(the(world(*(node(*one) for one in room)), "npu-hot").hosts) == 2


def test_what_a_start_stores_of_a_host_is_json_without_secrets():
    owners = {39999: ("eva", "python old.py", None)}
    environ = {"HCCL_IF_IP": "10.0.0.1", "API_TOKEN": "x", "PATH": "/bin"}
    sick = node("n1", None, ("ghost_process", 3, None), owners=owners, environ=environ, mtus={"eth0": 1500})
    stored = json.loads(json.dumps(recorded_facts(sick)))
    assert stored["processes"] == [[39999, 3, "eva", "python old.py"]]
    assert (stored["environ"], stored["mtu"]) == ({"HCCL_IF_IP": "10.0.0.1", "PATH": "/bin"}, {"eth0": 1500})
    assert (stored["driver"], stored["packages"]["torch"]) == ("24.1.rc2", "2.4.0")
    assert stored["temperature_c"]["3"] > 30 and stored["clocks_mhz"]["3"] == [[800, 1800]]
    assert recorded_facts(NodeFacts("n2")) == {}


def test_a_driver_that_is_half_installed_is_told():
    assert the(world(node("n1", Scenario(is_complete=False))), "driver-incomplete").severity is Severity.WARN


def test_every_code_of_the_npu_checks_is_planted_in_a_test():
    health = Path(__file__).parents[1]
    files = ("checks/test_npu.py", "checks/test_software.py", "survey/test_pair_tests.py", "survey/test_probes.py")
    source = "".join((health / name).read_text() for name in files)
    unplanted = {code for check in NPU_CHECKS for code in check.codes if f'"{code}"' not in source}
    assert unplanted == set()
