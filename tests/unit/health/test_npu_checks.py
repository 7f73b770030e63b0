"""Checks of NPUs over small worlds: the texts come from simulated tools, the findings must name what was planted."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascendrun.core.findings import Severity
from ascendrun.health.checks import NPU_CHECKS, run_checks
from ascendrun.health.facts import NodeFacts, PythonFacts, TorchFacts
from ascendrun.health.npu_facts import DeviceNode, NpuFacts, chip_of_node, read_npu
from ascendrun.health.npu_probes import NPU_PROBES
from ascendrun.health.pings import ping_items, plan_pings
from ascendrun.health.probes import read_answers, survey_items
from ascendrun.health.report import fact_rows
from ascendrun.health.sections import read_sections
from ascendrun.health.texts import LANGUAGES, placeholders, render, texts
from ascendrun.health.wish import Wish
from ascendrun.health.world import World
from ascendrun.sim.ascend.scenario import Scenario
from ascendrun.sim.ascend.tool.families import FAMILIES

sys.path.insert(0, str(Path(__file__).parent))
from npu_worlds import (
    ENVIRON,
    HOME,
    PYTHON,
    files_text,
    findings,
    node,
    ran,
    raw_answers,
    scene_of,
    section,
    the,
    world,
)

LAYOUTS = [(name, layout) for name, family in FAMILIES.items() for layout in family.layouts]
RESERVED = {"port_ranges": ((32768, 60999), ((60000, 60031),))}


def codes(one, **more):
    return {finding.code for finding in run_checks(one, **more)}


@pytest.mark.parametrize(("chip", "layout"), LAYOUTS)
def test_clean_nodes_of_every_chip_in_every_layout_have_no_finding(chip, layout):
    scenario = Scenario(chip=chip, layout=layout, cards=8)
    assert run_checks(world(node("n1", scenario), node("n2", scenario))) == ()
    assert run_checks(world(node("n1", scenario), family=None)) == ()


@pytest.mark.parametrize("family", ["cpu", "cuda"])
def test_npus_matter_to_npu_jobs_only(family):
    assert run_checks(world(node("n1", None, ("health_alarm", 0)), node("n2"), family=family)) == ()


# A fault of n2 and what must be said of it: fault of the simulator, code, severity, a value, words of the evidence.
FAULTS = [
    (("dropped", 3), "npu-missing", "FAIL", {"found": "7", "wanted": "8"}, "lists NPU 0-2,4-7"),
    (("health_warning", 2), "npu-health-warning", "WARN", {"npus": "2"}, "80E18402"),
    (("health_alarm", 2), "npu-health-alarm", "FAIL", {"npus": "2"}, "RestartNPU"),
    (("health_critical", 2), "npu-health-critical", "FAIL", {"npus": "2"}, "80E01801"),
    (("health_unknown", 2), "npu-health-unknown", "FAIL", {"npus": "2"}, "UNKNOWN"),
    (("ecc_single", 1), "ecc-single", "NOTE", {"npus": "1"}, "single bit"),
    (("ecc_double", 1), "ecc-double", "FAIL", {"npus": "1"}, "double bit"),
    (("hbm_short", 5), "hbm-short", "FAIL", {"npus": "5"}, "of 65536 MB"),
    (("hbm_held", 5), "hbm-held", "WARN", {"npus": "5"}, "of 65536 MB in use"),
    (("ghost_process", 6, "4242"), "npu-ghost", "WARN", {"npus": "6", "pid": "4242"}, "no such process"),
    (("link_down", 4), "device-link-down", "FAIL", {"devices": "4"}, "DOWN"),
    (("ip_missing", 4), "device-ip-missing", "FAIL", {"devices": "4"}, "address_4=29.1.3.14"),
    (("ip_v6", 4), "device-ip-family", "FAIL", {"value": "IPv6", "majority": "IPv4"}, "1 of 16"),
    (("hccn_conf_stale", 4), "hccn-conf-stale", "WARN", {"devices": "4"}, "29.1.3.14"),
    (("tls_on", 7), "device-tls-differs", "FAIL", {"devices": "7", "switch": "0"}, "1 of 16 ports: on"),
    (("net_health", 0, "Unreachable"), "device-net-health", "WARN", {"status": "Unreachable"}, ""),
    (("fec_none", 0), "device-fec-off", "WARN", {"list": "0"}, ""),
    (("optical_absent", 0), "device-optical", "WARN", {"devices": "0"}, "no module"),
    (("optical_dark", 0), "device-optical", "WARN", {"devices": "0"}, "0.0054 mW"),
    (("driver_missing", None), "npu-driver-away", "FAIL", {}, "-8005"),
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
    assert values.items() <= dict(finding.values).items() and evidence in "\n".join(finding.evidence)
    for lang in LANGUAGES:
        words = render(finding, lang)
        assert words.says and "{" not in words.says + words.advice and "?" not in words.says
    assert all(found.hosts == ("n2",) for found in run_checks(one)), "the sound node is left in peace"


def test_what_a_planned_job_does_not_take_does_not_stop_it():
    for fault, code in ((("health_alarm", 7), "npu-health-alarm"), (("link_down", 7), "device-link-down"),
                        (("ecc_double", 7), "ecc-double"), (("hbm_short", 7), "hbm-short"),
                        (("dropped", 7), "npu-missing"), (("tls_on", 7), "device-tls-differs")):
        nodes = [node("n1", **RESERVED), node("n2", None, fault, **RESERVED)]
        assert the(world(*nodes, per_node=4), code).severity is Severity.WARN, code
        assert the(world(*nodes, per_node=8), code).severity is Severity.FAIL, code


def test_one_node_alone_trains_without_its_ports():
    alone = world(node("n1", None, ("link_down", 0), ("ip_missing", 1)))
    assert the(alone, "device-link-down").severity is Severity.NOTE
    assert "device-ip-missing" not in codes(alone)


def test_more_cards_than_the_others_is_worth_a_note_and_fewer_a_failure():
    one = world(node("n1", Scenario(cards=4)), node("n2", Scenario(cards=4)), node("n3", Scenario(cards=8)))
    assert the(one, "npu-more").hosts == ("n3",) and "npu-missing" not in codes(one)
    finding = the(world(node("n1"), node("n2"), node("n3", Scenario(cards=7))), "npu-missing")
    assert finding.hosts == ("n3",) and finding.values["wanted"] == "8"


def test_a_job_that_wants_more_devices_than_there_are_is_told_so():
    finding = the(world(node("n1", Scenario(cards=4), **RESERVED), per_node=8), "npu-too-few")
    assert finding.severity is Severity.FAIL and finding.values["ids"] == "4-7"


# --- processes ---

ROWS = {"ghost": ("ghost_process", 6, "4242")}


def test_a_process_of_somebody_is_named_with_user_and_command_and_stops_a_job_that_wants_the_device():
    busy = node("n1", None, ROWS["ghost"], owners={4242: ("alice", "python train.py", None)}, **RESERVED)
    plain = the(world(busy), "npu-busy")
    assert plain.severity is Severity.WARN
    assert (plain.values["user"], plain.values["command"], plain.values["npus"]) == ("alice", "python train.py", "6")
    assert the(world(busy, per_node=8), "npu-busy").severity is Severity.FAIL
    assert the(world(busy, per_node=4), "npu-busy").severity is Severity.NOTE


def test_a_process_of_another_ascendrun_run_is_told_as_such():
    busy = node("n1", None, ROWS["ghost"], owners={4242: ("bob", "python x.py", "head-j-7.2")}, **RESERVED)
    assert (the(world(busy), "npu-busy-run").severity, the(world(busy), "npu-busy-run").values["run"]) == \
        (Severity.NOTE, "head-j-7")
    assert the(world(busy, per_node=8), "npu-busy-run").severity is Severity.FAIL


# --- tools ---


def test_a_tool_that_hangs_is_named_and_what_it_said_before_still_counts():
    late = {"error": "no answer in time", "late": True}
    silent = node("n2", raw={"npu-smi": late, "hccn": late}, late=("hccn", "npu-smi"))
    one = world(node("n1"), silent)
    assert the(one, "npu-smi-hangs").hosts == the(one, "hccn-hangs").hosts == ("n2",)
    killed = ran(section("link 0", "link status: DOWN\n") + section("link 1", "Killed\n", 137) + "@@ link 2\n",
                 code=None, timed_out=True)
    one = world(node("n1"), node("n2", raw={"hccn": killed}))
    assert the(one, "hccn-hangs").evidence == ("link of device 1", "link of device 2")
    assert the(one, "device-link-down").values["devices"] == "0"


def test_a_node_without_npus_is_no_matter_until_a_job_wants_some():
    bare = {"npu-smi": ran(section("none", "")), "npu-devices": {"stats": {"/dev/davinci0": {"missing": True}}},
            "npu-cards": ran(""), "hccn": ran(""), "ascend-files": ran(""), "cann": ran("")}
    assert run_checks(world(node("n1", raw=bare), family=None)) == ()
    assert findings(world(node("n1", raw=bare))) == {("npu-none", "FAIL", ("n1",))}
    one = world(node("n1"), node("n2", raw=bare), family=None)
    assert run_checks(one) == ()


def test_devices_without_their_tool_are_an_incomplete_node():
    finding = the(world(node("n1", raw={"npu-smi": ran(section("none", ""))})), "npu-smi-missing")
    assert finding.values["devices"] == "0-7"


@pytest.mark.parametrize("text, way_out", [
    ("dcmi module initialize failed. ret is -8006", "dmesg"), ("npu-smi: error while loading shared libraries: "
                                                               "libdcmi.so: cannot open shared object", "LD_LIBRARY"),
    ("Get npu info failed.", "npu-smi info"),
])
def test_whatever_else_npu_smi_complains_of_is_told_with_its_own_words(text, way_out):
    finding = the(world(node("n1", raw={"npu-smi": ran(section("info", text + "\n", 1))})), "npu-smi-error")
    assert finding.severity is Severity.FAIL and text in finding.evidence
    assert way_out in finding.values["hint"] + finding.values["says"]


def test_device_files_that_are_closed_or_not_there_are_told():
    whole = node("n1")
    shut = {name: DeviceNode(is_open=False, mode=0o660) for name in whole.npu.devices}
    finding = the(world(replace(whole, npu=replace(whole.npu, devices=shut))), "device-file-closed")
    assert finding.severity is Severity.FAIL and "usermod -aG HwHiAiUser me" in render(finding).advice
    lone = {name: one for name, one in whole.npu.devices.items() if name != "hisi_hdc"}
    finding = the(world(replace(whole, npu=replace(whole.npu, devices=lone))), "device-file-missing")
    assert finding.values["files"] == "/dev/hisi_hdc"


def test_a_driver_that_is_half_installed_is_told():
    assert the(world(node("n1", Scenario(is_complete=False))), "driver-incomplete").severity is Severity.WARN


# --- versions and set-up ---


def test_versions_that_differ_between_nodes_are_told_with_both():
    new = Scenario(driver="25.0.rc1.1", firmware="7.5.0.1.129", cann="8.1.RC1")
    one = world(node("n1"), node("n2"), node("n3", new))
    for code, value, majority in (("driver-differs", "25.0.rc1.1", "24.1.rc2"), ("cann-differs", "8.1.RC1", "8.0.RC3"),
                                  ("firmware-differs", "7.5.0.1.129", "7.3.0.1.231")):
        finding = the(one, code)
        assert finding.hosts == ("n3",) and (finding.values["value"], finding.values["majority"]) == (value, majority)
    assert the(one, "cann-differs").severity is Severity.WARN
    job = world(node("n1", **RESERVED), node("n2", new, **RESERVED), per_node=8)
    assert the(job, "cann-differs").severity is Severity.FAIL


@pytest.mark.parametrize("modules, version, code, severity", [
    ({"torch": "2.6.0", "torch-npu": "2.4.0"}, "3.10.13", "torch-npu-torch", Severity.FAIL),
    ({"torch": "2.4.0+cu121", "torch-npu": "2.4.0"}, "3.10.13", "torch-build", Severity.FAIL),
    ({"torch": "2.9.0", "torch-npu": "2.9.0"}, "3.10.13", "torch-npu-cann", Severity.WARN),
    ({"torch": "2.4.0", "torch-npu": "2.4.0"}, "3.13.0", "torch-npu-python", Severity.WARN),
    ({"torch": "2.4.0", "torch-npu": "2.4.0.dev20240101"}, "3.10.13", "versions-unproven", Severity.NOTE),
])
def test_versions_that_were_not_made_for_each_other_are_told(modules, version, code, severity):
    finding = the(world(node("n1", python=replace(PYTHON, modules=modules, version=version))), code)
    assert finding.severity is severity and finding.values["says"]


def test_a_link_that_comes_and_goes_is_told_and_one_that_was_moved_once_is_not():
    def history(*downs):
        lines = "".join(f"    Thu Nov 19 {hour:02d}:00:00 2026    LINK {word}\n"
                        for hour in sorted(downs, reverse=True) for word in ("UP", "DOWN"))
        text = "".join(f"[devid 3]{line}\n" for line in (
            "current time        : Thu Nov 19 23:00:00 2026", f"link up count       : {len(downs)}",
            "link change records :", *lines.splitlines()))
        return world(node("n1"), node("n2", raw={"hccn": ran(section("link_stat 3", text))}))
    finding = the(history(1, 7, 20), "device-link-flaps")
    assert finding.severity is Severity.WARN and finding.evidence == ("device 3: down 3 times within a day",)
    assert "device-link-flaps" not in codes(history(7))


def test_two_kinds_of_chip_are_told():
    finding = the(world(node("n1"), node("n2"), node("n3", Scenario(chip="910B4"))), "chip-differs")
    assert finding.hosts == ("n3",) and (finding.values["value"], finding.values["majority"]) == ("910B4", "910B3")


def test_driver_and_firmware_of_two_releases_are_told():
    assert the(world(node("n1", Scenario(is_compatible=False))), "driver-firmware").severity is Severity.WARN


def test_a_cann_of_mixed_parts_is_told():
    finding = the(world(node("n1", Scenario(components={"hccl": "8.0.RC2"}))), "cann-mixed")
    assert finding.values["versions"] == "8.0.RC2, 8.0.RC3" and "hccl: 8.0.RC2" in finding.evidence


def test_a_shell_that_leads_to_no_cann_is_told_with_the_file_to_source():
    bare = node("n1", shell=False, **RESERVED)
    finding = the(world(bare, per_node=8), "set-env-missing")
    assert finding.severity is Severity.FAIL
    assert render(finding).advice == "setup: source /usr/local/Ascend/ascend-toolkit/set_env.sh"
    assert "set-env-missing" not in codes(world(bare)), "a plain login need not"
    script = replace(bare, python=None)
    assert the(world(script, per_node=8), "set-env-missing").severity is Severity.NOTE, "a script may source it itself"
    none = node("n1", Scenario(cann=None), shell=False, **RESERVED)
    assert the(world(none, per_node=8), "cann-missing").severity is Severity.FAIL


def test_a_set_up_that_leads_nowhere_or_is_undone_is_told():
    gone = node("n1", raw={"cann": ran(section(f"gone {HOME}", ""))}, **RESERVED)
    assert the(world(gone, per_node=8), "set-env-stale").values["home"] == HOME
    undone = node("n1", environ={**ENVIRON, "LD_LIBRARY_PATH": "/opt/lib"}, **RESERVED)
    assert the(world(undone, per_node=8), "set-env-partial").severity is Severity.WARN


def test_a_torch_without_torch_npu_stops_an_npu_job_only():
    plain = node("n1", python=replace(PYTHON, modules={"torch": "2.4.0+cpu", "torch-npu": None}), **RESERVED)
    finding = the(world(plain, per_node=8), "torch-npu-missing")
    assert finding.severity is Severity.FAIL and finding.values["release"] == "2.4.0"
    assert "torch-npu-missing" not in codes(world(plain))


def test_an_import_of_torch_that_fails_for_want_of_cann_says_so():
    error = "RuntimeError: Failed to load the backend extension: torch_npu.\nImportError: libhccl.so: cannot open"
    ill = node("n1", torch=TorchFacts(step="import torch", error=error), **RESERVED)
    finding = the(world(ill, per_node=8), "torch-needs-cann")
    assert finding.values["step"] == "import torch" and "libhccl.so" in finding.evidence[1]
    other = node("n1", torch=TorchFacts(step="import torch", error="ImportError: libpython3.so"), **RESERVED)
    assert "torch-needs-cann" not in codes(world(other, per_node=8))


# --- what a job asks of the devices ---


def test_devices_that_hccl_does_not_take_together_are_told():
    old = node("n1", Scenario(chip="910A"), **RESERVED)
    assert the(world(old, per_node=3), "device-set").severity is Severity.FAIL
    assert "one ring" in the(world(old, per_node="ids: [3, 4]"), "device-set").values["says"]
    assert "device-set" not in codes(world(old, per_node=4))
    dies = node("n1", Scenario(chip="910_93", cards=8), **RESERVED)
    assert the(world(dies, per_node="ids: [1, 2]"), "device-set").severity is Severity.WARN
    assert "device-set" not in codes(world(node("n1", **RESERVED), per_node=3))


@pytest.mark.parametrize("command, asks", [
    ("[python3, train.py, --bf16]", "--bf16"), ("[python3, t.py, --dtype, bfloat16]", "--dtype bfloat16"),
    ("[python3, t.py, --precision=bf16]", "--precision=bf16"), ("[python3, t.py, --bf16, 'true', --x]", "--bf16 true"),
    ("[python3, t.py, --bf16=False]", None), ("[python3, t.py, --bf16, 'false']", None),
    ("[python3, t.py, --fp16]", None), ("[python3, bf16.py]", None),
])
def test_bf16_on_a_chip_without_it_is_told_where_the_job_asks_for_it(command, asks):
    from ascendrun.core.spec import parse_job
    spec = parse_job(f"name: j\ncommand: {command}\ndevices: {{family: npu}}\n", "job.yaml", programs={})
    old, new = (World(facts={"n1": node("n1", Scenario(chip=chip), **RESERVED)}, family="npu", job=spec)
                for chip in ("910A", "910B3"))
    assert "bf16-unsupported" not in codes(new)
    if asks is None:
        assert "bf16-unsupported" not in codes(old)
    else:
        assert the(old, "bf16-unsupported").values == {"chip": "910A", "word": asks}


def test_a_set_up_that_hides_devices_of_the_job_is_told():
    def with_visible(value, **more):
        return world(node("n1", environ={**ENVIRON, "ASCEND_RT_VISIBLE_DEVICES": value}, **RESERVED), **more)
    fewer = the(with_visible("0,1,2", per_node=8), "visible-fewer")
    assert (fewer.values["found"], fewer.values["wanted"]) == ("3", "8")
    assert the(with_visible("0, 1,2", per_node=2), "visible-fewer").values["found"] == "1", "cut at the blank"
    assert the(with_visible("6,7,8"), "visible-beyond").values["ids"] == "8"
    assert not {"visible-fewer", "visible-beyond"} & codes(with_visible("0,1,2,3", per_node=4))


# --- pings ---


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
    results = {"n1": raw_answers(Scenario(number=1)), "n2": raw_answers(Scenario(number=2)),
               "n3": {"hccn": {"error": "no answer in time", "late": True}}, "n4": {},
               "n5": {"hccn": ran("\x00@@ @@\n")}}
    results["n2"]["hccn"]["out"] = results["n2"]["hccn"]["out"].replace("link status: UP", "link status: DOWN", 1)
    items = ping_items(results, every_pair=False)
    assert set(items) == {"n1", "n2"}
    words = items["n1"]["argv"][4:]
    assert words[:2] == ["1", "29.1.3.11"] and len(words) == 14, "device 0 of n2 is down"


def test_a_port_that_gets_no_answer_is_told_with_the_pair():
    silent = node("n2", None, ("unreachable", 3), pings=[(2, "29.1.2.12"), (3, "29.1.2.13")])
    finding = the(world(node("n1", pings=[(3, "29.1.3.13")]), silent), "device-unreachable")
    assert (finding.hosts, finding.values["devices"]) == (("n2",), "3")
    assert finding.evidence == ("device 3 -> 29.1.2.13 (n1 device 3): 3 sent, 0 received",)
    lossy = ran(section("ping 0 29.1.2.10", "device 0 PING 29.1.2.10\n3 packets transmitted, 1 received, 66.67% packet "
                                            "loss\n"))
    assert the(world(node("n1"), node("n2", raw={"hccn-pings": lossy})), "device-ping-loss").hosts == ("n2",)


def test_one_address_on_two_ports_is_told():
    twice = Scenario(cards=2, addresses=("29.1.9.1", "29.1.9.2"))
    finding = the(world(node("n1", twice), node("n2", replace(twice, addresses=("29.1.9.2", "29.1.9.3")))),
                  "device-ip-twice")
    assert finding.hosts == ("n1", "n2") and finding.values["address"] == "29.1.9.2"


# --- the table, the probes, and nonsense ---


def test_the_table_of_facts_has_the_devices_and_their_software():
    rows = {row.name: row.groups[0].value for row in fact_rows(world(node("n1")), rows_of_all())}
    assert (rows["npus"], rows["driver"], rows["firmware"], rows["cann"]) == \
        ("8 x 910B3", "24.1.rc2", "7.3.0.1.231", "8.0.RC3")


def rows_of_all():
    from ascendrun.health.npu_facts import NPU_ROWS
    return NPU_ROWS


def test_npu_questions_are_asked_of_npu_nodes_and_where_nobody_knows():
    names = {probe.name for probe in NPU_PROBES} - {"hccn-pings"}

    def asked(**wish):
        return {item["name"] for item in survey_items(Wish("n", **wish))} & names
    assert asked(family="npu") == asked(family=None) == names
    assert asked(family="cpu") == asked(family="cuda") == set()
    light = {item["name"]: item for item in survey_items(Wish("n", family="npu", is_full=False))}
    assert "npu-cards" not in light and "net_health" not in light["hccn"]["argv"]


def test_sections_come_apart_whatever_stands_in_them():
    text = "noise\n" + section("a 1", "x\n") + section("b", "no end of line") + section("c", "", 7) + "@@ d 2\nhalf"
    read = [(one.words, one.text, one.code) for one in read_sections(text)]
    assert read == [(("a", "1"), "x\n", 0), (("b",), "no end of line", 0), (("c",), "", 7), (("d", "2"), "half", None)]


def test_a_number_that_was_cut_is_not_taken_for_a_whole_one():
    whole = raw_answers(Scenario())["npu-smi"]["out"]
    cut = whole[:whole.index("3380")] + "3"
    facts = read_npu(read_answers({"npu-smi": ran(cut, code=None, timed_out=True)}))
    assert facts.table.hung and all(chip.hbm_used_mb != 3 for chip in facts.table.info.chips)


RAW = raw_answers(Scenario(cards=2), owners={1: ("u", "c", "t.1")}, pings=[(0, "29.1.1.10")])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_mangled_answers_never_make_a_check_fall_over_and_every_finding_has_words(data):
    answers = {}
    for name, raw in RAW.items():
        mangled = dict(raw)
        text = mangled.get("out", "")
        if text and data.draw(st.booleans()):
            low = data.draw(st.integers(0, len(text) - 1))
            high = data.draw(st.integers(low, min(len(text), low + 60)))
            mangled["out"] = text[:low] + data.draw(st.text(max_size=8)) + text[high:]
        if data.draw(st.integers(0, 5)):
            answers[name] = mangled
    ill = NodeFacts("n2", npu=read_npu(read_answers(answers)), python=PYTHON, environ=ENVIRON, arch="aarch64")
    known = {code for check in NPU_CHECKS for code in check.codes}
    for finding in run_checks(world(SOUND, ill, family=data.draw(st.sampled_from(["npu", None])))):
        if finding.code in known:
            for lang in LANGUAGES:
                row = texts(lang)[finding.code]
                assert placeholders(row["says"] + row["advice"]) <= set(finding.values), finding
                assert all(isinstance(value, str) for value in finding.values.values())


SOUND = node("n1", Scenario(cards=2))


def test_nothing_known_finds_nothing():
    for family in ("npu", None, "cpu"):
        assert run_checks(World(facts={"n1": NodeFacts("n1")}, family=family)) == ()
    assert chip_of_node(NpuFacts()) is None


def test_every_code_of_the_npu_checks_is_planted_here():
    source = Path(__file__).read_text()
    unplanted = {code for check in NPU_CHECKS for code in check.codes if f'"{code}"' not in source}
    assert unplanted == set()


def test_the_files_of_the_node_are_read_whatever_layout_cann_has():
    for version in ("8.0.RC3", "8.5.0", "9.0.0"):
        scenario = Scenario(cann=version)
        text = files_text(scenario, scene_of(scenario))
        facts = read_npu(read_answers({"ascend-files": ran(text)}))
        assert facts.cann.version == version and facts.driver_version == "24.1.rc2"


@pytest.mark.parametrize("counts, code, severity", [
    ({"double_bit_pages": 64}, "ecc-worn", Severity.FAIL), ({"single_bit_pages": 16}, "ecc-worn", Severity.WARN),
    ({"double_bit_total": 3}, "ecc-past", Severity.WARN), ({"single_bit_pages": 1}, "ecc-past", Severity.NOTE),
])
def test_worn_memory_is_judged_by_the_pages_out_of_use(counts, code, severity):
    from ascendrun.ascend.npu_smi_views import ChipEcc, EccCounts
    clean = EccCounts(0, 0, 0, 0, 0, 0)
    whole = node("n1")
    cards = replace(whole.npu.cards, ecc={3: (ChipEcc(0, clean, replace(clean, **counts)),)})
    finding = the(world(replace(whole, npu=replace(whole.npu, cards=cards))), code)
    assert finding.severity is severity and finding.values["npus"] == "3"


def test_a_code_of_a_device_that_calls_itself_well_is_told_by_its_class():
    from ascendrun.ascend.npu_smi_views import ChipHealth
    whole = node("n1")

    def with_code(code):
        cards = replace(whole.npu.cards, health={2: (ChipHealth(0, "OK", (code,), ()),)})
        return the(world(replace(whole, npu=replace(whole.npu, cards=cards))), "npu-fault-code")
    assert with_code("8C03A000").severity is Severity.FAIL, "the device must be reset"
    assert with_code("80E18400").severity is Severity.NOTE
    assert with_code("12345678").severity is Severity.WARN, "unknown is not harmless"


def test_a_setup_that_failed_says_nothing_of_cann():
    ill = node("n1", raw={"cann": {**ran(""), "code": 1, "setup": "failed"}}, python=PythonFacts(setup="failed"),
               **RESERVED)
    assert not {"set-env-missing", "cann-missing"} & codes(world(ill, per_node=8))
