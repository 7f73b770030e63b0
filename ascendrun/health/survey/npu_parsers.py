"""Parsers of raw results about Ascend devices, driver and CANN; None: the result does not contain the value."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Callable

from ascendrun.ascend import hccn, install, npu_smi, npu_smi_views, nvidia_smi
from ascendrun.ascend.reading import ToolError
from ascendrun.health.survey.npu_facts import (
    CardViews,
    DeviceNode,
    GpuProcess,
    InstallFiles,
    Owner,
    Port,
    PortPing,
    Ports,
    ShellCann,
    Table,
)
from ascendrun.health.survey.npu_scripts import Section, read_sections
from ascendrun.health.survey.survey_request import Raw

# Most nodes print the same, so results are cached. The texts are short, the parsers pure.
_once = lru_cache(maxsize=2048)

ITEMS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "link": ("link", _once(hccn.parse_link)),
    "ip": ("ip", hccn.parse_ip),
    "ip6": ("ip6", _once(hccn.parse_ip)),
    "tls": ("tls", _once(hccn.parse_tls)),
    "net_health": ("net_health", _once(hccn.parse_net_health)),
    "fec": ("fec", _once(hccn.parse_fec)),
    "optical": ("optical", hccn.parse_optical),
    "link_stat": ("history", hccn.parse_link_history),
}
"""By hccn_tool's item: the field of Port, and its parser."""

_ecc = _once(npu_smi_views.parse_ecc)
_health = _once(npu_smi_views.parse_health)
_board = _once(npu_smi_views.parse_board)
_driver = _once(install.parse_driver)
_firmware = _once(install.parse_firmware)
_install = _once(install.parse_install)
_cann = _once(install.parse_cann)
_components = _once(install.parse_components)


def read_table(raw: Raw) -> Table | None:
    sections = {section.labels[0]: section for section in read_sections(raw.get("out", ""))}
    if "none" in sections:
        return Table(info=None)
    if "info" not in sections:
        return Table(hung=True) if raw.get("timed_out") or raw.get("late") else None
    section = sections["info"]
    info = npu_smi.parse_info(section.text)
    owners = dict(_owners(sections["owners"].text)) if "owners" in sections else {}
    return Table(info=info, owners=owners, hung=section.hung)


def read_gpu_processes(raw: Raw) -> tuple[GpuProcess, ...] | None:
    """Return the processes that compute on GPUs; None: unknown, or there is no nvidia-smi."""
    sections = {section.labels[0]: section for section in read_sections(raw.get("out", ""))}
    if not {"gpus", "apps"} <= set(sections):
        return None
    apps = nvidia_smi.parse_apps(sections["apps"].text).apps
    if apps is None:
        return None
    numbers = {gpu.bus_id: gpu.index for gpu in nvidia_smi.parse_gpus(sections["gpus"].text).gpus or ()}
    owners = dict(_owners(sections["owners"].text)) if "owners" in sections else {}
    return tuple(GpuProcess(one.pid, numbers.get(one.bus_id), one.memory_mb, owners.get(one.pid)) for one in apps)


def _owners(text: str) -> list[tuple[int, Owner]]:
    found = []
    for line in text.splitlines():
        labels = line.split("\t")
        if len(labels) == 4 and labels[0].isdigit():
            found.append((int(labels[0]), Owner(user=labels[1], tag=labels[2] or None, command=labels[3].strip())))
    return found


def read_devices(raw: Raw) -> dict[str, DeviceNode]:
    """Return device files by name without /dev/; an existing, unreadable file is not open."""
    found: dict[str, DeviceNode] = {}
    for path, one in raw["stats"].items():
        if not one.get("missing"):
            is_open = bool(one.get("readable") and one.get("writable"))
            found[path.rpartition("/")[2]] = DeviceNode(
                is_open, int(one.get("mode", 0)), int(one.get("uid", 0)), int(one.get("gid", 0))
            )
    return found


def read_cards(raw: Raw) -> CardViews:
    ecc: dict[int, tuple[npu_smi_views.ChipEcc, ...]] = {}
    health: dict[int, tuple[npu_smi_views.ChipHealth, ...]] = {}
    boards: dict[int, npu_smi_views.Board] = {}
    for section in read_sections(raw.get("out", "")):
        npu_id = _number(section)
        if npu_id is None or section.code is None:
            continue
        if section.labels[0] == "ecc":
            ecc[npu_id] = _ecc(section.text).chips
        elif section.labels[0] == "health":
            health[npu_id] = _health(section.text).chips
        elif section.labels[0] == "board":
            boards[npu_id] = _board(section.text)
    return CardViews(ecc, health, boards)


def read_ports(raw: Raw) -> Ports | None:
    """Parse ports; None if hccn_tool is not found, or without devices to query."""
    sections = read_sections(raw.get("out", ""))
    if not sections:
        return None
    fields: dict[int, dict[str, Any]] = {}
    hung: list[str] = []
    errors: dict[tuple[str, str], ToolError] = {}
    for section in sections:
        device = _number(section)
        if device is None or section.labels[0] not in ITEMS:
            continue
        name, parse = ITEMS[section.labels[0]]
        fields.setdefault(device, {})
        if section.hung:
            hung.append(f"{section.labels[0]} of device {device}")
            continue
        parsed = parse(section.text)
        fields[device][name] = parsed
        errors.update(((one.kind, one.text), one) for one in parsed.errors)
    ports = {device: Port(**found) for device, found in sorted(fields.items())}
    return Ports(ports, tuple(hung), tuple(errors.values()))


def read_pings(raw: Raw) -> tuple[PortPing, ...]:
    found = []
    for section in read_sections(raw.get("out", "")):
        device, _, address = section.labels[-1].partition(" ")
        if section.labels[0] == "ping" and device.isdigit():
            found.append(PortPing(int(device), address, None if section.hung else hccn.parse_ping(section.text)))
    return tuple(found)


def read_files(raw: Raw) -> InstallFiles:
    texts: dict[str, list[str]] = {}
    set_env: list[str] = []
    for section in read_sections(raw.get("out", "")):
        if section.labels[0] == "set_env":
            set_env.append(section.labels[-1])
        else:
            texts.setdefault(section.labels[0], []).append(section.text)

    def one(label: str, parse: Callable[[str], Any]) -> Any:
        return parse(texts[label][0]) if label in texts else None

    canns = tuple(_cann(text) for text in texts.get("cann", ()))
    return InstallFiles(
        one("install", _install),
        one("driver", _driver),
        one("firmware", _firmware),
        canns,
        tuple(set_env),
        one("hccn", install.parse_hccn_conf),
    )


def read_shell_cann(raw: Raw) -> ShellCann | None:
    if raw.get("setup") in ("failed", "no-command"):
        return None
    sections = {section.labels[0]: section for section in reversed(read_sections(raw.get("out", "")))}
    place = sections.get("home") or sections.get("gone")
    if place is None:
        return ShellCann() if raw.get("code") == 0 else None
    version = _cann(sections["cann"].text) if "cann" in sections else None
    components = _components(sections["components"].text) if "components" in sections else None
    return ShellCann(place.labels[-1], "gone" in sections, version, components)


def _number(section: Section) -> int | None:
    return int(section.labels[-1]) if section.labels[-1].isdigit() else None
