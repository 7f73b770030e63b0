"""Parsers of raw probe results: text in, values out; None: the result does not contain the value."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Callable

from ascendrun.ascend import hccn, install, npu_smi, npu_smi_views, nvidia_smi
from ascendrun.ascend.reading import ToolError
from ascendrun.health.survey import facts
from ascendrun.health.survey.scripts import Section, read_sections
from ascendrun.text import Text
from ascendrun.text.format import numbers_in

Raw = Mapping[str, Any]
AGENTS_MARK = "ASCENDRUN_EXEC"
"""Marks the processes that the agent started; a rank has no such variable."""


def read_os_name(raw: Raw) -> str | None:
    for text in raw["texts"].values():
        match = re.search(r'^PRETTY_NAME="?([^"\n]*)"?', text, re.MULTILINE)
        if match:
            return match.group(1)
    return None


def read_disks(raw: Raw) -> dict[str, facts.Disk]:
    names = ("at", "free_bytes", "total_bytes", "free_inodes", "total_inodes")
    more = {"kind": "kind", "is_remote": "remote", "device": "device"}
    return {
        path: facts.Disk(**{name: disk[name] for name in names}, **{name: disk.get(key) for name, key in more.items()})
        for path, disk in raw["disks"].items()
        if "error" not in disk
    }


def read_writes(raw: Raw) -> dict[str, facts.WriteResult]:
    names = ("error", "code", "uid", "wall_s")
    return {
        path: facts.WriteResult(result.get("at", path), is_late=bool(result.get("late")), **_some(result, *names))
        for path, result in raw["folders"].items()
    }


def read_taken(raw: Raw) -> dict[int, facts.PortHolder]:
    return {
        int(port): facts.PortHolder(**_some(who, "uid", "pid", "command", "tag")) for port, who in raw["taken"].items()
    }


def read_port_ranges(raw: Raw) -> tuple[tuple[int, int], tuple[tuple[int, int], ...]] | None:
    """Return (range of outgoing connections, ranges reserved from it)."""
    texts = {path.rpartition("/")[2]: text for path, text in raw["texts"].items()}
    found = numbers_in(texts.get("ip_local_port_range", ""))
    if len(found) != 2:
        return None
    reserved = []
    for part in texts.get("ip_local_reserved_ports", "").strip().split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match:
            reserved.append((int(match.group(1)), int(match.group(2) or match.group(1))))
    return (found[0], found[1]), tuple(reserved)


def read_addresses(raw: Raw) -> dict[str, tuple[str, ...]] | None:
    """Return addresses by interface, from `ip -o address show`."""
    if raw.get("code") != 0:
        return None
    found: dict[str, list[str]] = {}
    for line in raw["out"].splitlines():
        match = re.match(r"\d+:\s+(\S+)\s+inet6?\s+([0-9a-fA-F.:]+)", line)
        if match:
            found.setdefault(match.group(1).partition("@")[0], []).append(match.group(2))
    return {name: tuple(addresses) for name, addresses in found.items()}


def read_mtus(raw: Raw) -> dict[str, int]:
    """Return the largest packet in bytes by interface."""
    return {path.split("/")[-2]: int(text) for path, text in raw["texts"].items() if text.strip().isdigit()}


def read_sshd(raw: Raw) -> facts.SshdFacts | None:
    found: dict[str, str] = {}
    for line in raw.get("out", "").splitlines():
        words = line.split()
        if len(words) >= 2:
            found.setdefault(words[0].lower(), words[1])
    if not found:
        return None
    sessions = found.get("maxsessions", "")
    return facts.SshdFacts(
        max_startups=found.get("maxstartups"), max_sessions=int(sessions) if sessions.isdigit() else None
    )


def read_logind(raw: Raw) -> bool | None:
    """Return whether logind kills a user's processes at logout; None: not configured (then it does not)."""
    found = None
    for text in raw["texts"].values():
        for value in re.findall(r"(?mi)^[ \t]*KillUserProcesses[ \t]*=[ \t]*(\w+)", text):
            found = value.lower() in ("yes", "true", "1", "on")
    return found


def read_null_device(raw: Raw) -> str | None:
    """Return what /dev/null is, as `stat -c "%F %t,%T %a"` prints it; "": it does not exist; None: unknown."""
    text = str(raw.get("out") or "").strip()
    return text or ("" if raw.get("code") == 1 else None)


