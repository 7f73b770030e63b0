"""doctor over two simulated Ascend nodes: a sound pair has nothing to fix, each planted fault is named where it is."""

import json
import time

import pytest

from ascendrun.head.state.state_dir import read_host_facts
from ascendrun.sim.ascend import tree
from ascendrun.sim.ascend.scenario import Scenario
from tests.lib.vcluster.npus import install_on

CARDS = 4
DEADLINE_S = 150.0
SETUP = "source /usr/local/Ascend/ascend-toolkit/set_env.sh"


@pytest.fixture
def nodes(cluster):
    """node1 and node2, four cards each, as they left the factory."""
    for number, name in enumerate(("node1", "node2"), start=1):
        install_on(cluster, name, Scenario(cards=CARDS, number=number))
        set_mtu(cluster, name, 1500)
    return cluster


def set_mtu(cluster, name, size):
    cluster.host_run(name, ["ip", "link", "set", "dev", "eth0", "mtu", str(size)], check=True)


@pytest.fixture
def doctor(ascendrun, nodes):
    """doctor(*words): its report, by code the findings, and its exit code."""
    hostfile = ascendrun.folder / "npu.hosts"
    hostfile.write_text(nodes.hostfile(slots=CARDS))

    def run(*words, target=("-H", hostfile, "--device-type", "npu")):
        began = time.monotonic()
        done = ascendrun("doctor", *target, "-o", "json", "--lang", "en", *words, timeout=DEADLINE_S)
        assert done.stdout, done.stderr
        report = json.loads(done.stdout)
        by_code = {}
        for finding in report["findings"]:
            by_code.setdefault(finding["code"], []).append(finding)
        return Examined(by_code, done.returncode, time.monotonic() - began, report)

    return run


class Examined:
    def __init__(self, by_code, code, wall_s, report):
        self.by_code, self.code, self.wall_s, self.report = by_code, code, wall_s, report

    def failed(self):
        return {code for code, findings in self.by_code.items() if any(one["severity"] == "FAIL" for one in findings)}

    def the(self, code):
        assert code in self.by_code, f"{code} is not among {json.dumps(self.by_code, indent=1)}"
        (one,) = self.by_code[code]
        return one


def plant(cluster, name, card, fault, **more):
    tree.set_fault(cluster.path(name, "/"), card, fault, **more)


def test_a_sound_pair_is_fit_alone_and_for_a_job(nodes, doctor, ascendrun):
    plain = doctor()
    assert plain.code == 0 and not plain.failed(), plain.by_code
    facts = {row["name"]: [group["value"] for group in row["groups"]] for row in plain.report["facts"]}
    assert facts["npus"] == ["4 x 910B3"] and facts["driver"] == ["24.1.rc2"] and facts["cann"] == ["8.0.RC3"]
    job = ascendrun.folder / "npu.yaml"
    job.write_text(
        f"name: npu\ncommand: [python3, -c, pass]\nhostfile: npu.hosts\nsetup: {SETUP}\n"
        f"devices: {{type: npu, per_node: {CARDS}}}\n"
    )
    quick = doctor("--quick", target=(job,))
    assert quick.code == 0 and not quick.failed(), quick.by_code
    # without the set-up an ssh command's shell leads to no CANN, and the message says which file to source
    job.write_text(job.read_text().replace(f"setup: {SETUP}\n", ""))
    missing = doctor("--quick", target=(job,)).the("set-env-missing")
    assert missing["hosts"] == ["node1", "node2"] and SETUP in missing["hint"]


def test_every_fault_of_a_card_is_named_with_its_node_its_card_and_evidence(nodes, doctor):
    used = {"ASCENDRUN_SIM_NPU": "2", "PATH": "/usr/bin:/bin"}
    with nodes.host_popen("node1", ["sleep", "4219"], env=used) as holder:
        try:
            examined = examine_faults(nodes, doctor)
        finally:
            holder.kill()
    busy = examined.the("npu-busy")
    assert (busy["hosts"], busy["values"]["npus"], busy["values"]["user"]) == (["node1"], [2], "root")
    assert busy["values"]["command"] == "sleep 4219" and f"kill {busy['values']['pid']}" in busy["hint"]


def examine_faults(nodes, doctor):
    for card, fault in (
        (0, "health_alarm"),
        (0, "link_down"),
        (1, "ecc_double"),
        (1, "tls_on"),
        (2, "hccn_conf_stale"),
        (2, "ghost_process"),
        (1, "hbm_held"),
        (3, "dropped"),
        (0, "throttled"),
        (1, "rated_clock"),
        (2, "mtu"),
    ):
        plant(nodes, "node2", card, fault)
    set_mtu(nodes, "node2", 1400)
    examined = doctor()
    assert examined.code == 3
    expected = {
        "npu-health-alarm": ("FAIL", "npus", [0], "8C03A000"),
        "device-link-down": ("FAIL", "devices", [0], "link status: DOWN"),
        "ecc-double": ("FAIL", "npus", [1], "double bit"),
        "device-tls-differs": ("FAIL", "devices", [1], "1 of 7 ports: on"),
        "hccn-conf-stale": ("WARN", "devices", [2], "29.1.3.12"),
        "npu-ghost": ("WARN", "pid", 39999, "NPU 2"),
        "hbm-owner-unknown": ("WARN", "npus", [1], "MB in use"),
        "device-mtu-differs": ("WARN", "devices", [2], "1 of 7 ports: 4200"),
        "mtu-differs": ("WARN", "value", 1400, "node1"),
        "npu-hot": ("WARN", "npus", [0], "94 °C"),
        "npu-throttled": ("WARN", "npus", [0], "440 MHz"),
        "npu-clock-differs": ("WARN", "value", 1500, ""),
        "npu-missing": ("FAIL", "found", 3, "npu-smi info lists NPU 0-2"),
    }
    for code, (severity, name, value, evidence) in expected.items():
        finding = examined.the(code)
        assert (finding["severity"], finding["hosts"]) == (severity, ["node2"]), finding
        assert finding["values"][name] == value and evidence in str(finding["evidence"]), finding
    assert examined.the("device-tls-differs")["fix"] == "for i in 1; do hccn_tool -i $i -tls -s enable 0; done"
    return examined


