"""Software and set-up of NPU nodes: what does not go together, or not with the job, is told."""

from dataclasses import replace

import pytest

from ascendrun.core.findings import Severity
from ascendrun.health.checks import run_checks
from ascendrun.health.survey.check_context import CheckContext
from ascendrun.health.survey.facts import PythonFacts, TorchFacts
from ascendrun.sim.ascend.scenario import Scenario
from tests.lib import host_worlds
from tests.lib.npu_worlds import ENVIRON, HOME, PYTHON, RESERVED, codes, node, ran, section, shell_text, the, world


def test_versions_that_differ_between_nodes_are_told_with_both():
    new = Scenario(driver="25.0.rc1.1", firmware="7.5.0.1.129", cann="8.1.RC1")
    one = world(node("n1"), node("n2"), node("n3", new))
    for code, value, majority in (
        ("driver-differs", "25.0.rc1.1", "24.1.rc2"),
        ("cann-differs", "8.1.RC1", "8.0.RC3"),
        ("firmware-differs", "7.5.0.1.129", "7.3.0.1.231"),
    ):
        finding = the(one, code)
        assert finding.hosts == ("n3",) and (finding.values["value"], finding.values["majority"]) == (value, majority)
    assert the(one, "cann-differs").severity is Severity.WARN
    job = world(node("n1", **RESERVED), node("n2", new, **RESERVED), per_node=8)
    assert the(job, "cann-differs").severity is Severity.FAIL
    assert "hccl-build-differs" not in codes(job)


def test_two_builds_of_one_cann_prevent_a_start_as_their_ranks_do_not_connect():
    one, two = node("n1", **RESERVED), node("n2", Scenario(build="7.6.0.2.117"), **RESERVED)
    finding = the(world(one, two, per_node=8), "hccl-build-differs")
    assert (finding.severity, finding.hosts, finding.values["value"]) == (Severity.FAIL, ("n2",), "7.6.0.2.117")
    assert the(world(one, two), "hccl-build-differs").severity is Severity.WARN
    bare = node("n2", raw={"cann": ran(shell_text(Scenario()).partition("@@ components")[0])}, **RESERVED)
    assert "hccl-build-differs" not in codes(world(one, bare, per_node=8))


@pytest.mark.parametrize(
    "modules, version, code, severity",
    [
        ({"torch": "2.6.0", "torch-npu": "2.4.0"}, "3.10.13", "torch-npu-torch", Severity.FAIL),
        ({"torch": "2.4.0+cu121", "torch-npu": "2.4.0"}, "3.10.13", "torch-build", Severity.FAIL),
        ({"torch": "2.9.0", "torch-npu": "2.9.0"}, "3.10.13", "torch-npu-cann", Severity.WARN),
        ({"torch": "2.4.0", "torch-npu": "2.4.0"}, "3.13.0", "torch-npu-python", Severity.WARN),
        ({"torch": "2.4.0", "torch-npu": "2.4.0.dev20240101"}, "3.10.13", "versions-unproven", Severity.NOTE),
    ],
)
def test_versions_that_were_not_made_for_each_other_are_told(modules, version, code, severity):
    finding = the(world(node("n1", python=replace(PYTHON, modules=modules, version=version))), code)
    assert finding.severity is severity and finding.values["problem"]


def test_two_kinds_of_chip_are_told():
    finding = the(world(node("n1"), node("n2"), node("n3", Scenario(chip="910B4"))), "chip-differs")
    assert finding.hosts == ("n3",) and (finding.values["value"], finding.values["majority"]) == ("910B4", "910B3")


def test_driver_and_firmware_of_two_releases_are_told():
    assert the(world(node("n1", Scenario(is_compatible=False))), "driver-firmware").severity is Severity.WARN


def test_a_cann_of_mixed_parts_is_told():
    finding = the(world(node("n1", Scenario(components={"hccl": "8.0.RC2"}))), "cann-mixed")
    assert finding.values["versions"] == ("8.0.RC2", "8.0.RC3") and "hccl: 8.0.RC2" in finding.evidence