def read_sizes(raw: Raw) -> dict[str, facts.PathSize]:
    return {
        path: facts.PathSize(
            kind=one.get("kind"),
            size_bytes=one.get("bytes"),
            files=one.get("files"),
            truncated=bool(one.get("truncated")),
            missing=bool(one.get("missing")),
            error=None if one.get("missing") else one.get("error"),
        )
        for path, one in raw["sizes"].items()
    }


def read_python(raw: Raw) -> facts.PythonFacts:
    values = _last_json(raw.get("out", ""))
    if values is None:
        return facts.PythonFacts(setup=raw.get("setup"), error=failure_of(raw), is_missing=bool(raw.get("missing")))
    modules, locks = values.get("modules"), values.get("locks")
    return facts.PythonFacts(
        setup=raw.get("setup"),
        executable=values.get("executable"),
        version=values.get("version"),
        modules=dict(modules) if isinstance(modules, dict) else None,
        locks=dict(locks) if isinstance(locks, dict) else {},
        start_s=raw.get("wall_s"),
    )


def read_torch(raw: Raw) -> facts.TorchFacts:
    values = _last_json(raw.get("out", ""))
    if values is None:
        return facts.TorchFacts(error=failure_of(raw), step="import torch")
    names = ("torch", "torch_npu", "import_s", "devices", "backend", "has_backend", "step", "error")
    return facts.TorchFacts(noise=_last_line(raw.get("err", "")), **_some(values, *names))


def read_environ(raw: Raw) -> dict[str, str] | None:
    if raw.get("code") != 0:
        return None
    pairs = (pair.partition("=") for pair in raw["out"].split("\0") if "=" in pair)
    return {name: value for name, _, value in pairs if name != AGENTS_MARK}


def read_leased_block(raw: Raw) -> tuple[int, facts.PortHolder] | None:
    """Return the port of the block that another run had leased throughout the connection test, and its owner."""
    row = raw.get("leased")
    return None if row is None else (int(row["port"]), facts.PortHolder(**_some(row, "uid", "tag")))


def read_connection_tests(raw: Raw) -> tuple[facts.ConnectionTest, ...]:
    return tuple(
        facts.ConnectionTest(
            str(test["peer"]), str(test["address"]), int(test["port"]), **_some(test, "error", "code", "wall_s")
        )
        for test in raw["tests"]
    )


def failure_of(raw: Raw) -> str | Text:
    """Return why a command has no result, in one line."""
    if raw.get("error"):
        return raw["error"] if isinstance(raw["error"], Text) else str(raw["error"])
    if raw.get("timed_out"):
        return Text("doctor.command-timeout", "killed after {seconds:.0f} s", seconds=raw.get("wall_s", 0))
    if raw.get("signal"):
        how = Text("doctor.command-signal", "signal {signal}", signal=raw["signal"])
    else:
        how = Text("doctor.command-code", "exit code {code}", code=raw.get("code"))
    line = _last_line(raw.get("err", "")) or _last_line(raw.get("out", ""))
    return Text("doctor.command-output", "{line} ({how})", line=line, how=how) if line else how


