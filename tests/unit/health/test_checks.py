"""Each check over small worlds: what it finds, on which hosts, with which words; and what it leaves in peace."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import fields, replace
from string import Formatter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascendrun.ascend.install import DriverVersion
from ascendrun.core.findings import Finding, Severity, fold_findings
from ascendrun.core.hosts import Host
from ascendrun.core.jobfile.spec import parse_stages
from ascendrun.core.jobs.plan import Folders, make_plan
from ascendrun.core.network import candidate_bases
from ascendrun.core.node_messages import Failure
from ascendrun.core.reports import NodeReport, Route
from ascendrun.health.checks import CHECKS, NPU_CHECKS, choose_checks, run_checks
from ascendrun.health.comparison import finding_line
from ascendrun.health.survey.check_context import CheckContext, compare
from ascendrun.health.survey.facts import (
    ConnectionTest,
    Disk,
    GpuProcess,
    InstallFiles,
    Lease,
    NodeFacts,
    NpuFacts,
    Owner,
    PathSize,
    PortHolder,
    PythonFacts,
    SshdFacts,
    TorchFacts,
    WriteResult,
)
from ascendrun.query.host_views import make_device_uses
from ascendrun.text import LANGUAGES, PSEUDO, from_json, to_json, translations

GIB = 1 << 30
NAMES = ("n1", "n2", "n3")


def sound(host: str, **changes) -> NodeFacts:
    """A node with nothing wrong, as one of NAMES."""
    number = NAMES.index(host) + 1
    facts = NodeFacts(
        host=host,
        is_local=False,
        root="/root/.ascendrun",
        login_s=0.2,
        login_noise="",
        user="root",
        uid=0,
        hostname=host,
        boot_id=f"boot-{number}",
        machine_id=f"machine-{number}",
        kernel="5.10.0",
        arch="aarch64",
        os_name="openEuler 22.03",
        cpus=192,
        memory_bytes=1500 * GIB,
        clock_offset_s=0.02,
        limits={"NOFILE": (65536, 65536), "NPROC": (None, None), "MEMLOCK": (None, None), "AS": (None, None)},
        sshd=SshdFacts("10:30:100", 10),
        kills_user_processes=False,
        lingering_users=(),
        disks={
            "/root/.ascendrun": Disk("/root", 900 * GIB, 1000 * GIB, 10**8, 10**8),
            "/dev/shm": Disk("/dev/shm", 700 * GIB, 750 * GIB, 10**8, 10**8),
        },
        writes={"/ckpt": WriteResult("/ckpt", uid=0, wall_s=0.01)},
        paths={"/data/train": PathSize("folder", 10 * GIB, 12)},
        python=PythonFacts(
            setup="fine",
            executable="/opt/py/bin/python",
            version="3.10.13",
            modules={"torch": "2.1.0", "numpy": "1.26.4"},
            start_s=0.1,
        ),
        torch=TorchFacts(torch="2.1.0", import_s=2.0, devices=8, backend="gloo", has_backend=True),
        environ={"PATH": "/usr/bin", "LD_LIBRARY_PATH": "/usr/local/lib"},
        routes={peer: Route("eth0", f"10.0.0.{number}") for peer in NAMES if peer != host},
        addresses={"lo": ("127.0.0.1",), "eth0": (f"10.0.0.{number}",)},
        mtus={"lo": 65536, "eth0": 1500},
        taken_ports={},
        port_ranges=((32768, 60999), ((60000, 60031),)),
        connection_tests=tuple(ConnectionTest(peer, "10.0.0.9", 20001, wall_s=0.001) for peer in NAMES if peer != host),
    )
    return replace(facts, **changes)


def with_driver(version: str | None) -> NpuFacts:
    return NpuFacts(files=InstallFiles(driver=DriverVersion(version=version)))


def world(*changed: NodeFacts, family: str = "cpu", job: str = "", unreached=None) -> CheckContext:
    facts = {name: sound(name) for name in NAMES}
    facts.update({one.host: one for one in changed})
    spec = parse_stages(f"name: j\n{job}", "job.yaml", programs={})[0].spec if job else None
    return CheckContext(
        facts=facts,
        device_type=family,
        job=spec,
        plan=plan_of(spec, facts) if spec else None,
        unreached=unreached or {},
    )


def plan_of(spec, facts):
    hosts = [Host(name) for name in facts]
    same = ("root", "python3", "3.10", "5.10", "aarch64", 192, GIB, GIB, 0.0)
    reports = {
        name: NodeReport(name, "/root/.ascendrun", name, f"b-{name}", None, *same, one.routes or {})
        for name, one in facts.items()
    }
    folders = {name: Folders("/w", "/c", "/a", "/t") for name in facts}
    return make_plan(spec, hosts, reports, job="j-1", attempt=1, run_id="h-j-1.1", folders=folders, trees=())


def found(one: CheckContext, code: str, *, is_full: bool = True) -> list[Finding]:
    return [finding for finding in run_checks(one, is_full=is_full) if finding.code == code]


JOB = "command: [python3, train.py]\ndevices: {type: %s}\n"

# By severity and code of the finding that must name it: what is planted on n2.
PLANTED = {
    Severity.NOTE: {
        "login-slow": {"login_s": 4.0},
        "login-noise": {"login_noise": "Welcome to n2!\nread the news"},
        "machine-id-shared": {"machine_id": "machine-1"},
        "kernel-differs": {"kernel": "4.19.90"},
        "os-differs": {"os_name": "Ubuntu 22.04"},
        "cpus-differ": {"cpus": 96},
        "user-differs": {"user": "me"},
        "limits-differ": {"limits": {"NOFILE": (32768, 32768)}},
        "python-patch-differs": {"python": PythonFacts(version="3.10.2")},
        "variable-differs": {"environ": {"PATH": "/usr/bin", "LD_LIBRARY_PATH": "/opt/old"}},
    },
    Severity.WARN: {
        "probe-timeout": {"late": ("torch",)},
        "clock-skew": {"clock_offset_s": -31.0},
        "arch-differs": {"arch": "x86_64"},
        "memory-differs": {"memory_bytes": 1000 * GIB},
        "uid-differs": {"uid": 1001},
        "limit-files": {"limits": {"NOFILE": (256, 4096)}},
        "limit-processes": {"limits": {"NPROC": (512, 512)}},
        "limit-address-space": {"limits": {"AS": (8 * GIB, None)}},
        "sshd-startups": {"sshd": SshdFacts("2:30:60", 10)},
        "sshd-sessions": {"sshd": SshdFacts("10:30:100", 1)},
        "kill-user-processes": {"kills_user_processes": True, "user": "me", "uid": 1000},
        "disk-low": {"disks": {"/ckpt": Disk("/ckpt", 500 << 20, 900 * GIB, 10**6, 10**6)}},
        "shm-missing": {"disks": {"/dev/shm": Disk("/dev", GIB, GIB)}},
        "shm-small": {"disks": {"/dev/shm": Disk("/dev/shm", 64 << 20, 64 << 20)}},
        "shm-full": {"disks": {"/dev/shm": Disk("/dev/shm", 1 << 20, 700 * GIB)}},
        "directory-slow": {"writes": {"/ckpt": WriteResult("/ckpt", wall_s=4.2)}},
        "path-differs": {"paths": {"/data/train": PathSize("folder", 9 * GIB, 12)}},
        "several-interfaces": {"routes": {"n1": Route("eth0", "10.0.0.2"), "n3": Route("eth1", "10.1.0.2")}},
        "mtu-differs": {"mtus": {"lo": 65536, "eth0": 1400, "docker0": 9000}},
        "python-slow": {"python": PythonFacts(setup="failed", error="killed after 8 s"), "late": ("python",)},
        "build-lock-left": {
            "python": PythonFacts(version="3.10.13", locks={"/c/op/lock": 601.0, "/c/new/lock": 9.0, "/c/x/lock": None})
        },
        "python-differs": {"python": PythonFacts(version="3.8.10")},
        "package-differs": {"python": PythonFacts(version="3.10.13", modules={"torch": "2.3.1", "numpy": "1.26.4"})},
        "torch-slow": {"torch": TorchFacts(torch="2.1.0", import_s=45.0)},
        "variable-slows": {"environ": {"CUDA_LAUNCH_BLOCKING": "1"}},
        "threads-wrong": {"environ": {"OMP_NUM_THREADS": "all"}},
        "threads-many": {"environ": {"OMP_NUM_THREADS": "4000"}},
    },
    Severity.FAIL: {
        "disk-full": {"disks": {"/ckpt": Disk("/ckpt", 0, 900 * GIB, 5, 10)}},
        "inodes-low": {"disks": {"/ckpt": Disk("/ckpt", GIB * 90, 900 * GIB, 0, 10**6)}},
        "null-device-broken": {"null_device": "regular file 0,0 644"},
        "directory-hangs": {"writes": {"/ckpt": WriteResult("/ckpt", is_late=True)}},
        "directory-not-writable": {"writes": {"/ckpt": WriteResult("/ckpt", error="read-only")}},
        "path-not-found": {"paths": {"/data/train": PathSize(missing=True)}},
        "path-unreadable": {"paths": {"/data/train": PathSize(error="permission denied")}},
        "peer-is-loopback": {"routes": {"n1": Route("lo", "127.0.0.1"), "n3": Route("eth0", "10.0.0.2")}},
        "no-route": {"routes": {"n1": Route("eth0", "10.0.0.2")}},
        "peer-timeout": {"connection_tests": (ConnectionTest("n3", "10.0.0.3", 20001, "no answer", "silent"),)},
        "peer-refuses": {"connection_tests": (ConnectionTest("n3", "10.0.0.3", 20001, "refused", "refused"),)},
        "peer-wrong": {"connection_tests": (ConnectionTest("n3", "10.0.0.3", 20001, "n9 answered", "wrong-host"),)},
        "peer-fails": {"connection_tests": (ConnectionTest("n3", "10.0.0.3", 20001, "no route", "failed"),)},
        "setup-failed": {"python": PythonFacts(setup="failed", error="set_env.sh: No such file")},
        "python-missing": {"python": PythonFacts(setup="no-command", error="exit code 127")},
        "python-broken": {"python": PythonFacts(error="libpython3.10.so: cannot open")},
        "interface-missing": {"environ": {"GLOO_SOCKET_IFNAME": "enp9"}},
    },
}
BASES = candidate_bases("doctor", {})
NPU_PLANTED = {
    Severity.WARN: {
        "hccl-port-taken": {"taken_ports": {base + 31: PortHolder(0, 77, "python old.py") for base in BASES}},
        "ports-not-reserved": {"port_ranges": ((1024, 65535), ((60000, 60031),))},
        "variable-conflict": {"environ": {"HCCL_CONNECT_TIMEOUT": "3000"}},
        "allocator-setting-new": {
            "npu": with_driver("22.0.4"),
            "environ": {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"},
        },
    },
    Severity.FAIL: {
        "variable-wrong": {"environ": {"HCCL_CONNECT_TIMEOUT": "soon"}},
        "if-ip-foreign": {"environ": {"HCCL_IF_IP": "10.0.0.1"}},
        "if-ip-elsewhere": {"environ": {"HCCL_IF_IP": "127.0.0.1"}},
    },
    Severity.NOTE: {
        "devices-missing": {"torch": TorchFacts(devices=0)},
        "backend-missing": {"torch": TorchFacts(devices=8, backend="hccl", has_backend=False)},
    },
}


def test_sound_nodes_of_every_family_have_no_finding():
    for family in ("cpu", "npu", "cuda", None):
        assert run_checks(world(family=family)) == ()


def rows_of(table):
    return [(code, changes, severity) for severity, of_code in table.items() for code, changes in of_code.items()]


def planted(table):
    rows = rows_of(table)
    return pytest.mark.parametrize(("code", "changes", "severity"), rows, ids=[code for code, _, _ in rows])


@planted(PLANTED)
def test_a_fault_of_one_node_is_found_and_the_node_is_named(code, changes, severity):
    (one,) = found(world(sound("n2", **changes)), code)
    assert one.severity is severity
    assert "n2" in one.hosts and (one.hosts == ("n2",) or code == "machine-id-shared")


@planted(NPU_PLANTED)
def test_a_fault_that_matters_to_npus_is_found_there_only(code, changes, severity):
    (one,) = found(world(sound("n2", **changes), family="npu"), code)
    assert (one.severity, one.hosts) == (severity, ("n2",))
    if code not in ("if-ip-foreign", "if-ip-elsewhere", "backend-missing"):
        assert not found(world(sound("n2", **changes), family="cpu"), code)


def test_the_first_address_that_a_node_prints_may_be_a_bridges():
    addresses = {"lo": ("127.0.0.1",), "docker0": ("172.17.0.1",), "eth0": ("10.0.0.2",)}

    def told(address):
        node = sound("n2", addresses=addresses, environ={"HCCL_IF_IP": address})
        return [(one.severity, one.values) for one in found(world(node, family="npu"), "if-ip-elsewhere")]

    values = {"value": "172.17.0.1", "interface": "docker0", "routes": ("eth0",)}
    assert told("172.17.0.1") == [(Severity.WARN, values)]
    assert told("10.0.0.2") == []


@pytest.mark.parametrize(
    ("driver", "setting", "needs"),
    [
        ("22.0.4", "expandable_segments:True", "driver 23.0.0"),
        ("23.0.0", "expandable_segments:True", None),
        ("22.0.4", "expandable_segments:False", None),
        ("25.0.RC1", "max_split_size_mb:512, pin_memory_expandable_segments:True", "driver 25.5.0, CANN 8.5.0"),
        (None, "expandable_segments:True", None),
    ],
)
def test_an_allocator_setting_that_the_driver_does_not_have_yet_is_told(driver, setting, needs):
    node = sound("n2", npu=with_driver(driver), environ={"PYTORCH_NPU_ALLOC_CONF": setting})
    told = [
        ", ".join(map(str, one.values["required"])) for one in found(world(node, family="npu"), "allocator-setting-new")
    ]
    assert told == ([needs] if needs else [])


def test_the_bundled_programs_lie_in_a_folder_of_each_nodes_own():
    def node(host, tree):
        return sound(host, root=f"/home/{host}/.ascendrun", environ={"PYTHONPATH": f"/home/{host}/.ascendrun/{tree}"})

    assert not found(world(*[node(name, "trees/ab") for name in NAMES]), "variable-differs")
    (one,) = found(world(node("n1", "trees/ab"), node("n2", "old"), node("n3", "trees/ab")), "variable-differs")
    assert one.hosts == ("n2",)


def test_locked_memory_matters_to_cuda():
    tight = sound("n2", limits={"NOFILE": (65536, 65536), "MEMLOCK": (65536, 65536)})
    assert found(world(tight, family="cuda"), "limit-locked")[0].hosts == ("n2",)
    assert not found(world(tight, family="npu"), "limit-locked")


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


def test_the_users_own_master_port_must_be_free_where_the_ranks_meet():
    job = JOB % "cpu" + "env: {MASTER_PORT: 45000}\n"
    (one,) = found(
        world(sound("n1", taken_ports={45000: PortHolder(1000, 4711, "python old.py")}), job=job), "port-taken"
    )
    assert one.hosts == ("n1",) and one.values["port"] == 45000 and one.values["holder"].values["pid"] == 4711
    assert not found(world(sound("n2", taken_ports={45000: PortHolder()}), job=job), "port-taken")
    assert found(world(job=job), "port-ephemeral")[0].severity is Severity.NOTE


def test_ports_of_a_running_job_stop_another_job_if_no_block_of_its_choice_is_free():
    holder = PortHolder(0, 77, "python train.py", "h-j-9.1")
    job = JOB % "npu" + "env: {HCCL_IF_BASE_PORT: 60000}\n"
    for port in (60000, 60031):
        world_of_job = world(sound("n2", taken_ports={port: holder}), family="npu", job=job)
        (one,) = found(world_of_job, "hccl-port-taken")
        assert one.severity is Severity.FAIL and one.values["holder"].values["run_id"] == "h-j-9.1"
    one_block = sound("n2", taken_ports={BASES[0]: holder})
    assert not found(world(one_block, family="npu"), "hccl-port-taken")
    assert not found(world(sound("n2", taken_ports={60000: holder}), family="npu"), "hccl-port-taken")


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


def test_torch_that_cannot_be_imported_stops_a_job_but_is_a_note_in_a_plain_login():
    broken = sound("n2", torch=TorchFacts(step="import torch_npu", error="ImportError: libhccl.so: cannot open"))
    assert found(world(broken), "torch-import")[0].severity is Severity.NOTE
    assert found(world(broken, job=JOB % "cpu"), "torch-import")[0].severity is Severity.FAIL
    assert not found(world(broken, job=JOB % "cpu"), "torch-import", is_full=False), "it takes too long for a gate"


def test_fewer_devices_than_the_job_takes_are_told():
    job = "command: [python3, train.py]\ndevices: {type: npu, per_node: 8}\n"
    (one,) = found(world(sound("n2", torch=TorchFacts(devices=7)), family="npu", job=job), "devices-missing")
    assert one.severity is Severity.FAIL and (one.values["found"], one.values["expected"]) == (7, 8)


def test_of_two_clocks_the_one_that_differs_from_the_heads_is_wrong():
    two = CheckContext(facts={"n1": sound("n1", clock_offset_s=0.0), "n2": sound("n2", clock_offset_s=100.0)})
    assert found(two, "clock-skew")[0].hosts == ("n2",)


def test_a_head_with_a_wrong_clock_is_no_fault_of_the_nodes():
    assert not found(world(*[sound(name, clock_offset_s=500.0) for name in NAMES]), "clock-skew")


def test_a_timeout_below_hccls_own_that_ascendrun_sets_itself_is_no_conflict():
    assert run_checks(world(family="npu", job=JOB % "npu"), is_full=False) == ()


def test_required_checks_run_in_the_gate_and_skipped_ones_do_not():
    light = {check.name for check in choose_checks(is_full=False)}
    assert "torch" not in light and "clock" in light
    chosen = {check.name for check in choose_checks(is_full=False, skip=["clock", "one_interface"], require=["torch"])}
    assert chosen == (light | {"torch"}) - {"clock", "one-interface"}


# --- whatever the facts, no check falls over ---


def test_nothing_known_finds_nothing():
    unknown = {name: NodeFacts(name) for name in NAMES}
    for family in ("npu", "cuda", "cpu", None):
        assert run_checks(CheckContext(facts=unknown, device_type=family)) == ()
    assert run_checks(CheckContext(facts={})) == ()


def mixtures():
    """Nodes of which each fact is missing, sound, or one of the planted faults."""
    planted: dict[str, list] = {}
    for _, changes, _ in [*rows_of(PLANTED), *rows_of(NPU_PLANTED)]:
        for name, value in changes.items():
            planted.setdefault(name, []).append(value)
    names = [field.name for field in fields(NodeFacts) if field.name not in ("host", "npu", "late")]

    def node(host):
        well = sound(host)
        choices = {name: st.sampled_from([None, getattr(well, name), *planted.get(name, [])]) for name in names}
        return st.fixed_dictionaries(choices).map(lambda values: NodeFacts(host=host, **values))

    return st.tuples(*[node(name) for name in NAMES])


@settings(max_examples=150, deadline=None)
@given(mixtures(), st.sampled_from(["npu", "cuda", "cpu", None]), st.booleans())
def test_no_check_raises_and_every_finding_renders_in_every_language(nodes, family, has_job):
    spec = parse_stages(f"name: j\n{JOB % 'cpu'}", "job.yaml", programs={})[0].spec if has_job else None
    one = CheckContext(facts={node.host: node for node in nodes}, device_type=family, job=spec)
    codes = {code for check in CHECKS for code in check.codes}
    for finding in run_checks(one):
        assert finding.code in codes
        assert placeholders(words_of(finding.code)) <= set(finding.values), finding
        assert from_json(json.loads(json.dumps(to_json(finding.values)))).keys() == finding.values.keys()
        for lang in (*LANGUAGES, PSEUDO):
            assert finding_line(finding).render(lang)


def test_a_check_that_falls_over_is_told_and_hides_nothing():
    odd = sound("n2", limits={"NOFILE": ("many", "more")}, kernel="4.19")
    codes = {finding.code: finding for finding in run_checks(world(odd))}
    assert codes["check-error"].values["check"] == "limits" and "TypeError" in codes["check-error"].values["why"]
    assert "kernel-differs" in codes


# --- texts ---


def placeholders(template: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(template) if name}


def words_of(code: str) -> str:
    """The English message and hint of a finding's code. Raises KeyError without a message."""
    rows = translations("en")
    return rows[f"finding.{code}.message"] + rows.get(f"finding.{code}.hint", "")