def test_a_driver_that_is_away_and_one_that_differs_are_told(nodes, doctor):
    install_on(nodes, "node2", Scenario(cards=CARDS, number=2, driver="23.0.7", firmware="7.1.0.11.220"))
    plant(nodes, "node1", None, "driver_missing")
    examined = doctor("--quick")
    away = examined.the("npu-driver-unreachable")
    assert away["hosts"] == ["node1"] and "-8005" in str(away["evidence"][0]) and "HwHiAiUser" in away["hint"]
    differs = examined.the("driver-differs")
    assert {"23.0.7", "24.1.rc2"} == {differs["values"]["value"], differs["values"]["majority"]}
    assert len(differs["evidence"]) == 2 and examined.code == 3


def test_tools_that_hang_cost_their_node_alone_and_doctor_ends_in_time(nodes, doctor):
    plant(nodes, "node1", None, "hang", value="both")
    examined = doctor("--quick")
    assert examined.the("npu-smi-hangs")["hosts"] == ["node1"]
    assert examined.the("hccn-hangs")["hosts"] == ["node1"]
    facts = {row["name"]: row["groups"] for row in examined.report["facts"]}
    assert facts["npus"][0] == {"value": "4 x 910B3", "hosts": ["node2"]}
    assert examined.code == 3 and set(examined.report["hosts"]) == {"node1", "node2"}
    assert examined.report["unreached"] == {}


def test_a_job_is_refused_for_its_npus_and_starts_where_those_checks_are_left_out(nodes, ascendrun):
    plant(nodes, "node2", 0, "link_down")
    plant(nodes, "node2", 1, "unreachable")
    (ascendrun.folder / "npu.hosts").write_text(nodes.hostfile(slots=CARDS))

    def submit(checks):
        job = ascendrun.folder / "gate.yaml"
        job.write_text(
            f"name: gate\ncommand: [python3, -c, pass]\nhostfile: npu.hosts\nsetup: {SETUP}\n"
            f"devices: {{type: npu, per_node: {CARDS}}}\nchecks: {checks}\n"
        )
        done = ascendrun("submit", job, timeout=DEADLINE_S)
        return done.returncode, done.stdout + done.stderr

    code, told = submit("{require: [hccl_ping]}")
    assert code in (1, 3) and "[device-link-down]" in told and "[device-unreachable]" in told, told
    assert "node2: NPU 0: link down" in told
    code, told = submit("{skip: [device-links]}")
    assert code == 0, told
    [stored] = (ascendrun.state_dir / "jobs").glob("*/attempt-1/facts.json")
    facts = read_host_facts(stored.parent)
    assert set(facts) == {"node1", "node2"} and facts["node1"]["driver"] == "24.1.rc2"
    assert facts["node2"]["mtu"]["eth0"] == 1500 and facts["node2"]["temperature_c"]["0"] > 30


def test_verify_reads_all_that_the_tools_print_and_uses_no_device_unasked(nodes, ascendrun):
    (ascendrun.folder / "npu.hosts").write_text(nodes.hostfile(slots=CARDS))
    archive = ascendrun.folder / "site.tar.gz"
    done = ascendrun("verify", "-H", "npu.hosts", "-O", archive, "-o", "json", "--lang", "en", timeout=DEADLINE_S)
    report = json.loads(done.stdout)
    odd = [one for one in report["readings"] if one["outcome"] in ("partly", "unread")]
    assert (done.returncode, report["is_passed"], odd) == (0, True, []), done.stderr
    kinds = {one["kind"] for one in report["readings"] if one["outcome"] == "read"}
    assert kinds >= {
        "npu_smi_info",
        "common",
        "ecc",
        "health",
        "board",
        "link",
        "mtu",
        "stat",
        "tls",
        "driver",
        "probe",
    }
    assert {one["outcome"] for one in report["claims"]} == {"unverified"} and len(report["claims"]) == 5
    assert archive.stat().st_mode & 0o777 == 0o600 and report["archive"] == str(archive)
    plant(nodes, "node2", None, "garbage")
    done = ascendrun("verify", "-H", "npu.hosts", "--no-devices", "-O", archive, "--lang", "en", timeout=DEADLINE_S)
    assert done.returncode in (0, 3) and "Traceback" not in done.stderr and "node2: npu" in done.stdout, done.stdout
