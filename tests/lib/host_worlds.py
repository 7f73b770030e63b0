"""Small worlds of three sound hosts, and what the checks find when one of them is not."""

from __future__ import annotations

from dataclasses import replace

from ascendrun.ascend.install import DriverVersion
from ascendrun.core.findings import Finding
from ascendrun.core.jobfile.spec import parse_stages
from ascendrun.core.reports import Route
from ascendrun.health.checks import run_checks
from ascendrun.health.survey import facts
from ascendrun.health.survey.check_context import CheckContext
from tests.lib.npu_worlds import plan_of

GIB = 1 << 30
NAMES = ("n1", "n2", "n3")
JOB = "command: [python3, train.py]\ndevices: {type: %s}\n"


def sound(host: str, **changes) -> facts.NodeFacts:
    """A node with nothing wrong, as one of NAMES."""
    number, peers = NAMES.index(host) + 1, [name for name in NAMES if name != host]
    node = facts.NodeFacts(
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
        sshd=facts.SshdFacts("10:30:100", 10),
        kills_user_processes=False,
        lingering_users=(),
        disks={
            "/root/.ascendrun": facts.Disk("/root", 900 * GIB, 1000 * GIB, 10**8, 10**8),
            "/dev/shm": facts.Disk("/dev/shm", 700 * GIB, 750 * GIB, 10**8, 10**8),
        },
        writes={"/ckpt": facts.WriteResult("/ckpt", uid=0, wall_s=0.01)},
        paths={"/data/train": facts.PathSize("folder", 10 * GIB, 12)},
        python=facts.PythonFacts(
            setup="fine",
            executable="/opt/py/bin/python",
            version="3.10.13",
            modules={"torch": "2.1.0", "numpy": "1.26.4"},
            start_s=0.1,
        ),
        torch=facts.TorchFacts(torch="2.1.0", import_s=2.0, devices=8, backend="gloo", has_backend=True),
        environ={"PATH": "/usr/bin", "LD_LIBRARY_PATH": "/usr/local/lib"},
        routes={peer: Route("eth0", f"10.0.0.{number}") for peer in peers},
        addresses={"lo": ("127.0.0.1",), "eth0": (f"10.0.0.{number}",)},
        mtus={"lo": 65536, "eth0": 1500},
        taken_ports={},
        port_ranges=((32768, 60999), ((60000, 60031),)),
        connection_tests=tuple(facts.ConnectionTest(peer, "10.0.0.9", 20001, wall_s=0.001) for peer in peers),
    )
    return replace(node, **changes)


def with_driver(version: str | None) -> facts.NpuFacts:
    return facts.NpuFacts(files=facts.InstallFiles(driver=DriverVersion(version=version)))


def world(*changed: facts.NodeFacts, family: str = "cpu", job: str = "", unreached=None) -> CheckContext:
    known = {name: sound(name) for name in NAMES}
    known.update({one.host: one for one in changed})
    spec = parse_stages(f"name: j\n{job}", "job.yaml", programs={})[0].spec if job else None
    return CheckContext(
        facts=known,
        device_type=family,
        job=spec,
        plan=plan_of(spec, known) if spec else None,
        unreached=unreached or {},
    )


def found(one: CheckContext, code: str, *, is_full: bool = True) -> list[Finding]:
    return [finding for finding in run_checks(one, is_full=is_full) if finding.code == code]