def test_a_fix_uses_only_what_its_finding_names():
    for key, command in translations("en").items():
        if key.startswith("finding.") and key.endswith(".fix"):
            code = key.split(".")[1]
            assert placeholders(command) <= placeholders(re.sub(r":[a-z]+\}", "}", words_of(code))), code


def test_a_fix_quotes_values_and_lists_ids():
    switch = Finding("device-tls-differs", Severity.FAIL, ("n1",), {"devices": (0, 3), "switch": 1})
    assert switch.fix == "for i in 0 3; do hccn_tool -i $i -tls -s enable 1; done"
    package = Finding("package-differs", Severity.WARN, ("n1",), {"package": "a b", "majority": "1;2"})
    assert package.fix == "python3 -m pip install 'a b'=='1;2'"


def test_every_code_of_a_check_has_a_message():
    for check in CHECKS:
        assert check.codes and all(words_of(code) for code in check.codes), check.name
        assert check.name == check.name.lower() and "_" not in check.name
    assert len({check.name for check in CHECKS}) == len(CHECKS)


def test_every_code_of_the_hosts_checks_is_planted_here():
    codes = {code for check in CHECKS if check not in NPU_CHECKS for code in check.codes}
    elsewhere = {
        "unreachable", "auth-failed", "host-key-unknown", "host-key-changed", "no-python", "limit-locked",
        "same-machine", "port-taken", "port-ephemeral", "torch-import", "torch-missing", "home-shared", "device-leased",
        "gpu-busy", "checkpoints-local", "output-relative",
    }  # fmt: skip
    assert codes - elsewhere == {code for code, _, _ in [*rows_of(PLANTED), *rows_of(NPU_PLANTED)]}


