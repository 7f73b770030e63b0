"""One cluster with a fault on each node, from raw answers through the real parsers: each is found where it is.

The virtual cluster plants over 30 of these for real, on hosts with an sshd of their own (tests/cluster): test_doctor.py
a full disk, noise and a slow start in startup files, sshd's limits, another Python, paths that are missing or differ,
a clock that is off, hosts that do not reach each other, two names of one machine, frozen, refusing and unknown hosts,
a set-up that fails, interfaces, ports and threads that are not there, no torch; test_doctor_npu.py cards that dropped,
are ill, held or busy, links, TLS, addresses, drivers and tools that hang; test_doctor_many.py 64 hosts at once.
"""

from dataclasses import replace

import pytest

from ascendrun.core.findings import Severity
from ascendrun.core.network import candidate_bases
from ascendrun.head.protocol.control_messages import SurveyReply
from ascendrun.head.survey.survey_reader import read_world
from ascendrun.health.checks import CHECKS, NPU_CHECKS, run_checks
from ascendrun.sim.ascend.scenario import PlannedFault, Scenario
from ascendrun.sim.ascend.tool.model import FAMILIES
from tests.lib.npu_worlds import ran, raw_answers, section
from tests.lib.recorded_reports import GIB, ROOT, recorded_answer
from tests.unit.health.checks.test_npu import FAULTS as NPU_FAULTS

SOUND_NODES = 4
LAYOUTS = [(name, layout) for name, family in FAMILIES.items() for layout in family.layouts]


def of(fault, card=None, value=None):
    return Scenario(faults=(PlannedFault(fault, card, value),))


def disk(**more):
    return {
        "at": "/",
        "free_bytes": 900 * GIB,
        "total_bytes": 1000 * GIB,
        "free_inodes": 10**8,
        "total_inodes": 10**8,
        **more,
    }


def python(version="3.10.13", **modules):
    found = {"torch": "2.4.0", "torch-npu": "2.4.0", "numpy": "1.26.4", **modules}
    words = ", ".join(f'"{name}": "{value}"' for name, value in found.items())
    return ran(f'{{"executable": "/opt/py/bin/python", "version": "{version}", "modules": {{{words}}}}}\n')


def environ(**more):
    home = "/usr/local/Ascend/ascend-toolkit/latest"
    values = {
        "HOME": "/root",
        "PATH": "/opt/py/bin:/usr/bin",
        "ASCEND_HOME_PATH": home,
        "LD_LIBRARY_PATH": f"{home}/lib64:/usr/lib",
        **more,
    }
    return ran("".join(f"{name}={value}\0" for name, value in values.items()))


OLD_GLIBC = "python3: /lib64/libc.so.6: version `GLIBC_2.34' not found (required by python3)"


def image(problem=None, id="cafe", detail="as the runtime wrote"):
    more = {"problem": problem, "detail": detail} if problem else {"id": id}
    return {"runtime": "docker", "image": "site/cann", **more}


def connection_test(code, error):
    test = {"peer": "n1", "address": "10.0.1.1", "port": 20001, "code": code, "error": error}
    return {"results.connection-tests.tests": [test]}


# What the NPU tools say: the code that must be found, the scenario of the simulated node.
OF_THE_NPUS = [
    *((code, of(*fault)) for fault, code, *_ in NPU_FAULTS if fault[0] != "garbage"),
    ("npu-hot", of("hot", 6, "71")),
    ("npu-throttled", of("throttled", 6)),
    ("npu-clock-differs", of("rated_clock", 6)),
    ("device-mtu-differs", of("mtu", 4)),
    ("device-unreachable", of("unreachable", 3)),
    ("driver-incomplete", Scenario(is_complete=False)),
    ("cann-mixed", Scenario(components={"hccl": "8.0.RC2"})),
    ("driver-differs", Scenario(driver="24.1.rc1")),
    ("cann-differs", Scenario(cann="8.0.RC2")),
    ("hccl-build-differs", Scenario(build="7.6.0.2.117")),
    ("chip-differs", Scenario(chip="910B1")),
    ("npu-more", Scenario(cards=10)),
]

