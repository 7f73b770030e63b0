"""Requirements of a machine for a virtual cluster."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ascendrun.core.errors import AscendrunError

PROGRAMS = {"/usr/sbin/sshd": "openssh-server", "ssh": "openssh-client", "ip": "iproute2", "nsenter": "util-linux"}
_CAPABILITIES = {"NET_ADMIN": 12, "SYS_ADMIN": 21}


class NotSupportedError(AscendrunError):
    """This machine cannot carry a virtual cluster, or not this feature of it."""

    code = "not-supported"
    exit_code = 3


@dataclass(frozen=True)
class Requirement:
    """A missing requirement, and its fix."""

    missing: str
    fix: str
    is_package: ClassVar[bool] = False


class Package(Requirement):
    """A missing program; `fix` is the apt package."""

    is_package: ClassVar[bool] = True


def requirements() -> Sequence[Requirement]:
    """All that is missing, () when a cluster can start."""
    found: list[Requirement] = []
    for program, package in PROGRAMS.items():
        if shutil.which(program) is None and not os.access(program, os.X_OK):
            found.append(Package(program, package))
    found.extend(_refused_rights())
    if "overlay" not in Path("/proc/filesystems").read_text() and not Path("/sys/module/overlay").exists():
        found.append(Requirement("overlayfs in the kernel", "modprobe overlay, on the machine itself"))
    if not Path("/dev/null").is_char_device():
        found.append(Requirement("/dev/null as a device", "rm -f /dev/null && mknod -m 666 /dev/null c 1 3"))
    return found


def _refused_rights() -> Sequence[Requirement]:
    if os.geteuid() != 0:
        return [Requirement("root (namespaces, mounts and veths are refused to an ordinary user)", "run it with sudo")]
    held = int(_status_field("CapEff") or "0", 16)
    lacking = [name for name, bit in _CAPABILITIES.items() if not held >> bit & 1]
    if lacking:
        return [Requirement(f"capability {', '.join(lacking)}", "in a container: docker run --privileged")]
    return []


def _status_field(name: str) -> str | None:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return line.split()[1]
    return None


def require_all() -> None:
    """Raises NotSupportedError with everything that is missing and one line for apt."""
    missing = requirements()
    if not missing:
        return
    packages = sorted(item.fix for item in missing if item.is_package)
    others = [item.fix for item in missing if not item.is_package]
    ways = ([f"apt-get install -y {' '.join(packages)}"] if packages else []) + others
    raise NotSupportedError(
        f"a virtual cluster cannot start here, missing: {', '.join(item.missing for item in missing)}",
        hint="; ".join(ways),
    )


def find_shell(name: str) -> str:
    """The path of a login shell; raises NotSupportedError with the apt line when it is not installed."""
    path = name if name.startswith("/") and os.access(name, os.X_OK) else shutil.which(name)
    if path is None:
        raise NotSupportedError(f"the shell {name} is not installed", hint=f"apt-get install -y {name}")
    return path


def require_programs(what: str, packages: Mapping[str, str], *more: str) -> None:
    """Raises NotSupportedError with the programs that are missing. `packages`: of Debian, by program; `more`: of those
    without a program."""
    path = "/usr/sbin:/usr/bin:/sbin:/bin"
    missing = [program for program in packages if shutil.which(program, path=path) is None]
    if missing:
        hint = f"apt-get install -y --no-install-recommends {' '.join(sorted({*packages.values(), *more}))}"
        raise NotSupportedError(f"{what}: cannot start here, missing: {', '.join(missing)}", hint=hint)
