"""What to ask of every node: one table of questions, each with the reading of its answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ascendrun.core.node_messages import rendered
from ascendrun.core.reports import NodeReport
from ascendrun.health.survey import parsers, scripts
from ascendrun.health.survey.facts import NodeFacts
from ascendrun.health.survey.npu_facts import read_npu
from ascendrun.health.survey.npu_probes import NPU_PROBES
from ascendrun.health.survey.survey_request import Item, Probe, Wish

FULL_PYTHON_S = 60.0
"""Importing torch from a cold network disk takes that long, and is a finding of its own."""


def _always(item: Item) -> Any:
    return lambda wish: item


def _files(*paths: str) -> Any:
    return _always({"kind": "files", "paths": list(paths)})


def _argv(*words: str) -> Any:
    return _always({"kind": "argv", "argv": list(words)})


def _python(script: str, **more: Any) -> Any:
    def ask(wish: Wish) -> Item | None:
        if wish.python is None:
            return None
        return {"kind": "shell_argv", "argv": [wish.python, "-c", script, wish.family or ""], **more}

    return ask


def _folders(wish: Wish) -> tuple[str, ...]:
    return tuple(dict.fromkeys((wish.root, *wish.folders))) if wish.root else wish.folders


HOST_PROBES: tuple[Probe, ...] = (
    Probe("os", _files("/etc/os-release", "/usr/lib/os-release"), parsers.read_os_name),
    Probe("limits", _always({"kind": "limits"}), parsers.read_limits),
    Probe("disk", lambda wish: {"kind": "disk", "paths": [*_folders(wish), "/dev/shm", "/tmp"]}, parsers.read_disks),
    Probe("write", lambda wish: {"kind": "write_probe", "paths": list(_folders(wish))}, parsers.read_writes),
    Probe(
        "ports", lambda wish: {"kind": "bind", "ports": list(wish.ports)} if wish.ports else None, parsers.read_taken
    ),
    Probe(
        "port-ranges",
        _files("/proc/sys/net/ipv4/ip_local_port_range", "/proc/sys/net/ipv4/ip_local_reserved_ports"),
        parsers.read_port_ranges,
    ),
    Probe("addresses", _argv("ip", "-o", "address", "show"), parsers.read_addresses),
    Probe("sshd", lambda wish: {"kind": "argv", "argv": ["sh", "-c", scripts.SSHD]}, parsers.read_sshd),
    Probe(
        "logind",
        _files(
            "/etc/systemd/logind.conf", "/etc/systemd/logind.conf.d/*.conf", "/usr/lib/systemd/logind.conf.d/*.conf"
        ),
        parsers.read_logind,
    ),
    Probe("touch", lambda wish: None, parsers.read_touches),  # asked in the second round: head/survey/doctor.py
    Probe("linger", _always({"kind": "listdir", "path": "/var/lib/systemd/linger"}), parsers.read_names),
    Probe(
        "paths",
        lambda wish: {"kind": "size", "paths": list(wish.paths)} if wish.paths else None,
        parsers.read_sizes,
        is_full=False,
    ),
    Probe(
        "runtime",
        lambda wish: (
            None
            if wish.container is None
            else {"kind": "argv", "argv": [wish.container, "version", "--format", "{{.Server.Version}}"]}
        ),
        parsers.read_runtime,
        reads_errors=True,
    ),
)

JOB_PROBES: tuple[Probe, ...] = (
    Probe("python", _python(scripts.VERSIONS), parsers.read_python, reads_errors=True),
    Probe(
        "environ", _always({"kind": "shell_argv", "argv": ["env", "-0"], "max_bytes": 1 << 20}), parsers.read_environ
    ),
    Probe(
        "torch", _python(scripts.TORCH, timeout_s=FULL_PYTHON_S), parsers.read_torch, is_full=True, reads_errors=True
    ),
)

PROBES: tuple[Probe, ...] = (*HOST_PROBES, *JOB_PROBES, *NPU_PROBES)


def survey_items(wish: Wish) -> list[dict[str, Any]]:
    """The items of the survey that this wish is answered by."""
    items = []
    for probe in PROBES:
        if probe.is_full and not wish.is_full and not (wish.names and probe.name in wish.names):
            continue
        if wish.names is not None and probe.name not in wish.names:
            continue
        item = probe.ask(wish)
        if item is not None:
            items.append({"name": probe.name, **item})
    return items


def read_answers(results: Mapping[str, Any]) -> dict[str, Any]:
    """What each probe's answer means, by its name; None: could not look. Never raises, whatever a node says."""
    said: dict[str, Any] = {}
    for probe in PROBES:
        raw = results.get(probe.name)
        if not isinstance(raw, dict) or ("error" in raw and not probe.reads_errors):
            continue
        try:
            said[probe.name] = probe.read(rendered(raw))
        except Exception:  # a foreign tool's text may be anything; a reader that stumbles over it has read nothing
            said[probe.name] = None
    return said


def late_probes(results: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the questions that had no answer in time: what hangs there is worth knowing by itself."""
    return tuple(
        sorted(
            name for name, raw in results.items() if isinstance(raw, dict) and (raw.get("late") or raw.get("timed_out"))
        )
    )


def read_facts(report: NodeReport, hello: Mapping[str, Any], results: Mapping[str, Any]) -> NodeFacts:
    """From a node's report, its agent's greeting and its raw survey answers."""
    said = read_answers(results)
    login = hello.get("login") or {}
    return NodeFacts(
        host=report.host,
        is_local=hello.get("is_local"),
        root=report.root,
        login_s=login.get("wait_s"),
        login_noise=login.get("noise"),
        user=report.user,
        uid=hello.get("uid"),
        hostname=report.hostname,
        boot_id=report.boot_id or None,
        machine_id=report.machine_id or None,
        kernel=report.kernel,
        arch=report.arch,
        os_name=said.get("os"),
        cpus=report.cpus,
        memory_bytes=report.memory_bytes,
        agent_python=report.python_version,
        clock_offset_s=report.clock_offset_s,
        limits=said.get("limits"),
        sshd=said.get("sshd"),
        kills_user_processes=said.get("logind"),
        lingering_users=said.get("linger"),
        disks=said.get("disk"),
        writes=said.get("write"),
        paths=said.get("paths"),
        python=said.get("python"),
        torch=said.get("torch"),
        environ=said.get("environ"),
        routes=report.routes,
        addresses=said.get("addresses"),
        taken_ports=said.get("ports"),
        port_ranges=said.get("port-ranges"),
        touched=said.get("touch"),
        runtime=said.get("runtime"),
        npu=read_npu(said),
        late=late_probes(results),
    )
