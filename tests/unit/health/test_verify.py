"""verify: all that the simulated tools print is read, and what no parser knows is unknown, never an error."""

import tarfile

import pytest

from ascendrun.ascend.kinds import PARSERS
from ascendrun.core.hosts import Host
from ascendrun.core.reports import Route
from ascendrun.health import verify
from ascendrun.health.checks import run_checks
from ascendrun.health.survey.facts import Lease
from ascendrun.health.verify import ClaimOutcome, Outcome
from ascendrun.query.deep_check import DeepOptions
from ascendrun.query.deep_check import Outcome as DeepOutcome
from ascendrun.query.verify import measure_claims, write_outputs
from ascendrun.sim.ascend.scenario import Scenario, ShownProcess
from tests.lib import ascend_recordings
from tests.lib.ascend_recordings import NAMES, RECORDINGS, read
from tests.lib.npu_worlds import hccn, node, ran, raw_answers, scene_of, section, world

PROBE_OF = {
    "npu_smi_info": ("npu-smi", "info"),
    "link-history": ("hccn", "link_stat 3"),
    "net-health": ("hccn", "net_health 3"),
    "hccn-conf": ("ascend-files", "hccn /etc/hccn.conf"),
    "components": ("cann", "components /cann/version.cfg"),
    "nvidia-gpus": ("gpu-processes", "gpus"),
    "nvidia-apps": ("gpu-processes", "apps"),
    "ping": ("hccn-pings", "ping 3 29.1.2.13"),
    **{kind: ("npu-cards", f"{kind} 3") for kind in ("ecc", "health", "board", "common")},
    **{kind: ("ascend-files", f"{kind} /{kind}") for kind in ("install", "driver", "firmware", "cann")},
}


def outcomes(outputs):
    return {(one.kind, one.label): one.outcome for one, _ in outputs}


@pytest.mark.parametrize("chip", ["910A", "910B3", "910_93", "Ascend950PR", "310P3"])
def test_all_that_the_simulated_tools_print_is_read(chip):
    scenario = Scenario(chip=chip, cards=4)
    has_ports = scenario.family.speed_mbit > 0
    answers = raw_answers(scenario, pings=((0, "29.1.1.11"),) if has_ports else ())
    found = outcomes(verify.read_host("n1", answers))
    refused = Outcome.READ if has_ports else Outcome.REFUSED
    assert {outcome for (kind, _), outcome in found.items() if kind not in ("link", "ip")} <= {Outcome.READ, refused}
    kinds = {kind for kind, _ in found}
    assert kinds >= {*"npu_smi_info ecc health board common mtu driver firmware cann components".split()}
    counters = section("stat 0", *hccn(scene_of(scenario), 0, "stat"))
    assert outcomes(verify.read_text("n1", counters)) == {("stat", "stat 0"): refused}


