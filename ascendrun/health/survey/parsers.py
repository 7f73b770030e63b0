"""Parsers of raw probe results: text in, values out; None: the result does not contain the value."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ascendrun.health.survey.facts import (
    ConnectionTest,
    Disk,
    PathSize,
    PortHolder,
    PythonFacts,
    SshdFacts,
    TorchFacts,
    WriteResult,
)
from ascendrun.health.survey.survey_request import Raw
from ascendrun.text import Text

AGENTS_MARK = "ASCENDRUN_EXEC"
"""Marks the processes that the agent started; a rank has no such variable."""


def read_os_name(raw: Raw) -> str | None:
    for text in raw["texts"].values():
        match = re.search(r'^PRETTY_NAME="?([^"\n]*)"?', text, re.MULTILINE)
        if match:
            return match.group(1)
    return None


def read_limits(raw: Raw) -> dict[str, tuple[int | None, int | None]]:
    return {name: (pair[0], pair[1]) for name, pair in raw["limits"].items()}


def read_disks(raw: Raw) -> dict[str, Disk]:
    names = ("at", "free_bytes", "total_bytes", "free_inodes", "total_inodes")
    more = {"kind": "kind", "is_remote": "remote", "device": "device"}
    return {
        path: Disk(**{name: disk[name] for name in names}, **{name: disk.get(key) for name, key in more.items()})
        for path, disk in raw["disks"].items()
        if "error" not in disk
    }


def read_writes(raw: Raw) -> dict[str, WriteResult]:
    names = ("error", "code", "uid", "wall_s")
    return {
        path: WriteResult(result.get("at", path), is_late=bool(result.get("late")), **_some(result, *names))
        for path, result in raw["folders"].items()
    }


def read_taken(raw: Raw) -> dict[int, PortHolder]:
    return {int(port): PortHolder(**_some(who, "uid", "pid", "command", "tag")) for port, who in raw["taken"].items()}


def read_port_ranges(raw: Raw) -> tuple[tuple[int, int], tuple[tuple[int, int], ...]] | None:
    """Return (range of outgoing connections, ranges reserved from it)."""
    texts = {path.rpartition("/")[2]: text for path, text in raw["texts"].items()}
    found = re.findall(r"\d+", texts.get("ip_local_port_range", ""))
    if len(found) != 2:
        return None
    reserved = []
    for part in texts.get("ip_local_reserved_ports", "").strip().split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match:
            reserved.append((int(match.group(1)), int(match.group(2) or match.group(1))))
    return (int(found[0]), int(found[1])), tuple(reserved)


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


def read_sshd(raw: Raw) -> SshdFacts | None:
    found: dict[str, str] = {}
    for line in raw.get("out", "").splitlines():
        words = line.split()
        if len(words) >= 2:
            found.setdefault(words[0].lower(), words[1])
    if not found:
        return None
    sessions = found.get("maxsessions", "")
    return SshdFacts(max_startups=found.get("maxstartups"), max_sessions=int(sessions) if sessions.isdigit() else None)


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


def read_names(raw: Raw) -> tuple[str, ...]:
    return tuple(str(name) for name in raw["names"])


def read_sizes(raw: Raw) -> dict[str, PathSize]:
    return {
        path: PathSize(
            kind=one.get("kind"),
            size_bytes=one.get("bytes"),
            files=one.get("files"),
            truncated=bool(one.get("truncated")),
            missing=bool(one.get("missing")),
            error=None if one.get("missing") else one.get("error"),
        )
        for path, one in raw["sizes"].items()
    }


def read_python(raw: Raw) -> PythonFacts:
    values = _last_json(raw.get("out", ""))
    if values is None:
        return PythonFacts(setup=raw.get("setup"), error=failure_of(raw), is_missing=bool(raw.get("missing")))
    modules, locks = values.get("modules"), values.get("locks")
    return PythonFacts(
        setup=raw.get("setup"),
        executable=values.get("executable"),
        version=values.get("version"),
        modules=dict(modules) if isinstance(modules, dict) else None,
        locks=dict(locks) if isinstance(locks, dict) else {},
        start_s=raw.get("wall_s"),
    )


def read_torch(raw: Raw) -> TorchFacts:
    values = _last_json(raw.get("out", ""))
    if values is None:
        return TorchFacts(error=failure_of(raw), step="import torch")
    names = ("torch", "torch_npu", "import_s", "devices", "backend", "has_backend", "step", "error")
    return TorchFacts(noise=_last_line(raw.get("err", "")), **_some(values, *names))


def read_environ(raw: Raw) -> dict[str, str] | None:
    if raw.get("code") != 0:
        return None
    pairs = (pair.partition("=") for pair in raw["out"].split("\0") if "=" in pair)
    return {name: value for name, _, value in pairs if name != AGENTS_MARK}


def read_connection_tests(raw: Raw) -> tuple[ConnectionTest, ...]:
    return tuple(
        ConnectionTest(
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