def _some(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return these values by name; None for a missing value."""
    return {name: values.get(name) for name in names}


def _last_json(text: str) -> Mapping[str, Any] | None:
    """Return the last line that is a JSON object; programs may print anything before it."""
    for line in reversed(text.strip().splitlines()):
        if line.startswith("{"):
            try:
                values = json.loads(line)
            except ValueError:
                continue
            return values if isinstance(values, dict) else None
    return None


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


# ---------------------------------------------------------------- devices

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
    "mtu": ("mtu", _once(hccn.parse_mtu)),
}
"""By hccn_tool's item: the field of Port, and its parser."""

_VIEWS: Mapping[str, Callable[[str], Any]] = {
    "ecc": _once(lambda text: npu_smi_views.parse_ecc(text).chips),
    "health": _once(lambda text: npu_smi_views.parse_health(text).chips),
    "board": _once(npu_smi_views.parse_board),
    "common": _once(lambda text: npu_smi_views.parse_common(text).chips),
}
_driver = _once(install.parse_driver)
_firmware = _once(install.parse_firmware)
_install = _once(install.parse_install)
_cann = _once(install.parse_cann)
_components = _once(install.parse_components)


def read_table(raw: Raw) -> facts.Table | None:
    sections = {section.labels[0]: section for section in read_sections(raw.get("out", ""))}
    if "none" in sections:
        return facts.Table(info=None)
    if "info" not in sections:
        return facts.Table(hung=True) if raw.get("timed_out") or raw.get("late") else None
    section = sections["info"]
    info = npu_smi.parse_info(section.text)
    owners = dict(_owners(sections["owners"].text)) if "owners" in sections else {}
    return facts.Table(info=info, owners=owners, hung=section.hung)


def read_gpu_processes(raw: Raw) -> tuple[facts.GpuProcess, ...] | None:
    """Return the processes that compute on GPUs; None: unknown, or there is no nvidia-smi."""
    sections = {section.labels[0]: section for section in read_sections(raw.get("out", ""))}
    if not {"gpus", "apps"} <= set(sections):
        return None
    apps = nvidia_smi.parse_apps(sections["apps"].text).apps
    if apps is None:
        return None
    numbers = {gpu.bus_id: gpu.index for gpu in nvidia_smi.parse_gpus(sections["gpus"].text).gpus or ()}
    owners = dict(_owners(sections["owners"].text)) if "owners" in sections else {}
    return tuple(facts.GpuProcess(one.pid, numbers.get(one.bus_id), one.memory_mb, owners.get(one.pid)) for one in apps)


def _owners(text: str) -> list[tuple[int, facts.Owner]]:
    found = []
    for line in text.splitlines():
        labels = line.split("\t")
        if len(labels) == 4 and labels[0].isdigit():
            found.append(
                (int(labels[0]), facts.Owner(user=labels[1], tag=labels[2] or None, command=labels[3].strip()))
            )
    return found


def read_devices(raw: Raw) -> dict[str, facts.DeviceNode]:
    """Return device files by name without /dev/; an existing, unreadable file is not open."""
    found: dict[str, facts.DeviceNode] = {}
    for path, one in raw["stats"].items():
        if not one.get("missing"):
            is_open = bool(one.get("readable") and one.get("writable"))
            found[path.rpartition("/")[2]] = facts.DeviceNode(
                is_open, int(one.get("mode", 0)), int(one.get("uid", 0)), int(one.get("gid", 0))
            )
    return found


def read_cards(raw: Raw) -> facts.CardViews:
    found: dict[str, dict[int, Any]] = {label: {} for label in _VIEWS}
    for section in read_sections(raw.get("out", "")):
        npu_id, label = _number(section), section.labels[0]
        if npu_id is not None and section.code is not None and label in _VIEWS:
            found[label][npu_id] = _VIEWS[label](section.text)
    return facts.CardViews(*found.values())


def read_ports(raw: Raw) -> facts.Ports | None:
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
    ports = {device: facts.Port(**found) for device, found in sorted(fields.items())}
    return facts.Ports(ports, tuple(hung), tuple(errors.values()))


def read_pings(raw: Raw) -> tuple[facts.PortPing, ...]:
    found = []
    for section in read_sections(raw.get("out", "")):
        device, _, address = section.labels[-1].partition(" ")
        if section.labels[0] == "ping" and device.isdigit():
            found.append(facts.PortPing(int(device), address, None if section.hung else hccn.parse_ping(section.text)))
    return tuple(found)


def read_files(raw: Raw) -> facts.InstallFiles:
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
    return facts.InstallFiles(
        one("install", _install),
        one("driver", _driver),
        one("firmware", _firmware),
        canns,
        tuple(set_env),
        one("hccn", install.parse_hccn_conf),
    )


def read_shell_cann(raw: Raw) -> facts.ShellCann | None:
    if raw.get("setup") in ("failed", "no-command"):
        return None
    sections = {section.labels[0]: section for section in reversed(read_sections(raw.get("out", "")))}
    place = sections.get("home") or sections.get("gone")
    if place is None:
        return facts.ShellCann() if raw.get("code") == 0 else None
    version = _cann(sections["cann"].text) if "cann" in sections else None
    components = _components(sections["components"].text) if "components" in sections else None
    return facts.ShellCann(place.labels[-1], "gone" in sections, version, components)


def _number(section: Section) -> int | None:
    return int(section.labels[-1]) if section.labels[-1].isdigit() else None
