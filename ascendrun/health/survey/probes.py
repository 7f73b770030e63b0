"""The table of probes of every node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ascendrun.core.dataclass import load_dataclass
from ascendrun.core.node_messages import with_texts
from ascendrun.core.reports import NodeReport
from ascendrun.health.survey import npu_parsers, npu_scripts, parsers, scripts
from ascendrun.health.survey.facts import Lease, NodeFacts
from ascendrun.health.survey.npu_facts import read_npu
from ascendrun.health.survey.npu_probes import NPU_PROBES
from ascendrun.health.survey.survey_request import Item, Probe, SurveyRequest

FULL_PYTHON_S = 60.0
"""Importing torch from a cold network disk takes that long, and is a finding."""
TRAINING_S = 25.0
"""Headers of 17 weight files and data of 32 MB, from a cold disk."""


def _always(item: Item) -> Any:
    return lambda request: item


def _files(*paths: str) -> Any:
    return _always({"kind": "files", "paths": list(paths)})


def _argv(*argv: str) -> Any:
    return _always({"kind": "argv", "argv": list(argv)})


def _python(script: str, **more: Any) -> Any:
    def ask(request: SurveyRequest) -> Item | None:
        if request.python is None:
            return None
        argv = [request.python, "-c", script, request.device_type or ""]
        return {"kind": "shell_argv", "argv": argv, "timeout_s": request.shell_s, **more}

    return ask


def _directories(request: SurveyRequest) -> tuple[str, ...]:
    return tuple(dict.fromkeys((request.root, *request.folders))) if request.root else request.folders


HOST_PROBES: tuple[Probe, ...] = (
    Probe("os", _files("/etc/os-release", "/usr/lib/os-release"), parsers.read_os_name),
    Probe("limits", _always({"kind": "limits"}), parsers.read_limits),
    Probe(
        "disk",
        lambda request: {"kind": "disk", "paths": [*_directories(request), "/dev/shm", "/tmp"]},
        parsers.read_disks,
    ),
    Probe("write", lambda request: {"kind": "write_probe", "paths": list(_directories(request))}, parsers.read_writes),
    Probe(
        "ports",
        lambda request: {"kind": "bind", "ports": list(request.ports)} if request.ports else None,
        parsers.read_taken,
    ),
    Probe(
        "leases",
        lambda request: {"kind": "leases"} if request.device_type != "cpu" else None,
        lambda raw: tuple(load_dataclass(Lease, row) for row in raw["leases"]),
    ),
    Probe(
        "gpu-processes",
        lambda request: (
            {"kind": "argv", "argv": ["sh", "-c", npu_scripts.GPUS]} if request.device_type in (None, "cuda") else None
        ),
        npu_parsers.read_gpu_processes,
    ),
    Probe(
        "port-ranges",
        _files("/proc/sys/net/ipv4/ip_local_port_range", "/proc/sys/net/ipv4/ip_local_reserved_ports"),
        parsers.read_port_ranges,
    ),
    Probe("addresses", _argv("ip", "-o", "address", "show"), parsers.read_addresses),
    Probe("sshd", lambda request: {"kind": "argv", "argv": ["sh", "-c", scripts.SSHD]}, parsers.read_sshd),
    Probe(
        "logind",
        _files(
            "/etc/systemd/logind.conf", "/etc/systemd/logind.conf.d/*.conf", "/usr/lib/systemd/logind.conf.d/*.conf"
        ),
        parsers.read_logind,
    ),
    Probe(
        "connection-tests", lambda request: None, parsers.read_connection_tests
    ),  # sent in the second round: head/survey/doctor.py
    Probe("null-device", _argv("stat", "-L", "-c", "%F %t,%T %a", "/dev/null"), parsers.read_null_device),
    Probe("linger", _always({"kind": "listdir", "path": "/var/lib/systemd/linger"}), parsers.read_names),
    Probe(
        "paths",
        lambda request: {"kind": "size", "paths": list(request.paths)} if request.paths else None,
        parsers.read_sizes,
        is_full=False,
    ),
    Probe(
        "training",
        lambda request: (
            {"kind": "training", "paths": list(request.training), "timeout_s": TRAINING_S} if request.training else None
        ),
        lambda raw: raw["paths"],
    ),
)

JOB_PROBES: tuple[Probe, ...] = (
    Probe("python", _python(scripts.VERSIONS), parsers.read_python, reads_errors=True),
    Probe(
        "environ",
        lambda request: {
            "kind": "shell_argv",
            "argv": ["env", "-0"],
            "max_bytes": 1 << 20,
            "timeout_s": request.shell_s,
        },
        parsers.read_environ,
    ),
    Probe(
        "torch", _python(scripts.TORCH, timeout_s=FULL_PYTHON_S), parsers.read_torch, is_full=True, reads_errors=True
    ),
)

PROBES: tuple[Probe, ...] = (*HOST_PROBES, *JOB_PROBES, *NPU_PROBES)


def survey_items(request: SurveyRequest) -> list[dict[str, Any]]:
    """Return the survey items of a request."""
    items = []
    for probe in PROBES:
        if probe.is_full and not request.is_full and not (request.names and probe.name in request.names):
            continue
        if request.names is not None and probe.name not in request.names:
            continue
        item = probe.ask(request)
        if item is not None:
            items.append({"name": probe.name, **item})
    return items


def read_results(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of each probe by its name; None: unknown. Never raises."""
    values: dict[str, Any] = {}
    for probe in PROBES:
        raw = results.get(probe.name)
        if not isinstance(raw, dict) or ("error" in raw and not probe.reads_errors):
            continue
        try:
            values[probe.name] = probe.read(with_texts(raw))
        except Exception:  # output of other tools may be anything; unreadable output is unknown
            values[probe.name] = None
    return values


def late_probes(results: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the probes that did not return in time."""
    return tuple(
        sorted(
            name for name, raw in results.items() if isinstance(raw, dict) and (raw.get("late") or raw.get("timed_out"))
        )
    )


_OF_REPORT = (
    "is_local", "root", "login_s", "login_noise", "user", "uid", "hostname", "kernel", "arch", "cpus",
    "memory_bytes", "clock_offset_s", "routes", "machine_key", "neighbours",
)  # fmt: skip
_OF_PROBES: Mapping[str, str] = {
    "os_name": "os", "limits": "limits", "sshd": "sshd", "kills_user_processes": "logind",
    "null_device": "null-device",
    "lingering_users": "linger", "disks": "disk", "writes": "write", "paths": "paths", "python": "python",
    "torch": "torch", "environ": "environ", "addresses": "addresses", "taken_ports": "ports",
    "port_ranges": "port-ranges", "connection_tests": "connection-tests",
    "training": "training",
    "leases": "leases", "gpu_processes": "gpu-processes",
}  # fmt: skip
"""Fields of NodeFacts, by the report and by the probe that reads them."""


def read_facts(report: NodeReport, results: Mapping[str, Any]) -> NodeFacts:
    """Return facts from a node's report and its raw survey results."""
    values = read_results(results)
    return NodeFacts(
        host=report.host,
        boot_id=report.boot_id or None,
        machine_id=report.machine_id or None,
        agent_python=report.python_version,
        npu=read_npu(values),
        late=late_probes(results),
        **{name: getattr(report, name) for name in _OF_REPORT},
        **{name: values.get(probe) for name, probe in _OF_PROBES.items()},
    )
