"""Checks of a host and of what else uses it: machines, homes, clocks, leases, processes."""

from dataclasses import replace

from ascendrun.core.findings import Severity
from ascendrun.core.node_messages import Failure
from ascendrun.health.checks import run_checks
from ascendrun.health.survey.check_context import CheckContext
from ascendrun.health.survey.facts import GpuProcess, Lease, Owner
from ascendrun.query.host_views import make_device_uses
from tests.lib.host_worlds import JOB, NAMES, found, sound, world


def test_two_names_of_one_machine_are_told_but_containers_of_one_machine_are_two_nodes():
    twin = sound("n2", boot_id="boot-1", hostname="n1", machine_id="machine-1")
    (one,) = found(world(twin), "same-machine")
    assert one.severity is Severity.FAIL and one.hosts == ("n1", "n2")
    assert not found(world(sound("n2", boot_id="boot-1")), "same-machine")
    local = [
        replace(sound(name, boot_id="boot-1", hostname="n1", machine_id="machine-1"), is_local=True) for name in NAMES
    ]
    assert run_checks(world(*local)) == ()


def test_nodes_that_share_a_home_are_told_once_and_others_are_not_counted_in():
    shared = {"neighbours": ("k1", "k3"), "machine_key": "k2"}
    first, third = sound("n1", machine_key="k1", neighbours=()), sound("n3", machine_key="k3", neighbours=("k1",))
    (one,) = found(world(first, sound("n2", **shared), third), "home-shared")
    assert one.severity is Severity.NOTE and one.hosts == NAMES and one.values["path"] == "/root/.ascendrun"
    (one,) = found(world(first, sound("n2", **{**shared, "root": "/other"}), third), "home-shared")
    assert one.hosts == ("n1", "n3")
    local = [sound(name, is_local=True, root=f"/state/{name}", machine_key="k1", neighbours=()) for name in NAMES]
    assert not found(world(*local), "home-shared")


def test_every_way_of_not_being_reached_has_its_own_code():
    reasons = {
        "auth-failed": "auth-failed",
        "host-key-unknown": "host-key-unknown",
        "host-key-changed": "host-key-changed",
        "preflight-failed": "no-python",
        "unreachable": "unreachable",
        "deadline": "unreachable",
    }
    for error, code in reasons.items():
        findings = run_checks(CheckContext(facts={}, unreached={"n7": Failure(error, "n7: it said no", "do this")}))
        assert [(one.code, one.severity, one.hosts) for one in findings] == [(code, Severity.FAIL, ("n7",))]
        assert str(findings[0].message).endswith(": it said no") and str(findings[0].hint) == "do this"


def test_devices_that_another_run_has_leased_stop_a_job_that_would_use_them():
    ours = [Lease("npu", str(number), number, "wang", 1.0, "h-j-9.1") for number in (0, 7)]
    (one,) = found(world(sound("n2", leases=tuple(ours)), family="npu", job=JOB % "npu"), "device-leased")
    assert (one.severity, one.hosts, one.values["device"]) == (Severity.FAIL, ("n2",), 0)
    assert (one.values["run"], one.values["user"]) == ("h-j-9.1", "wang")
    assert not found(world(sound("n2", leases=tuple(ours)), family="npu"), "device-leased")
    used = world(sound("n2", leases=tuple(ours)), family="npu", job=JOB % "npu")
    (one,) = [one for one in run_checks(used, skip=["device_lease"]) if one.code == "device-leased"]
    assert one.severity is Severity.WARN, "a job that skips the check learns what it shares its devices with"


def test_a_process_on_a_gpu_that_belongs_to_no_run_is_named_and_prevents_no_start():
    alice = GpuProcess(4242, 0, 512, Owner("alice", "python notebook.py"))
    others = (GpuProcess(4243, 7, None), GpuProcess(4244, 0, 9, Owner("bob", "python x.py", "h-j-9.1")))
    node = sound("n2", gpu_processes=(alice, *others))
    mine, elsewhere = found(world(node, family="cuda", job=JOB % "cuda"), "gpu-busy")
    assert (mine.severity, elsewhere.severity) == (Severity.WARN, Severity.NOTE)
    assert (mine.hosts, mine.values["gpu"], mine.values["user"]) == (("n2",), 0, "alice")
    assert (mine.values["command"], mine.values["memory_mb"]) == ("python notebook.py", 512)
    assert elsewhere.values["user"] == "?", "it is in a container"
    assert {one.severity for one in found(world(node, family="cuda"), "gpu-busy")} == {Severity.WARN}
    rows = make_device_uses(world(node, family="cuda"))
    assert [(one.type, one.device, one.pid, one.user) for one in rows] == [
        ("cuda", 0, 4242, "alice"),
        ("cuda", 7, 4243, None),
    ]


def test_of_two_clocks_the_one_that_differs_from_the_heads_is_wrong():
    two = CheckContext(facts={"n1": sound("n1", clock_offset_s=0.0), "n2": sound("n2", clock_offset_s=100.0)})
    assert found(two, "clock-skew")[0].hosts == ("n2",)


def test_a_head_with_a_wrong_clock_is_no_fault_of_the_nodes():
    assert not found(world(*[sound(name, clock_offset_s=500.0) for name in NAMES]), "clock-skew")


def test_locked_memory_matters_to_cuda():
    tight = sound("n2", limits={"NOFILE": (65536, 65536), "MEMLOCK": (65536, 65536)})
    assert found(world(tight, family="cuda"), "limit-locked")[0].hosts == ("n2",)
    assert not found(world(tight, family="npu"), "limit-locked")
