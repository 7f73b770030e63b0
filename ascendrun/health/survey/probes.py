"""The request of a survey for one host, and the table of probes: the question, its parser, and the fact it sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Callable

from ascendrun.core.dataclass import dataclass, load_dataclass
from ascendrun.core.node_messages import with_texts
from ascendrun.core.reports import NodeReport
from ascendrun.health.survey import parsers, scripts
from ascendrun.health.survey.facts import ImageFacts, Lease, NodeFacts, NpuFacts

Item = Mapping[str, Any]
FULL_PYTHON_S = 60.0
"""Importing torch from a cold network disk takes that long, and is a finding."""
TRAINING_S = 25.0
"""Headers of 17 weight files and data of 32 MB, from a cold disk."""
DRIVER_NODES = ("davinci_manager", "devmm_svm", "hisi_hdc")
MOST_DEVICES = 32
CARDS_S, PORTS_S, PINGS_S = 45.0, 45.0, 30.0
LIGHT_PORT_ITEMS = ("link", "ip", "tls")
PORT_ITEMS = (*LIGHT_PORT_ITEMS, "net_health", "fec", "optical", "link_stat", "mtu")
CARD_VIEWS = ("ecc", "health", "board", "common")


@dataclass(frozen=True)
class SurveyRequest:
    """Query of doctor, the preflight checks or `env` on one host.

    `device_type`: npu, cuda or cpu; None: unknown, query all devices. `root`: the agent's directory on the host.
    `python`: the interpreter in the shell of the job, None: the job does not use Python. `shell_s`: limit of each probe
    in the shell of the job. `ports`: to test by bind. `folders`: directories that will be written. `paths`: must exist.
    `training`: of the files that a training reads. `is_full`: include slow probes. `names`: run these probes only,
    None: all that apply. `engine`: how the host is reached.
    """

    host: str
    device_type: str | None = None
    root: str = ""
    python: str | None = "python3"
    shell_s: float = 8.0
    ports: tuple[int, ...] = ()
    folders: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    training: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    is_full: bool = True
    names: tuple[str, ...] | None = None
    engine: str = "ssh"

    @property
    def may_have_npus(self) -> bool:
        return self.device_type in (None, "npu")


@dataclass(frozen=True)
class Probe:
    """A probe. `ask` returns the survey item (without its name), or the item of every request; None: not for this
    request. `fact`: the field of NodeFacts or NpuFacts with its value, "": the name with _. `lasts`: until a reboot, an
    installation or a change of the host's settings.

    `read` parses the raw result; None: unknown. It gets results with "error" only if `reads_errors`. An exception
    counts as None.
    """

    name: str
    ask: Callable[[SurveyRequest], Item | None] | Item | None
    read: Callable[[parsers.Raw], Any]
    fact: str = ""
    is_full: bool = False
    reads_errors: bool = False
    lasts: bool = False


_SSHD: Item = {"kind": "argv", "argv": ["sh", "-c", scripts.SSHD]}


def _files(*paths: str) -> Item:
    return {"kind": "files", "paths": list(paths)}


def _script(script: str, *arguments: str, kind: str = "argv", **more: Any) -> Item:
    return {"kind": kind, "argv": ["sh", "-c", script, "ascendrun", *arguments], **more}


def _if_npus(item: Item) -> Callable[[SurveyRequest], Item | None]:
    return lambda request: item if request.may_have_npus else None


def _python(script: str, **more: Any) -> Callable[[SurveyRequest], Item | None]:
    def ask(request: SurveyRequest) -> Item | None:
        if request.python is None:
            return None
        argv = [request.python, "-c", script, request.device_type or ""]
        return {"kind": "shell_argv", "argv": argv, "timeout_s": request.shell_s, **more}

    return ask


def _directories(request: SurveyRequest) -> list[str]:
    return list(dict.fromkeys((*([request.root] if request.root else ()), *request.folders)))


def _ports(request: SurveyRequest) -> Item | None:
    light, full = (_script(scripts.PORTS, *items) for items in (LIGHT_PORT_ITEMS, PORT_ITEMS))
    item = {**full, "timeout_s": PORTS_S, "max_bytes": 1 << 18} if request.is_full else light
    return item if request.may_have_npus else None


def _environ(request: SurveyRequest) -> Item:
    return {"kind": "shell_argv", "argv": ["env", "-0"], "max_bytes": 1 << 20, "timeout_s": request.shell_s}


def _training(request: SurveyRequest) -> Item | None:
    paths = list(request.training)
    return {"kind": "training", "paths": paths, "timeout_s": TRAINING_S} if paths else None


HOST_PROBES: tuple[Probe, ...] = (
    Probe("os", _files("/etc/os-release", "/usr/lib/os-release"), parsers.read_os_name, "os_name"),
    Probe("limits", {"kind": "limits"}, lambda raw: {name: (row[0], row[1]) for name, row in raw["limits"].items()}),
    Probe(
        "disk",
        lambda request: {"kind": "disk", "paths": [*_directories(request), "/dev/shm", "/tmp"]},
        parsers.read_disks,
        "disks",
    ),
    Probe(
        "write", lambda request: {"kind": "write_probe", "paths": _directories(request)}, parsers.read_writes, "writes"
    ),
    Probe(
        "ports",
        lambda request: {"kind": "bind", "ports": list(request.ports)} if request.ports else None,
        parsers.read_taken,
        "taken_ports",
    ),
    Probe(
        "leases",
        lambda request: {"kind": "leases"} if request.device_type != "cpu" else None,
        lambda raw: tuple(load_dataclass(Lease, row) for row in raw["leases"]),
    ),
    Probe(
        "gpu-processes",
        lambda request: (
            {"kind": "argv", "argv": ["sh", "-c", scripts.GPUS]} if request.device_type in (None, "cuda") else None
        ),
        parsers.read_gpu_processes,
    ),
    Probe(
        "port-ranges",
        _files("/proc/sys/net/ipv4/ip_local_port_range", "/proc/sys/net/ipv4/ip_local_reserved_ports"),
        parsers.read_port_ranges,
    ),
    Probe("addresses", {"kind": "argv", "argv": ["ip", "-o", "address", "show"]}, parsers.read_addresses),
    Probe("mtus", _files("/sys/class/net/*/mtu"), parsers.read_mtus),
    Probe("sshd", lambda request: _SSHD if request.engine == "ssh" else None, parsers.read_sshd, lasts=True),
    Probe(
        "logind",
        _files(
            "/etc/systemd/logind.conf", "/etc/systemd/logind.conf.d/*.conf", "/usr/lib/systemd/logind.conf.d/*.conf"
        ),
        parsers.read_logind,
        "kills_user_processes",
    ),
    Probe("connection-tests", None, parsers.read_connection_tests),
    Probe("listen", None, parsers.read_leased_block, "leased_block"),
    Probe(
        "null-device",
        {"kind": "argv", "argv": ["stat", "-L", "-c", "%F %t,%T %a", "/dev/null"]},
        parsers.read_null_device,
    ),
    Probe(
        "linger",
        {"kind": "listdir", "path": "/var/lib/systemd/linger"},
        lambda raw: tuple(map(str, raw["names"])),
        "lingering_users",
    ),
    Probe(
        "paths",
        lambda request: {"kind": "size", "paths": list(request.paths)} if request.paths else None,
        parsers.read_sizes,
    ),
    Probe("training", _training, lambda raw: raw["paths"]),
    Probe("python", _python(scripts.VERSIONS), parsers.read_python, reads_errors=True, lasts=True),
    Probe("environ", _environ, parsers.read_environ),
    Probe("container", None, lambda raw: load_dataclass(ImageFacts, raw)),
    Probe(
        "torch", _python(scripts.TORCH, timeout_s=FULL_PYTHON_S), parsers.read_torch, is_full=True, reads_errors=True
    ),
)

_NODES = [f"/dev/{name}" for name in (*DRIVER_NODES, *(f"davinci{number}" for number in range(MOST_DEVICES)))]
_CARDS = _script(scripts.CARDS, *CARD_VIEWS, timeout_s=CARDS_S, max_bytes=1 << 18)
_DEVICES = {"kind": "stat", "paths": _NODES, "below": "ASCENDRUN_SIM_ROOT"}
NPU_PROBES: tuple[Probe, ...] = (
    Probe("npu-smi", _if_npus(_script(scripts.TABLE)), parsers.read_table, "table", reads_errors=True),
    Probe("npu-devices", _if_npus(_DEVICES), parsers.read_devices, "devices"),
    Probe("npu-cards", _if_npus(_CARDS), parsers.read_cards, "cards", is_full=True),
    Probe("hccn", _ports, parsers.read_ports, "ports"),
    Probe("ascend-files", _if_npus(_script(scripts.FILES)), parsers.read_files, "files"),
    Probe(
        "cann", _if_npus(_script(scripts.CANN, kind="shell_argv")), parsers.read_shell_cann, "shell_cann", lasts=True
    ),
    Probe("hccn-pings", None, parsers.read_pings, "pings"),
)

PROBES: tuple[Probe, ...] = (*HOST_PROBES, *NPU_PROBES)
"""connection-tests, listen and hccn-pings are sent in a second round, when addresses are known: pair_tests.py.
container is a result of every survey whose shell has one."""
LASTING = frozenset(probe.name for probe in PROBES if probe.lasts)


def survey_items(request: SurveyRequest) -> list[dict[str, Any]]:
    """Return the survey items of a request."""
    items = []
    for probe in PROBES:
        if probe.is_full and not request.is_full and not (request.names and probe.name in request.names):
            continue
        if request.names is not None and probe.name not in request.names:
            continue
        item = probe.ask(request) if callable(probe.ask) else probe.ask
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
"""Fields of NodeFacts that the report has; others are those of the probes."""


def read_facts(report: NodeReport, results: Mapping[str, Any]) -> NodeFacts:
    """Return facts from a node's report and its raw survey results."""
    values = read_results(results)
    return NodeFacts(
        host=report.host,
        boot_id=report.boot_id or None,
        machine_id=report.machine_id or None,
        npu=read_npu(values),
        late=late_probes(results),
        **{name: getattr(report, name) for name in _OF_REPORT},
        **_facts_of(HOST_PROBES, values),
    )


def read_npu(values: Mapping[str, Any]) -> NpuFacts:
    """Return facts from the values by probe name (missing or None: unknown)."""
    return NpuFacts(**_facts_of(NPU_PROBES, values))


def _facts_of(probes: tuple[Probe, ...], values: Mapping[str, Any]) -> dict[str, Any]:
    return {probe.fact or probe.name.replace("-", "_"): values.get(probe.name) for probe in probes}
