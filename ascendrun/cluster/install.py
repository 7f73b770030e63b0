"""Entries of this user that start the controller after a crash or a reboot: systemd user units, or crontab lines."""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ascendrun
from ascendrun.core.errors import InvalidInputError, PreflightError, Problem
from ascendrun.core.settings import SETTINGS, STATE_VARIABLE
from ascendrun.text import Text

LINE_LIMIT = 990
"""Characters of a command in a crontab: cron of Debian and of EL truncates longer ones."""
TOOL_S = 20.0
CRON_NAMES = frozenset(("cron", "crond", "fcron", "dcron", "cronie"))


@dataclass(frozen=True)
class Installation:
    """An entry. `kind`: systemd or crontab. `place`: its unit, or the marker of its lines.

    `warning`: what keeps it from working, None: nothing known.
    """

    kind: str
    place: str
    warning: Text | None = None


def key_of(state_dir: Path) -> str:
    return "ascendrun-" + hashlib.sha256(os.path.realpath(state_dir).encode()).hexdigest()[:8]


def install(state_dir: Path, environ: Mapping[str, str] = os.environ) -> Installation:
    """Write the entry of a state directory; repeated calls replace it. Raises PreflightError if neither tool works."""
    names = {setting.variable for setting in SETTINGS} | {"XDG_CONFIG_HOME"}
    kept = {name: environ[name] for name in sorted(names) if environ.get(name)}
    package_parent = str(Path(ascendrun.__file__).resolve().parent.parent)
    kept.update({STATE_VARIABLE: str(state_dir), "PYTHONPATH": package_parent})
    broken = [name for name, value in kept.items() if "\n" in value]
    if broken:
        message = Text("install.newline", "{name} contains a line break", name=broken[0])
        raise InvalidInputError([Problem(broken[0], None, None, message)])
    manager = _tool("systemctl", "--user", "show-environment")
    if manager is not None and manager.returncode == 0:
        return _install_units(state_dir, kept)
    lines = _crontab()
    if lines is None:
        raise PreflightError.of(
            "install.no-tool",
            "no systemd user manager and no crontab is usable here",
            "run `ascendrun controller ensure` when this machine or container starts, and once a minute",
        )
    key = key_of(state_dir)
    pairs = " ".join(f"{name}={shlex.quote(value)}" for name, value in kept.items())
    python = shlex.quote(sys.executable)
    command = f"{pairs} {python} -m ascendrun controller ensure >/dev/null 2>&1 # {key}".replace("%", "\\%")
    if len(command) > LINE_LIMIT:
        message = Text("install.too-long", "the crontab line exceeds {limit} characters", limit=LINE_LIMIT)
        raise InvalidInputError([Problem(str(state_dir), None, None, message)])
    _write_crontab([*_others(lines, key), f"@reboot {command}", f"* * * * * {command}"])
    return Installation("crontab", key, None if _cron_runs() else NO_CRON)


def uninstall(state_dir: Path) -> bool:
    """Remove the entry of a state directory and nothing else; return whether there was one."""
    key, found = key_of(state_dir), installed(state_dir)
    if any(path.exists() for path in _units(key)):
        _tool("systemctl", "--user", "disable", "--now", f"{key}.timer")
        for path in _units(key):
            path.unlink(missing_ok=True)
        _tool("systemctl", "--user", "daemon-reload")
    lines = _crontab() or []
    if len(_others(lines, key)) < len(lines):
        _write_crontab(_others(lines, key))
    return found is not None


def installed(state_dir: Path) -> Installation | None:
    """Return the entry of a state directory; None: it has none."""
    key = key_of(state_dir)
    if all(path.exists() for path in _units(key)):
        return Installation("systemd", f"{key}.timer", _linger_warning())
    lines = _crontab() or []
    if len(_others(lines, key)) < len(lines):
        return Installation("crontab", key, None if _cron_runs() else NO_CRON)
    return None


# systemd

UNITS = {
    "service": """[Unit]
Description=ascendrun controller of {state_dir}

[Service]
{environment}
ExecStart={python} -m ascendrun.head.loop.guard
KillMode=process
""",
    "timer": """[Unit]
Description=Start of the ascendrun controller of {state_dir}

[Timer]
OnStartupSec=5
OnUnitInactiveSec=60
AccuracySec=5

[Install]
WantedBy=timers.target
""",
}
"""KillMode: supervisors on this machine belong to jobs, and outlive the controller."""


def _install_units(state_dir: Path, kept: Mapping[str, str]) -> Installation:
    key = key_of(state_dir)
    values = {
        "state_dir": _unit_value(str(state_dir)),
        "python": f'"{_unit_value(sys.executable)}"',
        "environment": "\n".join(f'Environment="{name}={_unit_value(value)}"' for name, value in kept.items()),
    }
    for path, text in zip(_units(key), UNITS.values()):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(**values))
    for argv in (("daemon-reload",), ("enable", "--now", f"{key}.timer")):
        done = _tool("systemctl", "--user", *argv)
        if done is None or done.returncode:
            why = "" if done is None else done.stderr.strip()
            raise PreflightError.of("install.systemctl", "systemctl --user {verb} failed: {why}", verb=argv[0], why=why)
    return Installation("systemd", f"{key}.timer", _linger_warning())


def _unit_value(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")


def _units(key: str) -> tuple[Path, ...]:
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return tuple(config / "systemd" / "user" / f"{key}.{kind}" for kind in UNITS)


def _linger_warning() -> Text | None:
    done = _tool("loginctl", "show-user", str(os.getuid()), "--property=Linger")
    if done is not None and done.stdout.strip() == "Linger=yes":
        return None
    return Text("install.no-linger", "systemd ends it at logout: run `loginctl enable-linger`")


# cron

NO_CRON = Text("install.no-cron", "no cron daemon runs on this machine: the crontab has no effect")


def _crontab() -> list[str] | None:
    """Return the lines of this user's crontab, [] if it has none; None: there is no usable crontab command."""
    done = _tool("crontab", "-l")
    if done is None or (done.returncode and "no crontab" not in done.stderr):
        return None
    return [] if done.returncode else done.stdout.splitlines()


def _others(lines: list[str], key: str) -> list[str]:
    return [line for line in lines if not line.endswith(f"# {key}")]


def _write_crontab(lines: list[str]) -> None:
    done = _tool("crontab", "-", text="".join(f"{line}\n" for line in lines))
    if done is None or done.returncode:
        why = "" if done is None else done.stderr.strip()
        raise PreflightError.of("install.crontab", "crontab rejected the lines: {why}", why=why)


def _cron_runs() -> bool:
    for path in Path("/proc").glob("[0-9]*/comm"):
        try:
            if path.read_text().strip() in CRON_NAMES:
                return True
        except OSError:
            continue
    return False


def _tool(*argv: str, text: str | None = None) -> subprocess.CompletedProcess[str] | None:
    """Return the finished program; None: it is missing, or hangs."""
    environ = {**os.environ, "LC_ALL": "C"}
    try:
        return subprocess.run(
            argv, input=text if text is not None else "", capture_output=True, text=True, timeout=TOOL_S, env=environ
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