def test_a_shell_that_leads_to_no_cann_is_told_with_the_file_to_source():
    bare = node("n1", shell=False, **RESERVED)
    finding = the(world(bare, per_node=8), "set-env-missing")
    assert finding.severity is Severity.FAIL
    assert str(finding.hint) == "setup: source /usr/local/Ascend/ascend-toolkit/set_env.sh"
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


def test_a_setup_that_failed_says_nothing_of_cann():
    ill = node(
        "n1", raw={"cann": {**ran(""), "code": 1, "setup": "failed"}}, python=PythonFacts(setup="failed"), **RESERVED
    )
    assert not {"set-env-missing", "cann-missing"} & codes(world(ill, per_node=8))


# --- what a job asks of the devices ---


def test_devices_that_hccl_does_not_take_together_are_told():
    old = node("n1", Scenario(chip="910A"), **RESERVED)
    assert the(world(old, per_node=3), "device-set").severity is Severity.FAIL
    assert the(world(old, per_node="ids: [3, 4]"), "device-set").values["problem"].key == "chip.ring"
    assert "device-set" not in codes(world(old, per_node=4))
    dies = node("n1", Scenario(chip="910_93", cards=8), **RESERVED)
    assert the(world(dies, per_node="ids: [1, 2]"), "device-set").severity is Severity.WARN
    assert "device-set" not in codes(world(node("n1", **RESERVED), per_node=3))


@pytest.mark.parametrize(
    "command, asks",
    [
        ("[python3, train.py, --bf16]", "--bf16"),
        ("[python3, t.py, --dtype, bfloat16]", "--dtype bfloat16"),
        ("[python3, t.py, --precision=bf16]", "--precision=bf16"),
        ("[python3, t.py, --bf16, 'true', --x]", "--bf16 true"),
        ("[python3, t.py, --bf16=False]", None),
        ("[python3, t.py, --bf16, 'false']", None),
        ("[python3, t.py, --fp16]", None),
        ("[python3, bf16.py]", None),
    ],
)
def test_bf16_on_a_chip_without_it_is_told_where_the_job_asks_for_it(command, asks):
    from ascendrun.core.jobfile.spec import parse_stages

    spec = parse_stages(f"name: j\ncommand: {command}\ndevices: {{type: npu}}\n", "job.yaml", programs={})[0].spec
    old, new = (
        CheckContext(facts={"n1": node("n1", Scenario(chip=chip), **RESERVED)}, device_type="npu", job=spec)
        for chip in ("910A", "910B3")
    )
    assert "bf16-unsupported" not in codes(new)
    if asks is None:
        assert "bf16-unsupported" not in codes(old)
    else:
        assert the(old, "bf16-unsupported").values == {"chip": "910A", "argument": asks}


def test_a_set_up_that_hides_devices_of_the_job_is_told():
    def with_visible(value, **more):
        return world(node("n1", environ={**ENVIRON, "ASCEND_RT_VISIBLE_DEVICES": value}, **RESERVED), **more)

    fewer = the(with_visible("0,1,2", per_node=8), "visible-fewer")
    assert (fewer.values["found"], fewer.values["expected"]) == (3, 8)
    assert the(with_visible("0, 1,2", per_node=2), "visible-fewer").values["found"] == 1, "cut at the blank"
    assert the(with_visible("6,7,8"), "visible-beyond").values["ids"] == (8,)
    assert not {"visible-fewer", "visible-beyond"} & codes(with_visible("0,1,2,3", per_node=4))


def test_roles_may_differ_in_interpreters_packages_and_variables_and_hosts_of_one_role_may_not():
    roles = "roles: [{name: a, nodes: 2, command: [python3]}, {name: b, command: [./x]}]\nhostfile: h\n"
    names = ("n1", "n2", "n3")

    def differing(*versions):
        pythons = (PythonFacts(version=one, modules={"torch": one}) for one in versions)
        hosts = [host_worlds.sound(name, python=python) for name, python in zip(names, pythons)]
        found = run_checks(host_worlds.world(*hosts, job=roles))
        return {(one.code, one.hosts) for one in found if one.code in ("python-differs", "package-differs")}

    assert not differing("3.10.1", "3.10.1", "3.11.2")
    assert differing("3.10.1", "3.11.2", "3.11.2") == {("python-differs", ("n2",)), ("package-differs", ("n2",))}