def test_two_paths_on_a_full_disk_are_one_fault_though_its_free_space_changes():
    first, second = (Disk(path, free, 900 * GIB, 5, 10, "ext4", False, 259) for path, free in (("/a", 0), ("/b", 4096)))
    other = replace(first, at="/c", device=260)
    (one,) = found(world(sound("n2", disks={"/a": first, "/b": second})), "disk-full")
    assert one.values == {"path": "/a", "free": 0}
    assert len(found(world(sound("n2", disks={"/a": first, "/b": second, "/c": other})), "disk-full")) == 2


def test_checkpoints_on_the_nodes_own_disks_are_told_to_jobs_that_restart():
    def on(kind, is_remote, restarts=3, hosts=NAMES, **more):
        disks = {"/ckpt": Disk("/ckpt", 900 * GIB, 1000 * GIB, 10**8, 10**8, kind, is_remote)}
        job = f"{JOB % 'cpu'}checkpoint: {{dir: /ckpt}}\nrestart: {{max_restarts: {restarts}}}\n"
        return found(world(*(sound(host, disks=disks, **more) for host in hosts), job=job), "checkpoints-local")

    (local,) = on("xfs", False)
    assert (local.severity, local.hosts) == (Severity.WARN, tuple(NAMES))
    assert local.values == {"path": "/ckpt", "kind": "xfs"}
    assert on("xfs", False, hosts=NAMES[:1])[0].hosts == tuple(NAMES[:1])
    assert not on("nfs4", True) and not on(None, None) and not on("xfs", False, restarts=0)
    assert not on("ext4", False, is_local=True)