# What the raw answers say: the code, and what stands at a place of the answer instead of the sound value.
HOLDER = {"uid": 0, "pid": 77, "command": "python old.py"}
OF_THE_ANSWERS = [
    ("npu-smi-unreadable", {"results.npu-smi": ran(section("info", "\x00\x9f{]]\x1bGW\n\x07~~"))}),
    ("npu-smi-missing", {"results.npu-smi": ran(section("none", ""))}),
    ("npu-smi-hangs", {"results.npu-smi": ran("@@ info\n", code=None, timed_out=True)}),
    ("npu-smi-error", {"results.npu-smi": ran(section("info", "Get npu info failed.\n", 1))}),
    ("hccn-hangs", {"results.hccn": ran(section("link 1", "Killed\n", 137), code=None, timed_out=True)}),
    ("device-file-closed", {"results.npu-devices.stats./dev/davinci3": {"readable": False, "mode": 0o600}}),
    ("device-file-missing", {"results.npu-devices.stats./dev/hisi_hdc": {"missing": True}}),
    ("login-slow", {"report.login_s": 12.0}),
    ("login-noise", {"report.login_noise": "Welcome\nread the news"}),
    ("probe-timeout", {"results.os": {"error": "no answer in time", "late": True}}),
    ("clock-skew", {"report.clock_offset_s": -31.0}),
    ("arch-differs", {"report.arch": "x86_64"}),
    ("kernel-differs", {"report.kernel": "4.19.90"}),
    ("cpus-differ", {"report.cpus": 96}),
    ("memory-differs", {"report.memory_bytes": 750 * GIB}),
    ("user-differs", {"report.user": "me"}),
    ("os-differs", {"results.os": {"texts": {"/etc/os-release": 'PRETTY_NAME="Ubuntu 22.04"\n'}}}),
    ("limit-files", {"results.limits.limits.NOFILE": [256, 4096]}),
    ("limit-processes", {"results.limits.limits.NPROC": [512, 512]}),
    ("limit-address-space", {"results.limits.limits.AS": [8 * GIB, None]}),
    ("limits-differ", {"results.limits.limits.STACK": [1 << 20, None]}),
    ("sshd-startups", {"results.sshd": ran("maxstartups 2:30:60\nmaxsessions 64\n")}),
    ("sshd-sessions", {"results.sshd": ran("maxstartups 10:30:100\nmaxsessions 1\n")}),
    ("disk-full", {f"results.disk.disks.{ROOT}": disk(free_bytes=0)}),
    ("disk-low", {"results.disk.disks./tmp": disk(free_bytes=500 << 20)}),
    ("inodes-low", {"results.disk.disks./tmp": disk(free_inodes=0)}),
    ("null-device-broken", {"results.null-device": ran("regular empty file 0,0 644\n")}),
    ("shm-small", {"results.disk.disks./dev/shm": disk(at="/dev/shm", free_bytes=64 << 20, total_bytes=64 << 20)}),
    ("shm-missing", {"results.disk.disks./dev/shm": disk(at="/dev")}),
    ("directory-hangs", {f"results.write.folders.{ROOT}": {"at": ROOT, "late": True}}),
    ("directory-not-writable", {f"results.write.folders.{ROOT}": {"at": ROOT, "error": "read-only file system"}}),
    ("directory-slow", {f"results.write.folders.{ROOT}": {"at": ROOT, "uid": 0, "wall_s": 4.2}}),
    ("path-not-found", {"results.paths.sizes./data": {"missing": True, "error": "no such file"}}),
    ("path-differs", {"results.paths.sizes./data": {"kind": "folder", "bytes": 9 * GIB, "files": 12}}),
    ("path-unreadable", {"results.paths.sizes./data": {"error": "permission denied"}}),
    ("mtu-differs", {"results.mtus.texts./sys/class/net/eth0/mtu": "1400\n"}),
    ("no-route", {"report.routes": [["eth0", "10.0.9.1", ["n1", "n2"]]]}),
    ("peer-is-loopback", {"report.routes": [["lo", "127.0.0.1", None]]}),
    ("peer-timeout", connection_test("silent", "no answer")),
    ("peer-refuses", connection_test("refused", "connection refused")),
    ("hccl-port-taken", {"results.ports.taken": {str(base): HOLDER for base in candidate_bases("doctor", {})}}),
    ("ports-not-reserved", {"results.port-ranges.texts./proc/sys/net/ipv4/ip_local_port_range": "1024 65535\n"}),
    ("python-missing", {"results.python": ran("", code=127, setup="no-command", err="python3: not found")}),
    *(
        (code, {"results.container": image(code)})
        for code in "runtime-missing daemon-down runtime-refused image-missing".split()
    ),
    *((code, {"results.container": image(code)}) for code in ("image-pull-failed", "container-failed")),
    ("glibc-too-old", {"results.container": image("container-failed", detail=OLD_GLIBC)}),
    ("glibc-too-old", {"results.python": ran("", code=1, err=OLD_GLIBC)}),
    ("image-differs", {"results.container": image(id="feed")}),
    ("python-differs", {"results.python": python("3.8.10")}),
    ("package-differs", {"results.python": python(numpy="2.0.0")}),
    ("torch-npu-torch", {"results.python": python(torch="2.6.0")}),
    ("variable-wrong", {"results.environ": environ(HCCL_CONNECT_TIMEOUT="soon")}),
    ("variable-slows", {"results.environ": environ(CUDA_LAUNCH_BLOCKING="1")}),
    ("threads-many", {"results.environ": environ(OMP_NUM_THREADS="4000")}),
    ("interface-missing", {"results.environ": environ(GLOO_SOCKET_IFNAME="enp9")}),
    ("if-ip-foreign", {"results.environ": environ(HCCL_IF_IP="10.99.0.1")}),
    (
        "allocator-setting-new",
        {"results.environ": environ(PYTORCH_NPU_ALLOC_CONF="pin_memory_expandable_segments:True")},
    ),
    ("visible-beyond", {"results.environ": environ(ASCEND_RT_VISIBLE_DEVICES="6,7,8")}),
]
FAULTS = [*OF_THE_NPUS, *OF_THE_ANSWERS]