@pytest.mark.parametrize("path", RECORDINGS, ids=NAMES)
def test_each_recorded_output_in_its_place_is_judged_and_ends_no_check(path):
    kind = path.parent.name
    probe, label = PROBE_OF.get(kind, ("hccn", f"{kind} 3"))
    for text in (read(path), read(path)[: len(read(path)) // 2], read(path)[::-1]):
        raw = {probe: ran(section(label, text))}
        [reading] = [one for one, _ in verify.read_host("n1", raw) if one.label == label]
        assert reading.kind == kind and isinstance(reading.outcome, Outcome)
        routes = {"n2": Route("eth0", "10.0.0.1")}
        codes = {one.code for one in run_checks(world(node("n1", raw=raw, routes=routes), node("n2")))}
        assert "check-error" not in codes


def test_what_no_parser_knows_is_unread_and_what_a_tool_refuses_is_told_apart():
    assert verify.read_output("mtu", "maximum transfer unit is 1500\n")[0] is Outcome.UNREAD
    assert verify.read_output("mtu", "mtu:1500\nnew field:7\n") == (Outcome.PARTLY, ("new field:7",))
    assert verify.read_output("mtu", "Command execute failed!\n")[0] is Outcome.REFUSED
    [(hung, _)] = verify.read_text("n1", section("link 1", "Killed", 137))
    assert hung.outcome is Outcome.REFUSED
    report = verify.make_verify_report([hung], verify.unmeasured("no"), ["n1"], {})
    assert report.is_passed and {one.outcome for one in report.claims} == {ClaimOutcome.UNVERIFIED}
    odd = verify.Reading("n1", "mtu", "mtu 1", Outcome.UNREAD)
    assert not verify.make_verify_report([odd], (), ["n1"], {}).is_passed


def used(leases=2):
    """A node with a rank on each of two NPUs, of which so many are leased."""
    rows = (ShownProcess(0, 40, "python", 9000, 90), ShownProcess(1, 41, "python", 9000, 90))
    owners = dict.fromkeys((40, 41), ("me", "h-j-1.1", "python"))
    leased = tuple(Lease("npu", str(device), device) for device in range(leases))
    return node("n1", Scenario(processes=rows), owners=owners, leases=leased)


def test_claims_follow_from_what_devices_and_leases_say():
    idle, busy = node("n1"), used()
    assert verify.claim_lease({"n1": busy}, {"n1": 2}).outcome is ClaimOutcome.MEASURED
    assert verify.claim_lease({"n1": used(leases=1)}, {"n1": 2}).outcome is ClaimOutcome.FAILED
    before = verify.memory_of({"n1": idle})
    assert verify.taken_mb(before, verify.memory_of({"n1": busy})) == 9000
    assert verify.taken_mb(before, {}) is None
    fast = verify.claim_speed({"n1": 200.0}, {"n1": idle}, (0.15, 0.5))
    assert fast.outcome is ClaimOutcome.MEASURED and fast.values["share_of_peak"] == {"n1": 0.678}
    assert verify.claim_speed({"n1": 20.0}, {"n1": idle}, (0.15, 0.5)).outcome is ClaimOutcome.FAILED


class Jobs:
    """Two jobs on one host with two devices: the second holds memory until it is killed, and a moment longer."""

    options = DeepOptions(burn_s=1.0)

    def __init__(self, why=None):
        self.why, self.later = why, []
        self.idle, self.busy = node("n1"), used()

    def run(self, groups, *, burn_s):
        lines = [{"measured": "device", "tflops": 200.0}, {"measured": "device", "tflops": 202.0}, {"measured": "node"}]
        return [DeepOutcome("j-1", self.why, {"n1": lines if self.why is None else []})]

    def start(self, group, *, burn_s):
        self.later = [self.busy]
        return "j-2"

    def stop(self, job):
        self.later = [self.busy, self.idle]

    def survey(self):
        return {"n1": self.later.pop(0) if self.later else self.idle}


def test_a_killed_job_tells_of_leases_memory_and_its_release():
    jobs = Jobs()
    claims = {one.name: one for one in measure_claims(jobs, [Host("n1")], jobs.survey, lambda text: None)}
    assert {one.outcome for one in claims.values()} == {ClaimOutcome.MEASURED} and set(claims) == set(verify.CLAIMS)
    assert claims["device-lease"].values["leased"] == {"n1": [0, 1]}
    assert claims["plan-memory"].values == {"taken_mb": 9000, "assumed_context_mb": 1536}
    assert claims["memory-release"].values["seconds"] >= 1
    failed = measure_claims(Jobs(why="EI0006"), [Host("n1")], jobs.survey, lambda text: None)
    assert [(one.name, one.outcome) for one in failed][:2] == [
        ("hccl-start", ClaimOutcome.FAILED),
        ("device-speed", ClaimOutcome.UNVERIFIED),
    ]


def test_the_archive_has_no_credentials_and_its_outputs_become_recordings(tmp_path):
    raw = raw_answers(Scenario(cards=2))
    raw["environ"] = ran("API_TOKEN=very-secret-value-1\0")
    raw["python"] = ran('{"executable": "/p", "note": "password=very-secret-value-2"}\n')
    outputs = [*verify.read_host("n1", raw), *verify.read_text("n1", section("mtu 7", "mtu:9000\n"))]
    report = verify.make_verify_report([one for one, _ in outputs], (), ["n1"], {})
    archive = tmp_path / "site.tar.gz"
    write_outputs(archive, report, outputs, {"n1": raw})
    with tarfile.open(archive) as tar:
        texts = {member.name: tar.extractfile(member).read().decode() for member in tar}
    assert not [name for name, text in texts.items() if "very-secret" in text]
    assert "ascendrun-verify/raw/n1.json" in texts and "ascendrun-verify/report.json" in texts
    written = ascend_recordings.record(archive, "site", tmp_path / "ascend")
    kinds = {path.parent.name for path in written}
    assert {"npu_smi_info", "mtu", "driver"} <= kinds <= set(PARSERS)
    assert sorted(path.name for path in written if path.parent.name == "mtu") == ["site-1.txt", "site-2.txt"]
    assert all(path.with_suffix(".json").exists() for path in written)
    assert ascend_recordings.record(archive, "site", tmp_path / "ascend") == []