@pytest.mark.parametrize(
    ("words", "more", "found_path"),
    [
        (["--output_dir", "out"], "", "out"),
        (["--output-dir=runs/a"], "", "runs/a"),
        (["--save", "ckpt"], "", "ckpt"),
        (["--output_dir", "out/a"], "outputs: [out/]", None),
        (["--output_dir", "/ckpt/a"], "", None),
        (["--output_dir", "$HOME/a"], "", None),
        (["--save_steps", "100"], "", None),
        (["--save", "--lr", "1"], "", None),
        (["--save", "100"], "", None),
        (["--output", "true"], "", None),
    ],
)
def test_a_relative_output_is_named_unless_it_is_fetched(words, more, found_path):
    job = (JOB % "cpu").replace("command: [", f"command: [python, train.py, {', '.join(words)}, ", 1) + more
    facts = found(world(*map(sound, NAMES), job=job), "output-relative")
    assert [one.values["path"] for one in facts] == ([found_path] if found_path else [])
    assert all((one.severity, one.hosts) == (Severity.WARN, tuple(NAMES)) for one in facts)


@pytest.mark.parametrize(
    ("name", "text", "more", "expected"),
    [
        ("train.yaml", "output_dir: saves/a\nmax_steps: 5\n", "", [("train.yaml: output_dir", "saves/a")]),
        ("train.json", '{"output_dir": "saves/a"}', "", [("train.json: output_dir", "saves/a")]),
        ("train.yaml", "output_dir: saves/a\n", "outputs: [saves/]", []),
        ("train.yaml", "output_dir: /ckpt/a\nsave_steps: 100\noverwrite_output_dir: true\n", "", []),
        ("train.yaml", "output_dir: [saves\n", "", []),
        ("train.yaml", "- saves/a\n", "", []),
        ("absent.yaml", None, "", []),
    ],
)
def test_a_relative_output_in_a_configuration_is_named(tmp_path, name, text, more, expected):
    if text is not None:
        (tmp_path / name).write_text(text)
    job = (JOB % "cpu").replace("command: [", f"command: [llamafactory-cli, train, {name}, ", 1) + more
    facts = found(world(*map(sound, NAMES), job=f"{job}\nworkdir: {{path: {tmp_path}}}\n"), "output-relative")
    assert [(one.values["option"], one.values["path"]) for one in facts] == expected