# What else a fault makes true of its own node.
COMPANIONS = {
    "driver-differs": {"driver-firmware"},
    "cann-differs": {"torch-npu-cann"},
    "cann-mixed": {"hccl-build-differs"},
    "npu-throttled": {"npu-hot"},
    "python-differs": {"torch-npu-python"},
    "torch-npu-torch": {"package-differs"},
    "device-ip-family": {"hccn-conf-stale", "device-net-health"},
    "npu-smi-hangs": {"probe-timeout"},
    "hccn-hangs": {"probe-timeout"},
    "limit-files": {"limits-differ"},
    "variable-wrong": {"variable-differs"},
    "variable-slows": {"variable-differs"},
    "allocator-setting-new": {"variable-differs"},
}

# How severe it is; the others are warnings.
SEVERITIES = {
    Severity.FAIL: (
        "device-file-closed device-file-missing device-unreachable directory-hangs directory-not-writable disk-full "
        "hccn-hangs if-ip-foreign inodes-low interface-missing no-route npu-smi-error npu-smi-hangs npu-smi-missing "
        "null-device-broken path-not-found path-unreadable peer-is-loopback peer-refuses peer-timeout python-missing "
        "torch-npu-torch variable-wrong visible-beyond runtime-missing daemon-down runtime-refused image-missing "
        "image-pull-failed container-failed image-differs glibc-too-old"
    ),
    Severity.NOTE: (
        "cpus-differ kernel-differs limits-differ login-noise npu-more os-differs package-differs user-differs"
    ),
}
FOR_NPUS = {"hccl-port-taken", "ports-not-reserved", "variable-wrong", "allocator-setting-new"}
SEVERITY = {
    **{code: Severity(severity) for _, code, severity, *_ in NPU_FAULTS},
    **{code: severity for severity, codes in SEVERITIES.items() for code in codes.split()},
}