def test_a_program_of_ours_needs_torch():
    from ascendrun.options import ProgramOptions

    spec = parse_stages("name: j\nprogram: p\n", "job.yaml", programs={"p": ProgramOptions("p", {})})[0].spec
    facts = {"n1": sound("n1"), "n2": sound("n2", python=PythonFacts(version="3.10.13", modules={"torch": None}))}
    (one,) = found(CheckContext(facts=facts, job=spec), "torch-missing")
    assert one.severity is Severity.FAIL and one.hosts == ("n2",)


# --- folding ---


def test_findings_that_differ_only_in_their_hosts_become_one_and_the_worst_come_first():
    note, fail = Severity.NOTE, Severity.FAIL
    folded = fold_findings(
        [
            Finding("a", note, ("n1",), {"x": "1"}),
            Finding("b", fail, ("n1",)),
            Finding("a", note, ("n2",), {"x": "1"}),
            Finding("a", note, ("n3",), {"x": "2"}),
        ]
    )
    assert [(one.code, one.hosts) for one in folded] == [("b", ("n1",)), ("a", ("n1", "n2")), ("a", ("n3",))]


def test_who_could_not_be_asked_is_neither_majority_nor_outlier():
    same = compare({"a": "1", "b": None, "c": "2", "d": "2"})
    assert (same.majority, same.majority_hosts, same.others) == ("2", ("c", "d"), (("1", ("a",)),))
    assert compare({"a": None}) is None
    assert [text.values for text in same.evidence()] == [
        {"value": "2", "hosts": ("c", "d")},
        {"value": "1", "hosts": ("a",)},
    ]


def test_a_lock_that_a_process_of_any_node_holds_is_of_a_running_build():
    left, held = PythonFacts(locks={"/home/me/op/lock": 5000.0}), PythonFacts(locks={"/home/me/op/lock": None})
    assert found(world(sound("n2", python=left)), "build-lock-left")
    assert not found(world(sound("n2", python=left), sound("n1", python=held)), "build-lock-left")


def test_the_shown_command_starts_the_interpreter_in_the_environment_of_the_job(tmp_path):
    setup = "export FROM_SETUP='it'\\''s'\n# sources set_env.sh\nexport AND=\"$FROM_ENV\\\\t\""
    python = tmp_path / "py"
    python.write_text('#!/bin/sh\nprintf "%s|" "$FROM_ENV" "$FROM_SETUP" "$AND" "$@"\n')
    python.chmod(0o755)
    job = f"command: [./x]\npython: {python}\nenv: {{FROM_ENV: 'a b'}}\nsetup: {json.dumps(setup)}\n"
    (one,) = found(world(sound("n2", python=PythonFacts(error="broken")), job=job), "python-broken")
    shown = subprocess.run(["bash", "-c", one.values["command"]], capture_output=True, check=True).stdout
    assert shown.decode() == "a b|it's|a b\\t|-c|print(1)|"
    (plain,) = found(world(sound("n2", python=PythonFacts(error="broken"))), "python-broken")
    assert plain.values["command"] == "python3 -c 'print(1)'"