def cluster(scenarios, changes=None):
    """The world of nodes n1, n2, …: their scenarios (None: no NPUs), and what stands elsewhere in their answers."""
    names = [f"n{number}" for number in range(1, len(scenarios) + 1)]
    answers = []
    for number, (name, scenario) in enumerate(zip(names, scenarios), start=1):
        raw = {}
        if scenario is not None:
            pings = [(3, f"29.1.{1 + number}.13")] if scenario.family.speed_mbit > 0 else ()
            raw = raw_answers(replace(scenario, number=number), pings=pings)
        answer = recorded_answer(name, number, names, raw)
        answer["results"]["paths"] = {"sizes": {"/data": {"kind": "folder", "bytes": 10 * GIB, "files": 12}}}
        answer["results"].update(environ=environ(), python=python(), container=image())
        for place, value in (changes or {}).get(name, {}).items():
            put(answer, place, value)
        answers.append(answer)
    return read_world([SurveyReply.from_header(one) for one in answers], None, device_type="npu", now_s=0.0)


def put(answer, place, value):
    """`value` at results.x.y; the last part may hold dots where a key of the answer does."""
    words = place.split(".")
    while len(words) > 1 and words[0] in answer and isinstance(answer[words[0]], dict):
        answer, words = answer[words[0]], words[1:]
    answer[".".join(words)] = value


def test_every_one_of_a_cluster_of_faults_is_found_on_its_node_and_the_sound_nodes_are_left_in_peace():
    assert len(FAULTS) >= 45 and len({code for code, _ in FAULTS}) >= 45
    plants = [plant for _, plant in FAULTS]
    scenarios = [Scenario()] * SOUND_NODES + [one if isinstance(one, Scenario) else Scenario() for one in plants]
    sick = {f"n{number}": row for number, row in enumerate(FAULTS, start=SOUND_NODES + 1)}
    changes = {name: plant for name, (_, plant) in sick.items() if isinstance(plant, dict)}
    told = {}
    world = cluster(scenarios, changes)
    for finding in run_checks(world):
        for host in finding.hosts:
            told.setdefault(host, set()).add(finding.code)
            if host in sick and sick[host][0] == finding.code:
                assert finding.severity is SEVERITY.get(finding.code, Severity.WARN), finding
    missed = {name: (code, told.get(name)) for name, (code, _) in sick.items() if code not in told.get(name, ())}
    assert missed == {}
    beyond = {name: told[name] - {code} - COMPANIONS.get(code, set()) for name, (code, _) in sick.items()}
    assert {name: (sick[name][0], codes) for name, codes in beyond.items() if codes} == {}
    assert set(told) == set(sick)
    of_hosts = {code for check in CHECKS if check not in NPU_CHECKS for code in check.codes} - FOR_NPUS
    of_cpus = {(host, one.code) for one in run_checks(replace(world, device_type="cpu")) for host in one.hosts}
    assert {(name, code) for name, (code, _) in sick.items() if code in of_hosts} <= of_cpus
    assert not {code for _, code in of_cpus} & FOR_NPUS


def test_the_codes_of_the_table_are_those_that_checks_can_find():
    assert {code for code, _ in FAULTS} <= {code for check in CHECKS for code in check.codes}


@pytest.mark.parametrize(("chip", "layout"), LAYOUTS)
def test_a_sound_cluster_of_every_chip_in_every_layout_has_nothing_to_be_told(chip, layout):
    cards = max(1, 8 // FAMILIES[chip].dies)
    world = cluster([Scenario(chip=chip, layout=layout, cards=cards)] * 3)
    assert run_checks(world) == run_checks(replace(world, device_type=None)) == ()
